"""Writes the pictures of README and docs/ that no other generator draws: docs/pictures/*.svg.

python tools/render_pictures.py [FOLDER]

The overview is drawn here. `llmtrain plan --write` draws memory and schedule. The loss curve shows the committed
metrics of a run of `recipes/tiny.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from llmtrain.plan.predict.picture import box, line, picture, text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
METRICS = ROOT / "benchmarks/results/tiny_metrics.jsonl"
ON_FOUR = ("recipes/llama3_8b.py", "--nodes", "1", "--gpus-per-node", "4", "--device", "h200")
FOUR_STAGES = ("parallel.pipeline=4", "parallel.zero_stage=1", "batch.global_batch_size=8", "batch.micro_batch_size=1")
ZERO_BUBBLE = ("parallel.pipeline_schedule=zero_bubble", "parallel.pipeline_chunks=2", "kernels.blocks=eager")
DRAWN_BY_PLAN: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "memory_llama3_70b.svg": ("memory.svg", ("recipes/llama3_70b.py:pipeline",), ()),
    "schedule.svg": ("schedule.svg", ON_FOUR, FOUR_STAGES),
    "schedule_zero_bubble.svg": ("schedule.svg", ON_FOUR, (*FOUR_STAGES, *ZERO_BUBBLE)),
}
"""Picture in docs/pictures → the file name of a plan's picture, the arguments of `llmtrain plan`, and fields."""

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


def loss(rows: Iterable[dict[str, float]]) -> str:
    """Draws training and evaluation loss by step."""
    found = list(rows)
    trained = [(row["step"], row["loss"]) for row in found if "loss" in row]
    evaluated = [(row["step"], row["eval_loss"]) for row in found if "eval_loss" in row]
    width, height, x, y = 520, 200, 40, 36
    steps = max(step for step, _ in trained)
    highest = -(-max(value for _, value in trained) // 1)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return x + width * point[0] / steps, y + height * (1 - point[1] / highest)

    elements = [box(x, y, width, height, "#f6f6f6"), line(x, y, y + height, "#222222")]
    for value in range(0, int(highest) + 1, 2):
        elements.append(text(x - 6, place((0, value))[1] + 3, f"{value}", anchor="end"))
    for step in range(0, int(steps) + 1, 50):
        elements.append(text(place((step, 0))[0], y + height + 14, f"{step}", anchor="middle"))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in map(place, trained))
    elements.append(f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="1.5"/>')
    for point in evaluated:
        a, b = place(point)
        elements.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="#d55e00"/>')
        elements.append(text(a - 4, b - 8, f"{point[1]:.2f}", anchor="end", fill="#d55e00"))
    elements.append(text(x + width - 8, y + 16, "training loss", anchor="end", fill="#0072b2", size=11))
    elements.append(text(x + width - 8, y + 32, "evaluation loss", anchor="end", fill="#d55e00", size=11))
    return picture(x + width + 30, y + height + 24, "recipes/tiny.py: loss in nats per token, by step", elements)


def drawn(folder: Path) -> None:
    """Writes all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overview.svg").write_text(overview(), encoding="utf-8")
    rows = map(json.loads, METRICS.read_text(encoding="utf-8").splitlines())
    (folder / "loss_tiny.svg").write_text(loss(rows), encoding="utf-8")
    for name, (picture_of_plan, arguments, fields) in DRAWN_BY_PLAN.items():
        sets = [part for field in fields for part in ("--set", field)]
        with tempfile.TemporaryDirectory() as written:
            command = [sys.executable, "-m", "llmtrain", "plan", *arguments, *sets, "--write", written]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            (folder / name).write_text((Path(written) / picture_of_plan).read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    drawn(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
