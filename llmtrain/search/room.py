"""Checks many plans for whether they fit: if the leanest variant of a layout does not, no other is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmtrain.plan.draft import Draft
from llmtrain.plan.plan import Plan
from llmtrain.predict import Shortage
from llmtrain.rules import assemble
from llmtrain.search.variants import CHECKPOINTING, EVERY, MICRO_BATCH, OFFLOAD_INPUTS, changed

Fits = Callable[[Plan], Shortage | None]
"""By how much a plan does not fit; None if it fits."""


class Room:
    """Calls a `Fits`, and remembers the layouts that are known to be too large."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits
        self._hopeless: dict[Any, bool] = {}

    def lacking(self, draft: Draft) -> Shortage | None:
        """Returns why a legal draft does not fit, or None."""
        return self._fits(assemble(draft))

    def is_hopeless(self, draft: Draft) -> bool:
        """Whether a legal draft's layout never fits, whatever its micro-batch, even with activation checkpointing.

        The smallest micro-batch has the fewest activations, the largest one has no gradients at the same time: every
        other variant needs more than one of the two.
        """
        plain = {MICRO_BATCH: 1, CHECKPOINTING: "full", EVERY: 1, OFFLOAD_INPUTS: draft.parallel.offload_activations}
        key = changed(draft.recipe, plain).parallel
        if key not in self._hopeless:
            assert draft.data_parallel_size is not None, "a legal draft has whole degrees"
            share = draft.recipe.batch.global_batch_size // draft.data_parallel_size
            leanest = (
                Draft(changed(draft.recipe, {**plain, MICRO_BATCH: size}), draft.cluster, draft.facts)
                for size in (1, share)
            )
            self._hopeless[key] = all(self.lacking(one) for one in leanest)
        return self._hopeless[key]

    def has(self, draft: Draft) -> bool:
        """Whether a legal draft fits."""
        return not self.is_hopeless(draft) and not self.lacking(draft)
