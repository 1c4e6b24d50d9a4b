"""Wraps a worker of torchrun or accelerate: `python -m ... FOLDER PYTHON_ARGUMENT...`.

These tools treat every exit code but 0 as a failure. This module runs Python as its child, writes the child's process
id and how it ended to a folder, and reports success to the tool if the child stopped after saving.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

from llmtrain.errors import Exit
from llmtrain.system.durable import write_atomically
from llmtrain.system.parent import die_with
from llmtrain.system.stops import STOP_SIGNALS


def main() -> None:
    """Runs the worker, and exits with its exit code, or 0 if that is 75."""
    folder, *arguments = sys.argv[1:]
    rank = os.environ.get("RANK", "0")
    tool = os.getppid()
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        """Passes a signal on: the tool ends its workers with SIGTERM if another one has failed."""
        received.append(number)
        for child in children:
            child.send_signal(number)

    for stop in STOP_SIGNALS:
        signal.signal(stop, pass_on)
    die_with(tool)
    child = subprocess.Popen([sys.executable, *arguments], preexec_fn=partial(_begin, os.getpid()))
    children.append(child)
    for number in received:
        child.send_signal(number)
    write_atomically(Path(folder) / f"{rank}.pid", str(child.pid))
    code = child.wait()
    ended = {"rank": int(rank), "code": code, "time": time.time(), "signals": received}
    write_atomically(Path(folder) / f"{rank}.ended.json", json.dumps(ended))
    if code < 0:
        code = 128 - code
    sys.exit(0 if code == Exit.RESUME else code)


def _begin(parent: int) -> None:
    """Blocks signals until the worker handles them (`StopSignals`), and makes it end with its parent.

    Runs in the forked child.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    die_with(parent)


if __name__ == "__main__":
    main()
