"""Rules for expert parallelism. Its expert blocks replace the model's own and may compute something else."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import EXPERT
from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule

FP32_ROUTERS = ("deepseek_v2", "deepseek_v3")
"""Families that compute the router's logits in fp32 regardless of the weights' data type."""
RECORDED_PROBABILITIES = ("qwen3_5_moe_text",)
"""Families whose router loss expects logits, while the engine's block returns probabilities."""


@rule(
    "expert.router_noise",
    "AutoEP's router ignores `router_jitter_noise`, with no more than a line in its log.",
    "run",
    axis=EXPERT,
)
def router_noise(draft: Draft) -> Iterator[Fault]:
    """Refuses noise on the input of the router (`module_inject/auto_ep.py`)."""
    noise = draft.recipe.model.config.get("router_jitter_noise")
    if noise:
        message = f"{noise} has no effect with expert parallelism: the engine's router adds no noise"
        yield Fault("model.config.router_jitter_noise", message, assignment(model__config__router_jitter_noise=0.0))


@rule("expert.router_loss", "The load balance loss would apply a softmax to probabilities.", "run", axis=EXPERT)
def router_loss(draft: Draft) -> Iterator[Fault]:
    """Refuses families whose load balancing loss is wrong under AutoEP (`auto_ep_presets/qwen3_5_moe.py`)."""
    facts = draft.facts
    has_router_loss = draft.recipe.model.config.get("output_router_logits")
    if facts is not None and has_router_loss and facts.model_type in RECORDED_PROBABILITIES:
        message = f"with expert parallelism the load balance loss of '{facts.model_type}' would be wrong"
        fix = f"{assignment(model__config__output_router_logits='false')}, or {assignment(parallel__expert=1)}"
        yield Fault("model.config.output_router_logits", message, fix)


@rule("expert.router_precision", "The engine's router computes in the data type of the weights.", "run", axis=EXPERT)
def router_precision(draft: Draft) -> Iterator[Fault]:
    """Refuses lower precision for routers that compute in fp32, because tokens would be routed to other experts."""
    facts = draft.facts
    if facts is not None and draft.weight_dtype != "fp32" and facts.model_type in FP32_ROUTERS:
        message = (
            f"'{draft.parallel.precision}' is not supported for '{facts.model_type}' with expert parallelism: "
            f"the engine would route in {draft.weight_dtype} instead of fp32"
        )
        fix = f"{assignment(parallel__precision='autocast_bf16')}, or {assignment(parallel__expert=1)}"
        yield Fault("parallel.precision", message, fix)


@rule(
    "expert.loss_scale",
    "Each rank would lower its loss scale after overflows in its own experts only.",
    "run",
    axis=EXPERT,
)
def loss_scale(draft: Draft) -> Iterator[Fault]:
    """Refuses fp16 autocast, whose scaler only sees a rank's own gradients (`runtime/engine.py:_take_model_step`)."""
    if draft.parallel.precision == "autocast_fp16":
        message = (
            "'autocast_fp16' is not supported with expert parallelism: ranks hold different experts, "
            "and would skip different steps"
        )
        yield Fault("parallel.precision", message, assignment(parallel__precision="autocast_bf16"))


@rule(
    "expert.modules",
    "An expert that receives no token in a step has no gradient, and plain PyTorch does not "
    "update it; the engines reduce zeros for it, and apply weight decay.",
    "run",
)
def modules(draft: Draft) -> Iterator[Fault]:
    """Refuses models whose experts are separate modules. `transformers` stores the experts of a layer in one tensor."""
    facts, parallel = draft.facts, draft.parallel
    if facts is None or not facts.expert_modules:
        return
    if parallel.backend != "data_parallel" and parallel.strategy != "ddp":
        message = (
            f"each expert of '{facts.model_type}' is a separate module: an expert that receives no "
            "token in a step has no gradient, but weight decay would be applied to it, unlike in plain "
            "PyTorch"
        )
        fix = assignment(parallel__backend="accelerate", parallel__accelerate="ddp", parallel__zero_stage=0)
        yield Fault("model", message, f"{fix}, or store the experts of a layer in one tensor")


RULES = (modules, router_noise, router_loss, router_precision, loss_scale)
