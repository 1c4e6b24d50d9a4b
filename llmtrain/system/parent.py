"""Child processes that the kernel kills when their parent dies (Linux: PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def kill_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` that makes the kernel kill the child when this process dies, in whatever way."""
    # Safe in a process with threads, since it takes no lock; `prctl` is looked up before the fork.
    return partial(die_with, os.getpid(), ctypes.CDLL(None).prctl)


def die_with(parent: int, prctl: Callable[[int, int], int]) -> None:
    """Makes the kernel kill this process when `parent` dies, in whatever way. Runs in the forked child."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), signal.SIGKILL)
