"""Makes the filesystem calls of a process fail, or kills the process, at a call of a given number."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "fchmod", "symlink")
"""The calls with which `pathlib`, `shutil`, `tempfile` and `llmtrain.system.durable` change a filesystem."""


class Faults:
    """Counts the calls; at number `at`, injects the fault that `kind` names."""

    def __init__(self, at: int | None = None, kind: str = "kill") -> None:
        """kind: `kill` before the call; `half`: after it, of a write after half of it; `full`: ENOSPC instead of it."""
        self.at = at
        self.kind = kind
        self.count = 0

    def wrap(self, name, original):
        def call(*arguments, **named):
            self.count += 1
            if self.at == self.count:
                if self.kind == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "injected")
                if self.kind == "half" and name == "write":
                    original(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
                elif self.kind == "half":
                    with suppress(OSError):  # a folder that is there, a file that is not
                        original(*arguments, **named)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return call


@contextmanager
def injected(faults: Faults) -> Iterator[Faults]:
    """Sends every filesystem call of this process through `faults`."""
    originals = {name: getattr(os, name) for name in CALLS}
    for name, original in originals.items():
        setattr(os, name, faults.wrap(name, original))
    try:
        yield faults
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def die_after(seconds: float) -> None:
    """Lets the kernel kill this process after some time, whatever it is doing then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
