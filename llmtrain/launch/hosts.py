"""A job on several hosts by DeepSpeed's launcher or mpirun over ssh, with what these leave out.

DeepSpeed 0.19.8 hands variables and paths to the hosts' shells unquoted, ends workers by `pkill -f`, and compares
nothing (`launcher/multinode_runner.py`, `launcher/runner.py`). So runners are given nothing but paths of our own
making: all else goes to each host before, by ssh's standard input, into a file that only the user may read; and workers
are told and ended by their process ids (`llmtrain.launch.on_host`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from queue import Empty
from threading import Thread
from typing import IO, Any

from llmtrain.errors import Exit, Problem, RecipeError, UserError, WorkerError
from llmtrain.launch.failure import Failure
from llmtrain.launch.hostfile import Host
from llmtrain.launch.on_host import facts, folder_of
from llmtrain.launch.rank import Reader
from llmtrain.launch.runners import RUNNERS, SSH_OPTIONS, Launch, RunnerName, mpirun
from llmtrain.launch.seal import Secret
from llmtrain.run_dir import RunDir
from llmtrain.stops import caught_signals, is_impatient
from llmtrain.untrusted import UNREADABLE, read_text, why

PREPARE_S = 120
"""Longest time for a host to say what it has: imports over a network filesystem."""
FORWARDED = re.compile(
    r"(NCCL|GLOO|UCX|FI|OMP|MKL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|HF|TRANSFORMERS|TOKENIZERS|LLMTRAIN|DS|WANDB|MLFLOW"
    r"|HOROVOD)_\w+|PYTHON\w*|PATH|LD_LIBRARY_PATH|CUDA_(?!VISIBLE_DEVICES)\w+"
)
"""Variables that workers get as they are here; what ~/.deepspeed_env says comes after them."""
SAFE = re.compile(r"[A-Za-z0-9_./-]+")


@dataclass(frozen=True)
class HostsJob:
    """What is started on all hosts."""

    hosts: tuple[Host, ...]
    recipe: Path
    argv: tuple[str, ...]
    """Of each worker, after its Python."""
    run_dir: RunDir
    runner: RunnerName = "pdsh"
    token: str = field(default_factory=lambda: secrets.token_hex(8))


def run_on_hosts(job: HostsJob) -> int:
    """Prepares every host, starts the workers, waits, and ends what is left of them; returns as `run_workers`.

    A signal that stops is handed to every worker, which saves; Ctrl-C after it ends them. Raises RecipeError where a
    host does not answer or has another version, and the error of the worker that failed first.
    """
    _check_here(job.runner)
    first = _prepare(job)
    launch = Launch(job.hosts, folder_of(job.token) / "start.py", *_meeting(job, first))
    log = job.run_dir.logs / "launcher.log"
    said = log.stat().st_size if log.exists() else 0
    try:
        with _started(job, launch) as process:
            code = _wait(job, process)
    finally:
        _everywhere(job, "end")
        _everywhere(job, "forget")
    return code if code == Exit.INTERRUPTED else _outcome(job, code, said)


def _check_here(runner: RunnerName) -> None:
    found = {name: mpirun() if name == "mpirun" else shutil.which(name) for name in RUNNERS[runner].packages}
    problems = [
        Problem("launch.program", program, "is not installed here", f"apt-get install {package}")
        for program, package in RUNNERS[runner].packages.items()
        if found[program] is None
    ]
    if not (RUNNERS[runner].takes_any_path or SAFE.fullmatch(sys.executable)):
        message = f"{sys.executable} is handed to the hosts' shells unquoted by DeepSpeed's launcher"
        fix = "use a Python whose path is letters and digits, or --runner openmpi"
        problems.append(Problem("launch.python", "python", message, fix))
    if problems:
        raise RecipeError(problems)


def _meeting(job: HostsJob, first: dict[str, Any]) -> tuple[str, int]:
    """Where workers meet: the first host, and a port that is free there; or as MASTER_ADDR and MASTER_PORT say.

    first: what that host said of itself.
    """
    reader = Reader(os.environ)
    port = reader.port("MASTER_PORT") if os.environ.get("MASTER_PORT") else int(first["port"])
    if reader.problems:
        raise RecipeError(reader.problems)
    return os.environ.get("MASTER_ADDR") or _address(job, first), port


def _address(job: HostsJob, first: dict[str, Any]) -> str:
    """The address that the first host's name has here, or else one that it has itself."""
    if len(job.hosts) == 1:
        return "127.0.0.1"
    asked = ["ssh", "-G", job.hosts[0].name]  # names may be ssh's own: this tells what they stand for
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    name = next((line.split()[1] for line in said.splitlines() if line.startswith("hostname ")), job.hosts[0].name)
    with suppress(OSError):
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        if not ip_address(address).is_loopback:  # a machine's own name often is
            return address
    if first["addresses"]:
        return str(first["addresses"][0])
    message = f"has no address that other hosts could reach, and '{name}' stands for none"
    raise RecipeError(Problem("launch.host", job.hosts[0].name, message, "name it by its address in the hostfile"))


def forwarded(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """The variables that workers get: the chosen ones, then those of `.deepspeed_env`. Raises RecipeError."""
    found = {name: value for name, value in env.items() if FORWARDED.fullmatch(name)}
    for folder in (home, Path.cwd()):
        file = folder / ".deepspeed_env"
        try:
            lines = read_text(file).split("\n")
        except FileNotFoundError:
            continue
        except UNREADABLE as error:
            raise RecipeError(Problem("launch.env_file", str(file), f"cannot be read: {why(error)}")) from None
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, equals, value = line.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name.strip()):
                raise RecipeError(
                    Problem("launch.env_file", f"{file}:{number}", f"'{line[:60]}' is not NAME=VALUE", "mend the line")
                )
            found[name.strip()] = value
    return found


def _prepare(job: HostsJob) -> dict[str, Any]:
    """What the first host says of itself.

    Raises RecipeError naming each host that does not answer, lacks llmtrain or has something else than this one.
    """
    env = forwarded(os.environ, Path.home()) | Secret.new().environment
    content = {"env": env, "cwd": str(Path.cwd()), "argv": job.argv, "recipe": str(job.recipe)}
    own = facts(job.recipe)
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        answers = list(pool.map(lambda host: _ask(job, host, "prepare", json.dumps(content), PREPARE_S), job.hosts))
    problems = [
        problem for host, answer in zip(job.hosts, answers, strict=True) for problem in _judge(host, answer, own)
    ]
    if problems:
        _everywhere(job, "forget")
        raise RecipeError(problems)
    first: dict[str, Any] = json.loads(answers[0].stdout)
    return first


def _judge(host: Host, answer: subprocess.CompletedProcess[str] | None, own: dict[str, Any]) -> Iterator[Problem]:
    name = host.name
    if answer is None:
        yield Problem("launch.host", name, f"does not answer within {PREPARE_S} s", f"ssh {name} true")
        return
    if answer.returncode:
        said = (answer.stderr.strip().splitlines() or ["nothing"])[-1]
        what = "does not answer ssh" if answer.returncode == 255 else "cannot run llmtrain"
        yield Problem("launch.host", name, f"{what}: {said}", f"ssh {name} {sys.executable} -m llmtrain --help")
        return
    theirs = json.loads(answer.stdout)
    pairs = [("Python", own["python"], theirs["python"])]
    names = sorted(own["packages"].keys() | theirs["packages"].keys())
    pairs += [(name, own["packages"].get(name, "none"), theirs["packages"].get(name, "none")) for name in names]
    different = [f"{name} {there} instead of {here}" for name, here, there in pairs if here != there]
    if theirs["llmtrain"] != own["llmtrain"]:
        different.append("other code of llmtrain")
    if theirs["recipe"] != own["recipe"]:
        different.append("another recipe file" if theirs["recipe"] else "no such recipe file")
    if different:
        yield Problem(
            "launch.versions", name, f"differs from this machine: {', '.join(different)}", "install the same there"
        )


def _ask(job: HostsJob, host: Host, verb: str, text: str = "", timeout: float = 30.0, *more: int) -> Any:
    """A verb of `on_host` on a host; None where it does not end in time."""
    node = str(job.hosts.index(host))
    arguments = (verb, job.token, *(() if verb in ("prepare", "forget") else (node,)), *map(str, more))
    path = os.environ.get("PYTHONPATH", "")
    there = ["env", f"PYTHONPATH={path}", sys.executable, "-m", "llmtrain.launch.on_host", *arguments]
    command = ["ssh", *SSH_OPTIONS, host.name, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(there)}"]
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return None


def _everywhere(job: HostsJob, verb: str, *more: int) -> None:
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        list(pool.map(lambda host: _ask(job, host, verb, "", 30.0, *more), job.hosts))


@contextmanager
def _started(job: HostsJob, launch: Launch) -> Iterator[subprocess.Popen[str]]:
    """The runner, with an environment and a folder that mean nothing to a shell."""
    runner = RUNNERS[job.runner]
    with tempfile.TemporaryDirectory() as folder:
        # In a session of its own: a Ctrl-C is for us, and goes to the workers by another way.
        process = subprocess.Popen(
            runner.command(launch, Path(folder)),
            cwd="/",
            env=runner.environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()  # whatever has ended this: nothing when it is over
            process.wait()


def _wait(job: HostsJob, process: subprocess.Popen[str]) -> int:
    """Passes lines on until the launcher ends; its exit code, or 130 for an impatient user."""
    assert process.stdout is not None
    log, is_chatter = job.run_dir.logs / "launcher.log", RUNNERS[job.runner].chatter()
    reader = Thread(target=_pass_on, args=(process.stdout, log, is_chatter), daemon=True)
    stopped_by: int | None = None
    with caught_signals() as events:
        reader.start()
        while process.poll() is None:
            try:
                event = events.get(timeout=0.2)
            except Empty:
                continue
            assert isinstance(event, int)
            if is_impatient(event, stopped_by):
                return Exit.INTERRUPTED
            if stopped_by is None:
                _everywhere(job, "signal", event)
            stopped_by = stopped_by or event
    reader.join(timeout=5)
    return process.returncode


def _pass_on(lines: IO[str], log: Path, is_chatter: Callable[[str], bool]) -> None:
    """What workers say goes to the terminal, what launchers say to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for line in lines:
            if is_chatter(line):
                file.write(line)
                file.flush()
            else:
                print(line, end="", flush=True)


def _outcome(job: HostsJob, code: int, said: int) -> int:
    """Raises the error of the worker that failed first, where the run directory shows it.

    said: where this launch begins in the runner's log.
    """
    if code in (Exit.DONE, Exit.RESUME):
        return code
    log = job.run_dir.logs / "launcher.log"
    told = log.read_bytes()[said:].decode(errors="replace") if log.exists() else ""
    runner, lost = RUNNERS[job.runner], []
    if match := runner.lost.search(told):
        message = "the connection to it has ended, or the host is lost"
        lost = [Problem("worker.host", match["host"], message, f"see {log}")]
    elif runner.struck and (match := runner.struck.search(told)):
        lost = [Problem("worker.died", f"rank {match['rank']}", f"killed by signal {match['signal']}", f"see {log}")]
    failures = [Failure.read(path) for path in job.run_dir.logs.glob("rank_*.error.json")]
    first = min((one for one in failures if one is not None), key=lambda one: (one.is_cut_off, one.time), default=None)
    if first is not None and not (first.is_cut_off and lost):
        error: UserError | None = first.user_error()
        died = Problem("worker.died", f"rank {first.rank}", first.summary, f"see {job.run_dir.log_file(first.rank)}")
        raise error or WorkerError([*lost, died])
    message = f"ended with exit code {code}"
    raise WorkerError(lost or [Problem("worker.died", "--launcher deepspeed", message, f"see {log}")])


def described(hosts: Sequence[Host]) -> str:
    """A line for people."""
    return ", ".join(f"{host.name} × {len(host.devices)}" for host in hosts)
