"""What fits on a device."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.assemble import assemble
from llmtrain.plan.draft import Draft
from llmtrain.plan.memory import memory_of
from llmtrain.plan.memory.count import LABELS, by_part
from llmtrain.plan.memory.parts import GIB
from llmtrain.plan.rules.rule import Fault, rule


@rule("memory.fits", "The fullest rank's bytes, by part, against the device's memory.", "arithmetic")
def fits(draft: Draft) -> Iterator[Fault]:
    """Plans whose fullest rank needs more than a device has; asked where the capacity and all degrees are known."""
    facts, stages = draft.facts, draft.parallel.pipeline
    if draft.cluster.spec.memory_bytes is None or facts is None or not draft.accumulation or stages > facts.layers:
        return
    memory = memory_of(assemble(draft))
    if memory is None or memory.fits or memory.capacity is None:
        return
    fullest = memory.stages[memory.fullest]
    where = f" on stage {memory.fullest}" if stages > 1 else ""
    message = (
        f"needs {memory.needed / GIB:,.1f} GiB of {memory.capacity / GIB:,.0f} GiB on a {draft.cluster.device}{where}, "
        f"{LABELS[fullest.moment]}: {by_part(fullest.peak)}"
    )
    yield Fault("parallel", message, "use more devices or larger ones, or split and store the run otherwise")


RULES = (fits,)
