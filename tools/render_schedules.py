"""Writes docs/pictures/schedules.svg: the learning rate of each schedule, step by step, as the engines compute it.

python tools/render_schedules.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import torch

from llmtrain.engines.optim import schedule
from llmtrain.plan.predict.picture import box, line, picture, text
from llmtrain.recipe import BatchConfig, DataConfig, ModelConfig, OptimConfig, Recipe, Source, TrainConfig

STEPS, WARMUP, DECAY, LOWEST = 100, 10, 30, 0.1
COLOURS = {
    "constant": "#888888",
    "linear": "#0072b2",
    "cosine": "#d55e00",
    "inverse_sqrt": "#009e73",
    "wsd": "#cc79a7",
}
X, Y, WIDTH, HEIGHT = 40, 40, 500, 200
"""Position and size of the diagram in the picture."""


def rates(
    kind: str, steps: int = STEPS, warmup: int = WARMUP, decay: int = DECAY, lowest: float = LOWEST
) -> list[float]:
    """Returns the learning rate relative to its peak for every step of the run, and for one more step."""
    fields = {"lr": 1.0, "schedule": kind, "warmup_steps": warmup, "decay_steps": decay, "min_lr_ratio": lowest}
    recipe = Recipe(
        name="schedules",
        model=ModelConfig(architecture="llama"),
        data=DataConfig(sources=[Source("stdlib")], tokenizer="none", sequence_length=8),
        optim=OptimConfig.model_validate(fields),
        batch=BatchConfig(global_batch_size=1, micro_batch_size=1),
        train=TrainConfig(max_steps=steps),
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = schedule(optimizer, recipe)
    found = []
    for _ in range(steps + 1):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def render() -> str:
    """Returns the picture."""
    elements = [box(X, Y, WIDTH, HEIGHT, "#f6f6f6"), line(X, Y, Y + HEIGHT, "#222222")]
    for value in (0.0, LOWEST, 0.5, 1.0):
        elements.append(text(X - 6, Y + HEIGHT * (1 - value) + 3, f"{value:g}", anchor="end"))
    for step in (0, WARMUP, STEPS - DECAY, STEPS):
        elements.append(text(X + WIDTH * step / STEPS, Y + HEIGHT + 14, f"{step}", anchor="middle"))
    for index, kind in enumerate(get_args(OptimConfig.model_fields["schedule"].annotation)):
        points = " ".join(
            f"{X + WIDTH * step / STEPS:.1f},{Y + HEIGHT * (1 - rate):.1f}" for step, rate in enumerate(rates(kind))
        )
        elements.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[kind]}" stroke-width="1.5"/>')
        elements.append(text(X + WIDTH + 10, Y + 14 + 16 * index, kind, fill=COLOURS[kind], size=11))
    title = f"Rate / peak by step: warmup_steps={WARMUP}, max_steps={STEPS}, min_lr_ratio={LOWEST}, decay_steps={DECAY}"
    return picture(X + WIDTH + 90, Y + HEIGHT + 26, title, elements)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs/pictures/schedules.svg"
    target.write_text(render(), encoding="utf-8")
