"""The program that `llmtrain train --launcher deepspeed` runs on each host over ssh: `python -m ... VERB TOKEN`.

`prepare` reads what the workers need from standard input into a folder that only the user can read, and describes this
host. `signal` and `end` reach the workers, which write their process ids there, and `forget` removes the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain.launch.discovery.interfaces import addresses
from llmtrain.launch.rendezvous import free_port
from llmtrain.run_dir import versions
from llmtrain.system.host import process_fields
from llmtrain.system.stops import STOP_SIGNALS

END_S = 5.0
"""Seconds from SIGTERM to SIGKILL for workers that outlive their job."""
START = """
import json, os, signal, sys

stops = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # until the worker listens
folder = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(folder, "job.json")) as file:
    job = json.load(file)
with open("/proc/self/stat") as file:
    started = file.read().rpartition(")")[2].split()[19]
variables = {}
if sys.argv[1:]:
    node, devices, address, port = sys.argv[1:]
    variables = {"CUDA_VISIBLE_DEVICES": devices, "MASTER_ADDR": address, "MASTER_PORT": port}
    variables["TTY_COMPATIBLE"] = "0"  # under mpirun, local ranks have a terminal, but their output goes to a pipe
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
else:
    node, rank = os.environ["CROSS_RANK"], os.environ["RANK"]
with open(os.path.join(folder, node + "." + rank + ".pid"), "w") as file:
    file.write(f"{os.getpid()} {started}")
stop = os.path.join(folder, node + ".stop")
if os.path.exists(stop):
    with open(stop) as file:
        os.kill(os.getpid(), int(file.read()))
os.environ.update(job["env"])
os.environ.update(variables)
os.chdir(job["cwd"])
os.execv(sys.executable, [sys.executable, "-u", *job["argv"]])
"""
"""The program that is started for each worker. Its path is the only part of the job that a shell sees.

DeepSpeed's launcher sets variables that identify the worker. Open MPI only sets its rank, so it gets arguments.
"""


def job_folder(token: str) -> Path:
    """Returns the job's folder on a host: the same path on all of them, without special characters for a shell."""
    return Path("/tmp") / f"llmtrain-{token}"


def main() -> None:
    """Runs one verb."""
    verb, token, *rest = sys.argv[1:]
    if verb == "prepare":
        job = json.load(sys.stdin)
        _prepare(job_folder(token), job)
        rendezvous = {"addresses": addresses(), "port": free_port()}
        json.dump({**version_facts(Path(job["recipe"])), **rendezvous}, sys.stdout)
    elif verb == "signal":
        _signal(job_folder(token), int(rest[0]), int(rest[1]))
    elif verb == "end":
        _end(job_folder(token), int(rest[0]))
    elif verb == "forget":
        shutil.rmtree(job_folder(token), ignore_errors=True)


def version_facts(recipe: Path) -> dict[str, Any]:
    """Returns what must be the same on every host."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": versions(),
        "llmtrain": _digest(sorted(Path(__file__).parents[1].rglob("*.py"))),
        "recipe": _digest([recipe]) if recipe.is_file() else None,
    }


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _prepare(folder: Path, job: dict[str, Any]) -> None:
    """Writes the job's files. Raises PermissionError if another user has created the folder."""
    folder.mkdir(mode=0o700, exist_ok=True)  # hosts may share a file system
    if folder.stat().st_uid != os.geteuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user")
    for name, text in (("job.json", json.dumps(job)), ("start.py", START)):
        temporary = folder / f".{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(folder / name)


def _workers(folder: Path, node: int) -> list[int]:
    """Returns the process ids of a node's running workers. An id that was reused by another process does not count."""
    pids = []
    for file in folder.glob(f"{node}.*.pid"):
        with suppress(OSError, ValueError, IndexError):
            pid, started = file.read_text().split()
            stat = process_fields(int(pid))
            if stat[19] == started and stat[0] not in "ZX":
                pids.append(int(pid))
    return pids


def _signal(folder: Path, node: int, number: int) -> None:
    """Signals a node's workers.

    Workers that have not started yet read the signal once they have noted their process id.
    """
    if number in STOP_SIGNALS:
        temporary = folder / f".{node}.stop"
        temporary.write_text(str(int(number)))
        temporary.replace(folder / f"{node}.stop")
    for pid in _workers(folder, node):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _end(folder: Path, node: int) -> None:
    """Ends the workers that are left. They have had their time to save: those that still run hang."""
    deadline = time.monotonic() + END_S
    _signal(folder, node, signal.SIGTERM)
    while _workers(folder, node) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal(folder, node, signal.SIGKILL)


if __name__ == "__main__":
    main()
