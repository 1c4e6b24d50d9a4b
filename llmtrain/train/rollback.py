"""Handles too many skipped updates: rolls back to a checkpoint and skips the data, or ends the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.resume import ResumeChoice, choose_newest, go_on_from
from llmtrain.checkpoint.state import restore
from llmtrain.checkpoint.storage import Storage
from llmtrain.engines import Engine
from llmtrain.engines.guard import Skipped
from llmtrain.errors import DivergedError, Problem
from llmtrain.plan import Plan

SUGGESTIONS = (
    "check the data of these steps; a smaller optim.lr, or a larger guard.spike_sigma or "
    "guard.spike_norm_ratio, changes which updates are skipped"
)


@dataclass(frozen=True)
class SkippedUpdates:
    """A run that has skipped too many updates."""

    plan: Plan
    state: TrainerState
    """The state after the last step; `roll_back` changes it."""
    skipped: Skipped

    @property
    def first_step(self) -> int:
        """The first of the skipped steps that are too many."""
        return self.state.step - self.skipped.recent[0].steps_ago

    def describe(self) -> str:
        """Describes the skipped steps, their values and the rule."""
        guard, recent = self.plan.recipe.guard, self.skipped.recent
        first, last = recent[0], recent[-1]
        rule = "an update is skipped if its loss or gradient norm is not finite"
        if guard.spike_sigma:
            rule += (
                f", or more than {guard.spike_sigma:g} standard deviations above the mean of the "
                f"{guard.window_steps:,} updates before, in logarithms; a norm must also be more than "
                f"{guard.spike_norm_ratio:g} times their geometric mean"
            )
        return (
            f"{len(recent)} of the last {guard.window_steps:,} updates were skipped, more than {guard.max_skipped}: "
            f"first step {self.first_step:,} ({first.why()}), last step {self.state.step - last.steps_ago:,} "
            f"({last.why()}); {rule}"
        )


def roll_back(skipped_updates: SkippedUpdates, engine: Engine, checkpoints: Path, run: str, storage: Storage) -> None:
    """Loads the last checkpoint before the skipped steps, and skips their data; called by all ranks.

    Skipped updates do not change the weights, but their cause may have done so before. The checkpoint is therefore
    one from before the first of them, or the newest one if no such checkpoint is kept. Steps, schedule, weights and
    random state are those of the checkpoint; the position in the data and the counters are kept. Raises
    DivergedError if the recipe says so (`guard.then`), if the run has rolled back too often, or if it has saved
    nothing.
    """
    guard, state = skipped_updates.plan.recipe.guard, skipped_updates.state
    choice = choose_newest(checkpoints, run, storage, before=skipped_updates.first_step) or choose_newest(
        checkpoints, run, storage
    )
    if guard.then == "stop" or state.rollbacks >= guard.max_rollbacks or choice is None:
        raise DivergedError(_problem(skipped_updates, choice))
    loaded = restore(choice.folder, choice.manifests, storage, engine, skipped_updates.plan, state.data)
    go_on_from(choice, checkpoints, storage)
    engine.guard.count_from(skipped_updates.skipped.total)
    now = replace(
        loaded,
        samples=state.samples,
        rollbacks=state.rollbacks + 1,
        passed_over=loaded.passed_over + state.samples - loaded.samples,
    )
    vars(state).update(vars(now))


def _problem(skipped_updates: SkippedUpdates, choice: ResumeChoice | None) -> Problem:
    guard, state = skipped_updates.plan.recipe.guard, skipped_updates.state
    message = skipped_updates.describe()
    if guard.then == "stop":
        kept = f"the same command continues from {choice.folder.name}" if choice else "no checkpoint was saved"
        fix = f"{kept}; --set guard.then=rollback skips the data as well; {SUGGESTIONS}"
    elif choice is None:
        fix = f"no checkpoint was saved to roll back to (checkpoint.every_steps); {SUGGESTIONS}"
    else:
        message += f"; no rollback is left ({state.rollbacks} of {guard.max_rollbacks})"
        fix = (
            f"{choice.folder.name} is the last checkpoint before these steps; {SUGGESTIONS}, and "
            "guard.max_rollbacks how often the run rolls back"
        )
    return Problem("guard.skipped", "guard.max_skipped", message, fix)
