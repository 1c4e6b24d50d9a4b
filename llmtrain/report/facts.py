"""A run in words and figures: model, data, hardware, progress, quality and speed."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from llmtrain.errors import format_value
from llmtrain.plan.described import model_line, split_lines
from llmtrain.plan.predict.memory import memory_of
from llmtrain.plan.predict.parts import readable
from llmtrain.plan.predict.time import predict
from llmtrain.report.curves import hours_of
from llmtrain.report.run import RunData
from llmtrain.report.table import MAX_STEP
from llmtrain.system.quantities import compact, duration, four_digits

SETS = "eval_loss_by_set/"
RECENT_ROWS = 20
"""Number of last rows whose median is shown as the speed."""
SLOW = 1.2
"""A rank counts as slow in a row if its own time is at least this many times the median rank's."""
MAX_SLOW = 5
OUTSIDE_STEPS = "outside the steps"
"""Label of the time for starting, evaluations, samples, and steps that were repeated after a restart."""
MAX_NAME, MAX_TEXT = 40, 2000
"""Largest number of characters of an event's name and text that are shown."""
Fact = tuple[str, str]
"""A label and a text."""


@dataclass(frozen=True)
class Figure:
    """A figure of a run, as a number and as a text."""

    label: str
    value: float | None
    text: str


def facts(run: RunData) -> list[Fact]:
    """Returns what was trained, on which data and hardware, and with which versions."""
    recipe, environment, launch = run.recipe, run.environment, run.launch
    lines: list[Fact] = [("status", status_line(run))]
    if run.plan:
        lines.append(("model", model_line(run.plan).partition(": ")[2]))
        split = (line.partition(" ") for line in split_lines(run.plan))
        lines += [(label, text.strip()) for label, _, text in split]
    lines += [
        ("data", _sources(recipe)),
        ("optimizer", _optimizer(recipe)),
        ("launched", _launched(launch)),
        ("host", " · ".join(str(environment[name]) for name in ("host", "platform") if environment.get(name))),
        ("commit", _commit(environment.get("git"))),
        ("versions", _versions(environment)),
        ("command", _command(environment.get("argv"))),
        ("folder", str(run.path)),
    ]
    return [(label, text) for label, text in lines if text]


def status_line(run: RunData) -> str:
    """Returns a line on the status and the progress of the run."""
    of = f" of {run.max_steps:,}" if run.max_steps else ""
    ago = f", last line {duration(run.seconds_since_line)} ago" if run.seconds_since_line is not None else ""
    return f"{run.status} at step {run.step:,}{of}{ago if run.status in ('running', 'interrupted') else ''}"


def figures(run: RunData) -> list[Figure]:
    """Returns the figures at the end of the run, or at its last logged step so far."""
    metrics, evaluations = run.metrics, run.evaluations
    losses = evaluations.get("eval_loss")
    of_sets = [name for name in evaluations.names if name.startswith(SETS)]
    hours = hours_of(metrics)
    known = [
        Figure("step", run.step, f"{run.step:,}"),
        _figure("loss", metrics.last("loss")),
        _figure("evaluation loss", evaluations.last("eval_loss")),
        _figure("least evaluation loss", float(np.nanmin(losses)) if np.isfinite(losses).any() else None),
        _figure("perplexity", evaluations.last("perplexity")),
        _figure("bits per byte", evaluations.last("bits_per_byte")),
        *(_figure(f"evaluation loss of {name.removeprefix(SETS)}", evaluations.last(name)) for name in of_sets),
        _figure("gradient norm", metrics.last("grad_norm")),
        _figure("tokens", metrics.last("tokens"), _counted),
        _figure(
            "hours in steps and saves", float(hours[-1]) if len(hours) else None, lambda value: duration(value * 3600)
        ),
        _figure("tokens per second", _recent(run, "tokens_per_second"), _counted),
        _figure("MFU", _recent(run, "mfu"), "{:.1%}".format),
        _figure("step time", _recent(run, "step_time_s"), _seconds),
        _figure("peak memory of rank 0", metrics.last("peak_memory_bytes"), _bytes),
        _figure("skipped updates", metrics.last("skipped_steps"), _counted),
        _figure("rollbacks", metrics.last("rollbacks"), _counted),
        _figure("restarts", float(max(0, sum(event.event == "started" for event in run.events) - 1)), _counted),
        *_forecast(run),
        *(_figure(name, score) for name, score in (run.scores[-1].scores.items() if run.scores else ())),
    ]
    return [figure for figure in known if figure.value is not None]


def _forecast(run: RunData) -> Iterator[Figure]:
    """Yields the time left and the costs that the last logged lines give."""
    left, last = run.metrics.last("left_s"), run.metrics.last
    if run.status == "running" and left is not None:
        yield Figure("estimated time left", left, duration(left))
        yield _figure("estimated cost at the end", last("cost_at_end"))
    yield _figure("device hours", last("device_hours"))
    yield _figure("cost", last("cost"))


def predicted_memory(run: RunData) -> list[Figure]:
    """Returns the predicted bytes of the fullest rank in total and by part, largest first; empty if unknown."""
    memory = memory_of(run.plan) if run.plan else None
    if memory is None:
        return []
    parts = [("total", memory.needed), *memory.stages[memory.fullest].peak.largest_first()]
    return [_figure(name, size, _bytes) for name, size in parts]


def predicted_step(run: RunData) -> list[Figure]:
    """Returns the predicted seconds of a step in total and by part; empty if the device's datasheet is incomplete."""
    step = predict(run.plan) if run.plan else None
    if step is None:
        return []
    named = {"total": step.step_s, "computation": step.compute_s, "pipeline bubble": step.bubble_s}
    named |= {name.replace("_", " "): seconds for name, seconds in step.communication_s.items()}
    named |= {"update": step.update_s}
    return [_figure(name, seconds, _seconds) for name, seconds in named.items() if seconds]


def time_spent(run: RunData) -> list[Figure]:
    """Returns how the run spent its time: in steps, waiting for data, blocked by saves, and on everything else."""
    metrics = run.metrics
    if not len(metrics):
        return []
    steps = np.maximum(0, np.diff(metrics["step"], prepend=0.0))
    waited = float((np.nan_to_num(metrics.get("data_wait_s")) * steps).sum())
    stepped = float((np.nan_to_num(metrics.get("step_time_s")) * steps).sum()) - waited
    saved = float(np.nan_to_num(metrics.get("save_blocked_s")).sum())
    named = {"steps": stepped, "waiting for data": waited, "blocked by saves": saved}
    named[OUTSIDE_STEPS] = _running_s(run) - sum(named.values())
    return [Figure(name, seconds, duration(seconds)) for name, seconds in named.items() if seconds > 0]


def _running_s(run: RunData) -> float:
    """Returns the total running time in seconds: from each start to the last logged line or event before the next."""
    events = [(event.event, _seconds_since_1970(event.time)) for event in run.events]
    starts = sorted(at for event, at in events if event == "started" and at is not None)
    signs = np.sort([*(at for _, at in events if at is not None), *run.metrics.get("time")])
    signs = signs[np.isfinite(signs)]
    ends = signs[np.searchsorted(signs, [*starts[1:], np.inf]) - 1] if starts else np.array([])
    return float(np.maximum(0, ends - starts).sum())


def _seconds_since_1970(stamp: str) -> float | None:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def saved_steps(run: RunData) -> list[int]:
    """Returns the steps after which the run was saved, including those whose checkpoints have been removed.

    A logged line only has the time of the saves since the previous line. The step of a save between the two follows
    from `checkpoint.every_steps`.
    """
    saved = {checkpoint.step for checkpoint in run.checkpoints}
    every, steps = run.recipe.get("checkpoint.every_steps"), run.metrics["step"]
    if isinstance(every, int) and 0 < every < MAX_STEP and len(steps):
        is_saved = run.metrics.get("save_blocked_s") > 0
        before = np.r_[0.0, steps[:-1]]
        first = np.ceil(before / every) * every
        saved |= {int(step) for step in first[is_saved & (first < steps) & (first > 0)]}
    return sorted(saved)


def stragglers(run: RunData) -> list[Fact]:
    """Returns the ranks that were slow in logged steps, the most frequent first, and how slow they were."""
    ranks, ratios = run.metrics.get("slowest_rank"), run.metrics.get("slowest_ratio")
    is_slow = (ratios >= SLOW) & np.isfinite(ranks)
    counts = Counter(ranks[is_slow].tolist())
    return [
        (
            f"rank {rank:.0f}",
            f"slowest in {count:,} of {len(ranks):,} logged steps, "
            f"at most {ratios[is_slow & (ranks == rank)].max():.2f} times as long as the median rank",
        )
        for rank, count in counts.most_common(MAX_SLOW)
    ]


def _sources(recipe: dict[str, Any]) -> str:
    sources = recipe.get("data.sources")
    names = (
        [str(source.get("name")) for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    )
    length = recipe.get("data.sequence_length")
    return ", ".join(names) + (f"; sequences of {length:,} tokens" if isinstance(length, int) else "")


def _optimizer(recipe: dict[str, Any]) -> str:
    names = ("name", "lr", "schedule", "warmup_steps", "warmup_ratio", "weight_decay")
    given = {name: recipe.get(f"optim.{name}") for name in names}
    given = {name: format_value(value) if isinstance(value, float) else value for name, value in given.items()}
    return ", ".join(f"{name} {value}" if name != "name" else str(value) for name, value in given.items() if value)


def _launched(launch: dict[str, Any]) -> str:
    if not launch:
        return ""
    return f"by {launch.get('launcher')}, workers: {launch.get('world_size')}, {_stamp(launch.get('started'))} UTC"


def _stamp(time: Any) -> str:
    return str(time)[:19].replace("T", " ")


def _command(argv: Any) -> str:
    """Returns the command line of the run, quoted for a shell."""
    if not isinstance(argv, list):
        return ""
    words = [str(word) for word in argv]
    if words[:1] == ["__main__.py"]:
        words[0] = "llmtrain"
    return shlex.join(words)


def _commit(git: Any) -> str:
    if not isinstance(git, dict):
        return ""
    return f"{git.get('commit')}{', with changes' if git.get('modified') else ''}"


def _versions(environment: dict[str, Any]) -> str:
    packages = environment.get("packages")
    known = packages.items() if isinstance(packages, dict) else ()
    python = [("python", environment["python"])] if environment.get("python") else []
    return ", ".join(f"{name} {version}" for name, version in [*python, *known])


def _recent(run: RunData, name: str) -> float | None:
    values = run.metrics.get(name)[-RECENT_ROWS:]
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None


def _figure(label: str, value: float | None, format_value: Callable[[float], str] = four_digits) -> Figure:
    return Figure(label, value, "" if value is None else format_value(value))


def _counted(value: float) -> str:
    return f"{value:,.0f}" if value < 10_000 else compact(value)


def _bytes(size: float) -> str:
    return readable(int(size))


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def event_lines(run: RunData) -> Iterator[tuple[str, int, str, str]]:
    """Yields the time, step, name and text of each event, the oldest first."""
    for event in run.events:
        yield _stamp(event.time), event.step, event.event[:MAX_NAME].replace("_", " "), event.text[:MAX_TEXT]
