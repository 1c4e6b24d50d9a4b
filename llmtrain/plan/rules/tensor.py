"""Rules for DeepSpeed's automatic tensor parallelism: the families that it splits correctly."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule
from llmtrain.plan.rules.slices import SLICED_FAMILIES

_WORK = (
    "arcee biogpt cohere cohere2 cohere_compass_text cwm ernie4_5 exaone4 gemma gemma2 gemma3_text "
    "gemma4_unified_text gpt_neo gpt_neox gpt_neox_japanese gptj granite helium hrm_text hyperclovax jais2 llama "
    "ministral ministral3 mistral nanochat nemotron olmo opt phi qwen2 qwen3 qwen3_5_text seed_oss smollm3 stablelm "
    "starcoder2 vaultgemma xglm youtu"
)
TENSOR_FAMILIES = frozenset(_WORK.split())
"""Model types that give correct results when split in two: those that work in `docs/reference/families_tensor.md`."""

EXPERT_TENSOR_FAMILIES = frozenset(("minimax_m3_vl_text", "mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe"))
"""Mixtures of experts whose attention is split correctly by the names of its projections while experts are distributed.
"""


@rule(
    "tensor.family",
    "AutoTP splits what a family's tp_plan or the names of its modules suggest; for most "
    "families it fails, or the model computes something else.",
    "run",
)
def family(draft: Draft) -> Iterator[Fault]:
    """Refuses families whose tiny copy fails or deviates when it is split (`docs/reference/families_tensor.md`)."""
    degree, facts = draft.parallel.tensor, draft.facts
    if degree == 1 or draft.parallel.pipeline > 1 or facts is None:  # within stages, llmtrain splits the model itself
        return
    if draft.parallel.expert > 1:
        if facts.experts and facts.model_type not in EXPERT_TENSOR_FAMILIES:
            message = (
                f"{degree} was given, but the attention of '{facts.model_type}' has projections other than "
                "q, k, v and o"
            )
            yield Fault("parallel.tensor", message, assignment(parallel__tensor=1))
    elif facts.model_type not in TENSOR_FAMILIES:
        message = f"{degree} was given, but the engine cannot split '{facts.model_type}' correctly"
        fix = assignment(parallel__tensor=1)
        if facts.model_type in SLICED_FAMILIES:
            message += "; within pipeline stages llmtrain splits it itself, correctly"
            fix += f", or {assignment(parallel__pipeline=2)}"
        yield Fault("parallel.tensor", message, fix)


RULES = (family,)
