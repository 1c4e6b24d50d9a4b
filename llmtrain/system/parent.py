"""Child processes that the kernel kills when their parent dies (Linux: PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Looked up before a fork: `die_with` is then safe in the child of a process with threads, since it takes no lock.
prctl = ctypes.CDLL(None).prctl


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that the kernel kills when this process dies, in whatever way.

    options: those of `subprocess.Popen`. Without `stdin`, it has no standard input.
    """
    options = {"stdin": subprocess.DEVNULL, **options}
    return subprocess.Popen(command, preexec_fn=partial(die_with, os.getpid()), **options)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when `parent` dies, in whatever way. Runs in the forked child."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), signal.SIGKILL)
