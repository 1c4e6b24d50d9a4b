"""The pictures of README and docs/: docs/pictures/*.svg.

Drawn here: an overview, the losses of a run of `recipes/tiny.py` (its committed metrics), and learning rates as the
engines compute them. Memory and pipeline schedules are drawn as by `llmtrain plan --write`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from llmtrain import library
from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict.picture import box, line, memory_svg, picture, schedule_svg, text
from llmtrain.plan.schedules import PipelineSchedule
from llmtrain.recipe import BatchConfig, DataConfig, ModelConfig, OptimConfig, Recipe, Source, TrainConfig
from tools.page import ROOT, Files

FOUR_STAGES = ["parallel.pipeline=4", "parallel.zero_stage=1", "batch.global_batch_size=8", "batch.micro_batch_size=1"]
ZERO_BUBBLE = ["parallel.pipeline_schedule=zero_bubble", "parallel.pipeline_chunks=2", "kernels.blocks=eager"]

STAGES = (
    ("Recipe", ("model, data, batch,", "optimizer, steps"), "#dbe9f6"),
    ("Plan", ("degrees, accumulation,", "memory, time"), "#dff0d8"),
    ("Engine", ("one optimizer step,", "under any strategy"), "#fdebd0"),
    ("Checkpoint", ("continues under", "any other plan"), "#eadcf4"),
)
"""The boxes of the overview: name, content and colour."""
ARROWS = ("+ cluster", "launch", "save")
BELOW = ("", "ds_config.json", "metrics, TensorBoard", "Hugging Face model")
"""What each box writes."""
REFUSED = "a plan that cannot work is refused here, with the reason"


def overview() -> str:
    """Draws recipe → plan → engine → checkpoint."""
    wide, high, gap, left, top = 150, 74, 64, 16, 36
    elements = []
    for index, ((name, lines, colour), below) in enumerate(zip(STAGES, BELOW, strict=True)):
        x = left + index * (wide + gap)
        middle = x + wide / 2
        elements.append(box(x, top, wide, high, colour))
        elements.append(text(middle, top + 24, name, anchor="middle", size=15))
        for number, words in enumerate(lines):
            elements.append(text(middle, top + 43 + 14 * number, words, anchor="middle", size=11))
        if below:
            elements.append(line(middle, top + high, top + high + 18, "#888888"))
            elements.append(text(middle, top + high + 32, below, anchor="middle", size=11))
        if index:
            start, end, y = x - gap + 4, x - 4, top + high / 2
            elements.append(f'<path d="M{start:g} {y:g} H{end - 6:g}" stroke="#444444" stroke-width="1.5"/>')
            elements.append(f'<path d="M{end:g} {y:g} l-8 -4 v8 z" fill="#444444"/>')
            elements.append(text((start + end) / 2 - 2, y - 7, ARROWS[index - 1], anchor="middle", size=10))
    elements.append(text(left + wide + gap, top - 10, REFUSED, size=10, fill="#666666"))
    return picture(left * 2 + 4 * wide + 3 * gap, top + high + 46, "", elements)


class Diagram(NamedTuple):
    """An area of a picture, in pixels, for curves over the steps of a run."""

    x: int
    y: int
    width: int
    height: int
    steps: float
    """The number of steps at the right end."""
    highest: float
    """The value at the upper end; 0 is the lower one."""

    def place(self, step: float, value: float) -> tuple[float, float]:
        """Returns the position of a value."""
        return self.x + self.width * step / self.steps, self.y + self.height * (1 - value / self.highest)

    def axes(self, steps: Iterable[float], values: Iterable[float]) -> list[str]:
        """Draws the area, and labels steps and values."""
        elements = [box(self.x, self.y, self.width, self.height, "#f6f6f6")]
        elements.append(line(self.x, self.y, self.y + self.height, "#222222"))
        for value in values:
            elements.append(text(self.x - 6, self.place(0, value)[1] + 3, f"{value:g}", anchor="end"))
        for step in steps:
            elements.append(text(self.place(step, 0)[0], self.y + self.height + 14, f"{step}", anchor="middle"))
        return elements

    def curve(self, points: Iterable[tuple[float, float]], colour: str) -> str:
        """Draws a curve through values. points: step and value."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.place(*point) for point in points))
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def loss(rows: Iterable[Mapping[str, float]]) -> str:
    """Draws training and evaluation loss by step."""
    found = list(rows)
    trained = [(row["step"], row["loss"]) for row in found if "loss" in row]
    evaluated = [(row["step"], row["eval_loss"]) for row in found if "eval_loss" in row]
    steps, highest = max(step for step, _ in trained), -(-max(value for _, value in trained) // 1)
    diagram = Diagram(40, 36, 520, 200, steps, highest)
    elements = diagram.axes(range(0, int(steps) + 1, 50), range(0, int(highest) + 1, 2))
    elements.append(diagram.curve(trained, "#0072b2"))
    for step, value in evaluated:
        x, y = diagram.place(step, value)
        elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#d55e00"/>')
        elements.append(text(x - 4, y - 8, f"{value:.2f}", anchor="end", fill="#d55e00"))
    elements.append(text(552, 52, "training loss", anchor="end", fill="#0072b2", size=11))
    elements.append(text(552, 68, "evaluation loss", anchor="end", fill="#d55e00", size=11))
    return picture(590, 260, "recipes/tiny.py: loss in nats per token, by step", elements)


STEPS, WARMUP, DECAY, LOWEST = 100, 10, 30, 0.1
COLOURS = {
    "constant": "#888888",
    "linear": "#0072b2",
    "cosine": "#d55e00",
    "inverse_sqrt": "#009e73",
    "wsd": "#cc79a7",
}


def learning_rates() -> str:
    """Draws the learning rate of each schedule by step."""
    diagram = Diagram(40, 40, 500, 200, STEPS, 1.0)
    elements = diagram.axes((0, WARMUP, STEPS - DECAY, STEPS), (0.0, LOWEST, 0.5, 1.0))
    for index, kind in enumerate(COLOURS):
        elements.append(diagram.curve(enumerate(rates(kind)), COLOURS[kind]))
        elements.append(text(550, 54 + 16 * index, kind, fill=COLOURS[kind], size=11))
    title = f"Rate / peak by step: warmup_steps={WARMUP}, max_steps={STEPS}, min_lr_ratio={LOWEST}, decay_steps={DECAY}"
    return picture(630, 266, title, elements)


def rates(
    kind: str, steps: int = STEPS, warmup: int = WARMUP, decay: int = DECAY, lowest: float = LOWEST
) -> list[float]:
    """Returns the learning rate relative to its peak for every step of the run, and for one more step."""
    import torch

    from llmtrain.engines.optim import schedule

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


def files() -> Files:
    """Returns all pictures."""
    metrics = (ROOT / "benchmarks/results/tiny_metrics.jsonl").read_text(encoding="utf-8")
    large = library.plan(*load_recipe(str(ROOT / "recipes/llama3_70b.py:pipeline"), []))
    assert large.memory is not None
    pictures = {
        "overview": overview(),
        "loss_tiny": loss(map(json.loads, metrics.splitlines())),
        "schedules": learning_rates(),
        "memory_llama3_70b": memory_svg(large.memory),
        "schedule": _pipeline(FOUR_STAGES),
        "schedule_zero_bubble": _pipeline([*FOUR_STAGES, *ZERO_BUBBLE]),
    }
    return {f"docs/pictures/{name}.svg": drawn for name, drawn in pictures.items()}


def _pipeline(assignments: list[str]) -> str:
    """Draws the schedule of a pipeline on four devices."""
    recipe, cluster = load_recipe(str(ROOT / "recipes/llama3_8b.py"), assignments)
    assert cluster is not None
    plan = library.plan(recipe, cluster.resized(1, 4, "h200")).plan
    return schedule_svg(PipelineSchedule.of(plan.parallel), plan.batch)
