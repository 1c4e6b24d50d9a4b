"""`events.jsonl`: what happened to a run besides its steps. Unlike the metrics, no line is ever removed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal

from llmtrain.run_dir import RunDir
from llmtrain.system.durable import open_log

MOST_TEXT = 2000
"""Characters of a text that are kept."""
EventName = Literal["started", "stopped", "died", "finished", "skipped", "rolled_back"]


def note_event(run_dir: RunDir, event: EventName, step: int, text: str) -> None:
    """Appends a line. If the disk does not accept it, it is lost, and the run goes on.

    step: number of optimizer steps taken. text: what happened, for people.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"time": now, "event": event, "step": step, "text": text[:MOST_TEXT]}) + "\n"
    with suppress(OSError):
        descriptor = open_log(run_dir.events_file)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
