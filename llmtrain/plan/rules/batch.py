"""The batch equation: global = micro × accumulation × dp, without a remainder."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.divisors import divisors
from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule(
    "batch.divides",
    "Every replica runs the same number of equal micro-batches; a rounded accumulation trains another batch size.",
    "arithmetic",
)
def divides(draft: Draft) -> Iterator[Fault]:
    """Refuses remainders, and suggests the nearest global and micro batch sizes that leave none."""
    total, micro, dp = draft.recipe.batch.global_batch_size, draft.recipe.batch.micro_batch_size, draft.dp
    if dp is None or draft.accumulation is not None:
        return
    per_pass = micro * dp
    below = total // per_pass * per_pass
    totals = [size for size in (below, below + per_pass) if size]
    message = (
        f"global_batch_size = micro_batch_size × accumulation × dp has no whole solution: "
        f"{total} = {micro} × {total / per_pass:g} × {dp}; nearest global batch sizes: {_or(totals)}"
    )
    fixes = [assignment(batch__global_batch_size=min(totals, key=lambda size: abs(size - total)))]
    micros = _nearest_micro(total, micro, dp)
    if micros:
        message += f"; or at {total}, micro batch sizes: {_or(micros)}"
        fixes.append(assignment(batch__micro_batch_size=min(micros, key=lambda size: abs(size - micro))))
    yield Fault("batch.global_batch_size", message, ", or ".join(fixes))


def _nearest_micro(total: int, micro: int, dp: int) -> list[int]:
    """Returns the nearest divisors of a replica's batch: the largest up to `micro` and the smallest from it on."""
    if total % dp:
        return []
    share = total // dp
    sizes = divisors(share)
    return [*[size for size in sizes if size <= micro][-1:], *[size for size in sizes if size >= micro][:1]]


def _or(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)


RULES = (divides,)
