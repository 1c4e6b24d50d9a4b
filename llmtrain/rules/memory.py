"""The rule that a plan fits in the memory of its devices."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft, assemble
from llmtrain.predict import memory_of
from llmtrain.predict.memory import LABELS, by_part
from llmtrain.predict.parts import GIB
from llmtrain.rules.rule import Fault, rule


@rule("memory.fits", "The rank that needs most memory, by component, against the memory of a device.", "arithmetic")
def fits(draft: Draft) -> Iterator[Fault]:
    """Refuses plans whose fullest rank needs more than a device has, if the capacity and all degrees are known."""
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
    yield Fault("parallel", message, "use more devices or larger ones, or change the layout or the precision")


RULES = (fits,)
