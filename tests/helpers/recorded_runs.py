"""Hand-made run directories, for tests of commands that read them."""

import json
import math
import random
from pathlib import Path


def write_lines(file: Path, records) -> None:
    file.write_text("".join(json.dumps(one) + "\n" for one in records))


def step_record(step: int, loss: float | None, **more) -> dict:
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 1.0 + step % 7 / 10,
        "lr": 1e-3 / step,
        "tokens": step * 512,
        "samples": step * 8,
        "step_time_s": 0.5,
        "tokens_per_second": 1024.0 + step % 5,
        "tokens_per_second_per_device": 512.0,
        "tflops_per_device": 1.5,
        "mfu": None,
        "peak_memory_bytes": 10**9,
        "data_wait_s": 0.01,
        "save_blocked_s": 0.0,
        "skipped_steps": 0,
        "rollbacks": 0,
        **more,
    }


def long_run(folder: Path, rows: int, seed: int = 0, name: str | None = None) -> Path:
    """Makes a run with a spike in its loss, one loss that is not finite, and an evaluation every 100 steps."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps({"name": name or f"run_{seed}", "optim": {"lr": seed}}))
    draw, records = random.Random(seed), []
    for step in range(1, rows + 1):
        loss = 2 + 6 * math.exp(-5 * step / rows) + draw.gauss(0, 0.05) + seed
        loss = {rows // 3: 50.0 + seed, rows // 2: None}.get(step, loss)
        records.append(step_record(step, loss, slowest_rank=step % 3, slowest_ratio=1 + draw.random() / 2))
        if step % max(1, rows // 20) == 0:
            records.append({"step": step, "eval_loss": 3.0 + seed, "perplexity": math.exp(3.0 + seed)})
    write_lines(folder / "metrics.jsonl", records)
    return folder


def short_run(folder: Path) -> Path:
    """Makes a run of 60 steps with events, a sample, a profile and scores."""
    long_run(folder, 60, name="short")
    events = [("started", 0, "2 workers"), ("skipped", 17, "loss 9 above 4"), ("stopped", 40, "on SIGTERM")]
    events += [("started", 40, "2 workers"), ("finished", 60, "")]
    stamp = "2030-01-01T00:00:00+00:00"
    write_lines(
        folder / "events.jsonl",
        [{"time": stamp, "event": event, "step": step, "text": text} for event, step, text in events],
    )
    write_lines(folder / "samples.jsonl", [{"step": 50, "prompt": "Once ", "text": "upon a time"}])
    (folder / "profile/step_00000011").mkdir(parents=True)
    about = {"device": "cpu", "seconds": 1.5, "computation": 1.0, "communication": 0.5, "exposed_communication": 0.25}
    operations = [{"name": "aten::mm", "calls": 12, "seconds": 0.75}]
    (folder / "profile/step_00000011/rank_1.json").write_text(json.dumps(about | {"operations": operations}))
    (folder / "eval").mkdir()
    results = {"mine": {"acc,none": 0.625, "acc_stderr,none": 0.1, "alias": "mine"}}
    (folder / "eval/step_00000060.json").write_text(json.dumps({"results": results}))
    return folder
