"""Small checkpoints for tests that do not train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.save import Saver
from tests.helpers.batches import tiny_recipe
from tests.helpers.traces import plan_of

RUN = "small"


class Tensors:
    """A stand-in for an engine: a few files of tensors whose values identify the step."""

    def __init__(self, elements: int = 1000) -> None:
        self.elements = elements
        self.step = 0

    def save(self, writer) -> None:
        for name in ("model", "optimizer"):
            writer.tensors(f"engine/{name}.safetensors", {"step": torch.full((self.elements,), float(self.step))})

    def load(self, folder: Path) -> None:
        self.step = int(load_file(folder / "engine" / "model.safetensors")["step"][0])


def saver_of(checkpoints: Path, run: str = RUN, elements: int = 1000, **fields) -> Saver:
    """Returns the saver of a run whose recipe has these fields."""
    return Saver(checkpoints, plan_of(tiny_recipe(**fields), 1), Tensors(elements), run, pauses=())


def save(saver: Saver, step: int, eval_loss: float | None = None, **metrics: float) -> Path:
    """Saves a step; returns the folder. metrics: others of its evaluation."""
    saver.engine.step = step
    state = TrainerState(step=step, samples=8 * step, data="key", eval_loss=eval_loss, eval_step=step)
    saver.save(replace(state, eval_metrics=metrics))
    return saver.checkpoints / f"step_{step:08d}"
