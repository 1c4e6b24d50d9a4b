"""Records a window of steps with torch's profiler, as the recipe says or as `llmtrain profile` asks a running job to.

Each recorded rank writes `profile/step_N/rank_R.trace.json.gz`, which https://ui.perfetto.dev shows, and a summary,
`rank_R.json`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from llmtrain.overrides.torch import record_memory_history, write_memory_snapshot
from llmtrain.recipe import ProfileConfig
from llmtrain.run_dir import RunDir, write_json
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json

MAX_OPERATIONS = 30
"""Operations in a summary."""
COMMUNICATION = ("nccl", "gloo:", "c10d::")
"""Prefixes of the names of kernels and operations that move data between ranks."""
Interval = tuple[float, float]
"""Start and end, in microseconds."""


class StepProfiler:
    """Records this rank's steps while it is asked to; otherwise it does nothing."""

    def __init__(self, run: RunDir, rank: int, config: ProfileConfig, step: int, warn: Callable[[str], None]) -> None:
        """step: the number of steps that the run has done."""
        self._folder = run.profile
        self._rank = rank
        self._warn = warn
        self._config = config if step <= config.after_step else ProfileConfig()
        self._first = config.after_step + 1
        self._request = run.profile_request
        self._seen = _stamp(self._request)
        self._running: profile | None = None
        self._writing: threading.Thread | None = None

    def check_request(self, step: int) -> None:
        """Reads a new request, whose window begins with the next step."""
        if self._running or (stamp := _stamp(self._request)) == self._seen:
            return
        self._seen = stamp
        try:
            self._config = read_json(self._request, ProfileConfig)
        except UNREADABLE as error:
            self._warn(f"{self._request}: {file_fault(error)}")
            return
        self._first = step + 1

    def begin(self, step: int) -> None:
        """Starts to record if a window begins with this step."""
        if step != self._first or self._rank not in self._config.ranks or not self._config.steps:
            return
        on_gpu = torch.cuda.is_available()
        if self._config.memory and on_gpu:
            record_memory_history()
        self._running = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        self._running.start()

    def end(self, step: int) -> None:
        """Stops after the last step of the window, and writes what was recorded in a thread."""
        if self._running is None or step < self._first + self._config.steps - 1:
            return
        running, self._running = self._running, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        running.stop()
        folder = self._folder / f"step_{self._first:08d}"
        try:
            if self._config.memory and torch.cuda.is_available():
                write_memory_snapshot(folder / f"rank_{self._rank}.memory.pickle")
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._warn(f"{folder} cannot be written: {error.strerror}")
            return
        steps = range(self._first, step + 1)
        self.close()
        self._writing = threading.Thread(target=self._write, args=(running, folder, steps), name="profile")
        self._writing.start()

    def close(self) -> None:
        """Waits until the last window is written."""
        if self._writing:
            self._writing.join()

    def _write(self, recorded: profile, folder: Path, steps: range) -> None:
        try:
            recorded.export_chrome_trace(str(folder / f"rank_{self._rank}.trace.json.gz"))
            summary = profile_summary(recorded.events())  # type: ignore[no-untyped-call]
            write_json(folder / f"rank_{self._rank}.json", {"steps": list(steps), **summary})
        except Exception as error:  # whatever the error is, the run continues
            self._warn(f"the profile of steps {steps[0]} to {steps[-1]} was not written: {error}")


def profile_summary(events: Iterable[Any]) -> dict[str, Any]:
    """Returns where the time of a window went, on the device or, without one, on the host.

    `seconds` from the first event to the last; `computation`, `communication`, the part of it that nothing `hides`,
    and `operations`, with the most time first.
    """
    all_events = list(events)
    on_device = [event for event in all_events if event.device_type.name == "CUDA"]
    timed = on_device or [event for event in all_events if event.cpu_parent is None]
    moved = [_interval(event) for event in timed if event.name.startswith(COMMUNICATION)]
    computed = [_interval(event) for event in timed if not event.name.startswith(COMMUNICATION)]
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in on_device or all_events:
        times[event.name] += event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
        calls[event.name] += 1
    longest = sorted(times, key=lambda name: -times[name])[:MAX_OPERATIONS]
    both = [*moved, *computed]
    return {
        "device": "gpu" if on_device else "cpu",
        "seconds": (max(end for _, end in both) - min(start for start, _ in both)) / 1e6 if both else 0.0,
        "computation": _length(computed) / 1e6,
        "communication": _length(moved) / 1e6,
        "exposed_communication": (_length(both) - _length(computed)) / 1e6,
        "operations": [{"name": name, "calls": calls[name], "seconds": times[name] / 1e6} for name in longest],
    }


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _length(intervals: list[Interval]) -> float:
    """Returns the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _stamp(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
