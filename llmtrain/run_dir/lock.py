"""The lock of a run directory. It admits one run at a time, even if several hosts share the disk.

The lock is the folder `.lock`. It contains one file, which describes the owner and has a unique name. The lock relies
on two operations that are atomic on every file system:

- A folder cannot be renamed to a folder that has content. To take the lock, a run creates a folder that contains its
  file, and renames the folder to `.lock`.
- A file is removed by name. To take over from a dead owner, a run removes the owner's file, then takes the lock as
  above. If two runs take over at the same time, neither can remove the other's file.

An owner on the same machine is alive while its process exists. An owner on another machine is alive while it touches
its file. The new run watches that file, and compares its times with each other, never with a clock.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from llmtrain.errors import Exit, Problem, RecipeError
from llmtrain.system.host import process_fields
from llmtrain.system.untrusted import UNREADABLE, open_regular, read_json

BEAT_S = 10.0
"""Seconds after which an owner touches its file again."""
STALE_S = 120.0
"""Seconds without a touch after which an owner on another machine is considered dead."""
LOOK_S = 0.5
"""Seconds between checks of another owner's file."""
MAX_BYTES = 4096
"""Size limit of an owner's file."""
ENDED = -1
"""Start time that stands for a process which has ended."""
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_PRINTABLE = r"^[\x20-\x7e]{1,255}$"


class Owner(BaseModel):
    """The owner of a lock."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: Annotated[str, Field(pattern=_PRINTABLE)]
    machine: Annotated[str, Field(pattern=_PRINTABLE)]
    """The scope in which its process id is valid: one boot of a kernel, and a PID namespace (container) in it."""
    pid: Annotated[int, Field(gt=0)]
    start: int
    """Start time of its process by the kernel's clock, needed because process ids are reused."""
    since: Annotated[str, Field(pattern=_PRINTABLE)]

    @classmethod
    def here(cls) -> Self:
        """Returns the description of this process."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            start=_start_of(os.getpid()) or 0,
            since=datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
        )

    @property
    def is_on_this_machine(self) -> bool:
        """Whether its process can be examined by this process."""
        return self.machine == _machine()

    @property
    def is_running(self) -> bool:
        """Whether its process is alive. Only valid for an owner on this machine."""
        start = _start_of(self.pid)
        return start == self.start or (start is None and _exists(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass
class RunLock:
    """The lock of a run directory, which this process holds until `release`, or until the process ends."""

    folder: Path
    file: Path

    def __post_init__(self) -> None:
        self._released = Event()
        self._thread = Thread(target=self._keep, name="run lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, folder: Path, say: Callable[[str], None]) -> Self:
        """Takes the lock of a run directory, and creates the directory if it does not exist.

        say: called with messages about a dead owner, and about waiting for an owner on another machine. Raises
        RecipeError if another run holds the lock, or if the folder cannot be written.
        """
        identity = uuid.uuid4().hex
        lock, staged = folder / ".lock", folder / f".lock-{identity}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            staged.mkdir()
            (staged / identity).write_text(Owner.here().model_dump_json())
            while not _renamed(staged, lock):
                _remove_dead_owner(lock, say)
        except OSError as error:
            message = f"cannot write {error.filename2 or error.filename or folder}: {error.strerror}"
            problem = Problem("run_dir.write", "--run-dir", message, "choose another folder, or make this one writable")
            raise RecipeError(problem) from None
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return cls(folder, lock / identity)

    def release(self) -> None:
        """Releases the lock, and removes the run directory if nothing was written to it."""
        self._released.set()
        self._thread.join()
        with suppress(OSError):
            self.file.unlink()
            self.file.parent.rmdir()
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self) -> None:
        """Touches the file regularly, in a thread. Ends this process if another one has taken over the lock."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._released.wait(BEAT_S):
            try:
                os.utime(self.file)
            except FileNotFoundError:
                if other := _owner_file(self.file.parent):
                    text = f"error: {self.folder} was taken over by {_read(other) or 'another run'}; this run ends"
                    print(text, file=sys.stderr, flush=True)
                    os._exit(Exit.WORKER)
            except OSError:
                continue  # the disk may recover


def is_held(folder: Path) -> bool:
    """Whether a run seems to be training in a folder. Only reads the folder.

    For an owner on another machine, the time of its file is compared with this machine's clock.
    """
    try:
        file = _owner_file(folder / ".lock")
        owner, touched = (_read(file), _touch_time(file)) if file else (None, None)
    except (OSError, RecipeError):
        return False
    if owner is not None and owner.is_on_this_machine:
        return owner.is_running
    return touched is not None and abs(time.time() - touched / 1e9) < STALE_S


def _renamed(staged: Path, lock: Path) -> bool:
    """Tries to rename the staged folder to the lock; returns False if another run holds the lock."""
    try:
        staged.rename(lock)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _remove_dead_owner(lock: Path, say: Callable[[str], None]) -> None:
    """Removes the file of a dead owner. Raises RecipeError if the owner is alive."""
    file = _owner_file(lock)
    if file is None:
        time.sleep(LOOK_S)  # the lock is being released
        return
    owner = _read(file)
    if owner is not None and owner.is_on_this_machine:
        if owner.is_running:
            raise _in_use(lock, owner)
        gone = f"{owner}, which has ended"
    else:
        if not _is_stale(file, owner, say):
            return
        gone = f"{owner or 'another run'}, which has not touched its lock for {STALE_S:.0f} s"
    with suppress(FileNotFoundError):  # another run has already removed it
        file.unlink()
        say(f"{lock.parent}: taking over from {gone}")


def _is_stale(file: Path, owner: Owner | None, say: Callable[[str], None]) -> bool:
    """Whether an owner on another machine has stopped touching its file; False if it has released the lock.

    Raises RecipeError if the owner is alive.
    """
    first, deadline = _touch_time(file), time.monotonic() + STALE_S
    if first is not None:
        message = f"{file.parent.parent} is held by {owner or 'another run'}"
        say(f"{message}; waiting up to {STALE_S:.0f} s to see whether it is alive")
    while first is not None and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        touched = _touch_time(file)
        if touched is None:
            return False
        if touched != first:
            raise _in_use(file.parent, owner)
    return first is not None


def _in_use(lock: Path, owner: Owner | None) -> RecipeError:
    since = f" since {owner.since}" if owner else ""
    message = f"{lock.parent} is in use: {owner or 'another run'} has been training in it{since}"
    fix = "wait for that run, stop it, or choose another folder"
    return RecipeError(Problem("run_dir.locked", "--run-dir", message, fix))


def _owner_file(lock: Path) -> Path | None:
    """Returns the file of the owner, or None. Raises RecipeError if the lock contains anything else."""
    try:
        entries = [
            path for path in lock.iterdir() if not path.name.startswith(".nfs")
        ]  # such files were removed but are still open elsewhere
    except FileNotFoundError:
        return None
    unexpected = [path for path in entries if not _IDENTITY.fullmatch(path.name)]
    if unexpected:
        raise RecipeError(
            Problem("run_dir.lock", str(unexpected[0]), "does not belong to a lock of llmtrain", "remove it")
        )
    return entries[0] if entries else None


def _read(file: Path) -> Owner | None:
    """Returns the owner that a file describes, or None if the file is unreadable."""
    try:
        return read_json(file, Owner, MAX_BYTES)
    except UNREADABLE:
        return None


def _touch_time(file: Path) -> int | None:
    """Returns when a file was last touched, in nanoseconds since the epoch, or None if it does not exist.

    The file is opened for this, which makes a network file system ask its server.
    """
    try:
        with open_regular(file) as content:
            return os.fstat(content.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _machine() -> str:
    """Returns the scope in which process ids are valid.

    If it is unknown, returns a unique name. Owners then count as being on other machines, and their files are watched.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {uuid.uuid4().hex}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


def _start_of(pid: int) -> int | None:
    """Returns the start time of a process, `ENDED` if it has ended but was not reaped, or None if it is unknown."""
    try:
        fields = process_fields(pid)
    except OSError:
        return None
    return ENDED if fields[0] in "ZX" else int(fields[19])
