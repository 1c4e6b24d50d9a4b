"""Rules for tensor parallelism: model families whose declared plan splits them correctly."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import TENSOR
from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule

_SLICED = (
    "afmoe arcee aria_text axk1 axk2 bailing_hybrid beam cohere cohere2 cohere2_moe cohere_compass_text cwm "
    "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo "
    "flint gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa "
    "gpt_neox granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text "
    "hunyuan_v1_moe hy_v3 hy_v4 hyperclovax jais2 jamba kimi_linear kolibri1 laguna lfm2_moe llama mellum "
    "mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat "
    "nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 "
    "qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text seed_oss smollm3 solar_open starcoder2 "
    "vaultgemma youtu"
)
SLICED_FAMILIES = frozenset(_SLICED.split())
"""Model types that give correct results on two ranks, as listed in `docs/reference/families_tensor.md`."""


EXPERT_TENSOR_FAMILIES = frozenset(("minimax_m3_vl_text", "mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe"))
"""Mixtures of experts whose attention is split correctly by the names of its projections if experts are distributed."""


@rule(
    "tensor.family",
    "Modules are split by the family's own tp_plan; without one, or with one that loses a gradient, the model would "
    "compute something else.",
    "run",
    axis=TENSOR,
)
def family(draft: Draft) -> Iterator[Fault]:
    """Refuses families whose tiny copy fails or deviates if it is split (`docs/reference/families_tensor.md`)."""
    parallel, facts = draft.parallel, draft.facts
    if facts is None:
        return
    message = ""
    if parallel.autotp_ranks > 1:
        if facts.experts and facts.model_type not in EXPERT_TENSOR_FAMILIES:
            message = f"the attention of '{facts.model_type}' has projections other than q, k, v and o"
    elif facts.model_type not in SLICED_FAMILIES:
        message = f"'{facts.model_type}' cannot be split correctly"
    if message:
        yield Fault("parallel.tensor", f"must be 1, not {parallel.tensor}: {message}", assignment(parallel__tensor=1))


@rule(
    "tensor.divides",
    "Each tensor parallel rank holds an equal part of every split weight.",
    "run",
    axis=TENSOR,
)
def divides(draft: Draft) -> Iterator[Fault]:
    """Refuses feed-forward layers and experts whose width is not a multiple of the degree."""
    ranks, facts = draft.parallel.split_ranks, draft.facts
    if facts is None or facts.weights is None:
        return
    rows = {weight for run in facts.weights.runs for weight in run.weights if "down_proj" in weight.name}
    uneven = sorted({weight.shape[-1] for weight in rows if weight.shape[-1] % ranks})
    if uneven:
        widths = " and ".join(str(width) for width in uneven)
        message = f"{ranks} does not divide the width {widths} of feed-forward layers"
        yield Fault("parallel.tensor", message, assignment(parallel__tensor=1))


RULES = (family, divides)
