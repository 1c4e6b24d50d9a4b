"""What a callback may define: code of a user's own that a run calls between its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.recipe.recipe import Recipe

HOOKS: dict[str, tuple[str, ...]] = {
    "on_train_begin": ("metrics",),
    "on_gradients": (),
    "on_step_end": ("metrics", "save", "evaluate", "stop"),
    "on_evaluate": ("metrics", "save", "stop"),
    "on_save": (),
    "on_train_end": (),
}
"""Hook → the fields of `CallbackResult` that it may set."""


@dataclass(frozen=True)
class CallbackContext:
    """What a hook is told."""

    step: int
    """Number of optimizer steps taken."""
    metrics: Mapping[str, Any]
    """What the run logs after this step, as in `metrics.jsonl`; empty if it logs nothing."""
    run_dir: Path
    """The run directory."""
    recipe: Recipe
    rank: int
    world_size: int
    """Number of ranks."""
    checkpoint: Path | None = None
    """In `on_save`, the folder of the checkpoint."""


@dataclass(frozen=True)
class GradientContext:
    """What `on_gradients` is given. It has nothing that differs between ranks."""

    step: int
    """The step that the gradients are of, counted from 1."""
    gradients: Mapping[str, Any]
    """Hugging Face name of a weight → its whole gradient, a tensor in fp32, which the hook changes in place. The
    gradients are those of the mean over the global batch, before clipping. In the model's order; tied weights once, and
    only weights that have a gradient."""
    recipe: Recipe


@dataclass(frozen=True)
class CallbackResult:
    """What a hook asks of the run. All ranks act on it after the same step."""

    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Numbers to log, by name: letters, digits and `_ . / -`. Only those of rank 0 are logged."""
    save: bool = False
    """Save a checkpoint after this step."""
    evaluate: bool = False
    """Evaluate after this step."""
    stop: str = ""
    """Why the run ends after this step; empty if it goes on."""


class Callback:
    """A base class of callbacks, none of whose methods does anything; a callback need not inherit from it.

    A callback may also define `state_dict()`, which returns JSON data, and `load_state_dict(state)`. A checkpoint then
    contains the state of rank 0's callback, which all ranks load when the run continues.

    No hook is given the weights, and only `on_gradients` the gradients. A hook draws random numbers from a copy of
    torch's generators.
    """

    def on_train_begin(self, context: CallbackContext) -> CallbackResult | None:
        """Is called once before the first step of this process, which is not the run's first step if it continues."""

    def on_gradients(self, context: GradientContext) -> None:
        """Changes the gradients of each step, if the recipe declares it (`changes_gradients`).

        It is called on every rank, and must do the same on each of them: it depends on the gradients and the step
        alone. torch's generators are seeded with the recipe's seed and the step.
        """

    def on_step_end(self, context: CallbackContext) -> CallbackResult | None:
        """Is called after each step. The metrics of the result are written to the next line of `metrics.jsonl`."""

    def on_evaluate(self, context: CallbackContext) -> CallbackResult | None:
        """Is called after each evaluation, with its metrics. Those of the result are written to the same line."""

    def on_save(self, context: CallbackContext) -> None:
        """Is called when a checkpoint is complete on all ranks, at most a few steps after `context.step`."""

    def on_train_end(self, context: CallbackContext) -> None:
        """Is called once after the last step and the last save, also if a signal stops the run."""


def gradient_seed(seed: int, step: int, number: int) -> int:
    """Returns the seed of torch's generators in `on_gradients`.

    seed: the recipe's. step: counted from 1. number: of the callback, among those that change gradients.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{number}".encode(), digest_size=8).digest(), "little") >> 1


def hooks_of(value: Any) -> tuple[str, ...]:
    """Returns the names of the hooks that a callback, or its class, defines itself."""
    return tuple(name for name in HOOKS if _own(value, name) is not None)


def _own(value: Any, name: str) -> Any:
    method = getattr(value, name, None)
    return None if getattr(method, "__func__", method) is getattr(Callback, name) else method
