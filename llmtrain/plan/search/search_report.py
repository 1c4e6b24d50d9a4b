"""Formats the result of a search as readable lines and as JSON."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.axes import used
from llmtrain.plan.plan import Plan
from llmtrain.plan.search.search import RankedPlan, SearchResult
from llmtrain.plan.search.variants import offload_name

UNKNOWN_MEMORY = "memory is not predicted: it is unknown which plans fit"


def lines(result: SearchResult) -> list[str]:
    """Returns the lines that `llmtrain plan --search` prints."""
    found = [f"{result.legal:,} legal plans, ranked by predicted tokens/s"]
    if not result.memory_known:
        found.append(UNKNOWN_MEMORY)
    found += [line for number, ranked in enumerate(result.best, 1) for line in _entry(f"{number:>2}", ranked)]
    for title, misses in (
        ("faster, but too large; of each kind the one with the smallest shortage", result.too_large),
        ("the fastest of other kinds, and why they are slower", result.slower),
    ):
        if misses:
            found += [f"{title}:", *(line for ranked in misses for line in _entry(" ·", ranked))]
    return found


def document(result: SearchResult) -> dict[str, Any]:
    """Returns the document that `llmtrain plan --search --json` prints."""
    return {
        "legal_plans": result.legal,
        "memory_known": result.memory_known,
        "best": [_as_json(ranked) for ranked in result.best],
        "too_large": [_as_json(ranked) for ranked in result.too_large],
        "slower": [_as_json(ranked) for ranked in result.slower],
    }


def _entry(mark: str, found: RankedPlan) -> list[str]:
    time = found.time
    rate = f"{time.tokens_per_second:>11,.0f} tokens/s  {time.step_s:8.2f} s  MFU {time.mfu:4.0%}"
    why = f"  {found.why}" if found.why else ""
    return [f"{mark} {rate}  {_layout(found.plan)}{why}", f"      {found.arguments or '(the recipe as it is)'}"]


def _layout(plan: Plan) -> str:
    """Formats the layout with the abbreviations of candidates' names, without degrees of 1."""
    parallel = plan.parallel
    degrees = (f"{axis.short}{axis.degree(parallel)}" for axis in used(parallel))
    parts = [f"dp{plan.data_parallel_size}", *degrees]
    if parallel.hierarchical_partition > 1:
        parts.append(f"hpz{parallel.hierarchical_partition}")
    parts += [f"zero{parallel.zero_stage}", f"micro{plan.batch.micro_batch_size}"]
    if parallel.activation_checkpointing != "none":
        parts.append("checkpointing" if parallel.activation_checkpointing == "full" else "selective")
    if parallel.offload_activations:
        parts.append("offload_inputs")
    parts.append(offload_name(parallel.offload_optimizer, parallel.offload_param))
    return "-".join(filter(None, parts))


def _as_json(found: RankedPlan) -> dict[str, Any]:
    parallel = found.plan.parallel
    stored = ("hierarchical_partition", "activation_checkpointing", "checkpoint_every", "offload_activations")
    return {
        "set": found.arguments,
        "layout": found.plan.layout(),
        "batch": found.plan.batch.model_dump(),
        **{name: getattr(parallel, name) for name in (*stored, "offload_optimizer", "offload_param")},
        "time": found.time.model_dump(),
        "why": found.why,
    }
