"""Runs a job on several hosts with DeepSpeed's launcher or mpirun over ssh, and adds what these lack.

DeepSpeed 0.19.8 passes variables and paths to the hosts' shells unquoted, ends workers with `pkill -f`, and compares
nothing between hosts (`launcher/multinode_runner.py`, `launcher/runner.py`). Therefore runners only receive paths that
we create. Everything else is sent to each host beforehand over ssh's standard input, into a file that only the user can
read; and workers are signalled and ended by their process ids (`llmtrain.launch.host_agent`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from queue import Empty
from threading import Thread
from typing import IO, Any

from llmtrain.errors import Exit, Problem, RecipeError, WorkerError
from llmtrain.launch.authentication import Secret
from llmtrain.launch.discovery.rank import RankReader
from llmtrain.launch.failure import Failure
from llmtrain.launch.host_agent import job_folder, version_facts
from llmtrain.launch.hostfile import Host
from llmtrain.launch.runners import RUNNERS, SSH_OPTIONS, Launch, RunnerName, mpirun, remote_python
from llmtrain.run_dir import RunDir
from llmtrain.system.stops import QUIT, caught_signals
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_text

PREPARE_S = 120
"""Longest time in seconds for a host to describe itself, which includes imports over a network file system."""
FORWARDED = re.compile(
    r"(NCCL|GLOO|UCX|FI|OMP|MKL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|HF|TRANSFORMERS|TOKENIZERS|LLMTRAIN|DS|WANDB|MLFLOW"
    r"|HOROVOD)_\w+|PYTHON\w*|PATH|LD_LIBRARY_PATH|CUDA_(?!VISIBLE_DEVICES)\w+"
)
"""Variables that are forwarded to workers; those of ~/.deepspeed_env override them."""
SHELL_SAFE = re.compile(r"[A-Za-z0-9_./-]+")


@dataclass(frozen=True)
class HostsJob:
    """A job to start on all hosts."""

    hosts: tuple[Host, ...]
    recipe: Path
    argv: tuple[str, ...]
    """Arguments of each worker's Python."""
    run_dir: RunDir
    runner: RunnerName = "pdsh"
    token: str = field(default_factory=lambda: secrets.token_hex(8))


def run_on_hosts(job: HostsJob) -> int:
    """Prepares every host, runs the workers, and ends those that are left. Returns the exit code as `run_workers` does.

    A stop signal is passed to every worker, which then saves; a Ctrl-C after it ends them. Raises RecipeError if a host
    does not answer or differs in versions, and otherwise the error of the worker that failed first.
    """
    _check_launch_host(job.runner)
    first = _prepare(job)
    launch = Launch(job.hosts, job_folder(job.token) / "start.py", *_rendezvous(job, first))
    log = job.run_dir.logs / "launcher.log"
    log_offset = log.stat().st_size if log.exists() else 0
    try:
        with _started(job, launch) as process:
            code = _wait(job, process)
    finally:
        _on_all_hosts(job, "end")
        _on_all_hosts(job, "forget")
    return code if code == Exit.INTERRUPTED else _outcome(job, code, log_offset)


def _check_launch_host(runner: RunnerName) -> None:
    problems = [
        Problem("launch.program", program, "is not installed here", f"apt-get install {package}")
        for program, package in RUNNERS[runner].packages.items()
        if (mpirun() if program == "mpirun" else shutil.which(program)) is None
    ]
    if not (RUNNERS[runner].takes_any_path or SHELL_SAFE.fullmatch(sys.executable)):
        message = f"{sys.executable} would be passed unquoted to the hosts' shells by DeepSpeed's launcher"
        fix = "use a Python whose path has only letters, digits and ._/-, or --runner openmpi"
        problems.append(Problem("launch.python", "python", message, fix))
    if problems:
        raise RecipeError(problems)


def _rendezvous(job: HostsJob, first: dict[str, Any]) -> tuple[str, int]:
    """Returns the rendezvous of workers: MASTER_ADDR and MASTER_PORT, or a free port of the first host.

    first: the first host's description of itself.
    """
    reader = RankReader(os.environ)
    port = reader.port("MASTER_PORT") if os.environ.get("MASTER_PORT") else int(first["port"])
    if reader.problems:
        raise RecipeError(reader.problems)
    return os.environ.get("MASTER_ADDR") or _address(job, first), port


def _address(job: HostsJob, first: dict[str, Any]) -> str:
    """Returns the address that the first host's name resolves to here, or else one of its own addresses."""
    if len(job.hosts) == 1:
        return "127.0.0.1"
    command = ["ssh", "-G", job.hosts[0].name]  # resolves aliases of ssh's own configuration
    options = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    name = next((line.split()[1] for line in options.splitlines() if line.startswith("hostname ")), job.hosts[0].name)
    with suppress(OSError):
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        if not ip_address(address).is_loopback:  # as a machine's own name often does
            return address
    if first["addresses"]:
        return str(first["addresses"][0])
    message = f"has no address that other hosts could reach, and '{name}' does not resolve to one"
    raise RecipeError(Problem("launch.host", job.hosts[0].name, message, "use its address in the hostfile"))


def forwarded(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """Returns the variables for the workers: the chosen ones, overridden by those of `.deepspeed_env`.

    Raises RecipeError.
    """
    variables = {name: value for name, value in env.items() if FORWARDED.fullmatch(name)}
    for folder in (home, Path.cwd()):
        file = folder / ".deepspeed_env"
        try:
            lines = read_text(file).split("\n")
        except FileNotFoundError:
            continue
        except UNREADABLE as error:
            raise RecipeError(Problem("launch.env_file", str(file), f"cannot be read: {file_fault(error)}")) from None
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, equals, value = line.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name.strip()):
                raise RecipeError(
                    Problem(
                        "launch.env_file", f"{file}:{number}", f"'{line[:60]}' is not NAME=VALUE", "correct the line"
                    )
                )
            variables[name.strip()] = value
    return variables


def _prepare(job: HostsJob) -> dict[str, Any]:
    """Sends the job to every host, compares the hosts, and returns the first host's description of itself.

    Raises RecipeError with each host that does not answer, lacks llmtrain or differs from this machine.
    """
    env = forwarded(os.environ, Path.home()) | Secret.new().environment
    content = {"env": env, "cwd": str(Path.cwd()), "argv": job.argv, "recipe": str(job.recipe)}
    expected = version_facts(job.recipe)
    answers = _on_all_hosts(job, "prepare", text=json.dumps(content), seconds=PREPARE_S)
    problems = [
        problem
        for host, answer in zip(job.hosts, answers, strict=True)
        for problem in _host_problems(host, answer, expected)
    ]
    if problems:
        _on_all_hosts(job, "forget")
        raise RecipeError(problems)
    first: dict[str, Any] = json.loads(answers[0].stdout)
    return first


def _host_problems(
    host: Host, answer: subprocess.CompletedProcess[str] | None, expected: dict[str, Any]
) -> Iterator[Problem]:
    name = host.name
    if answer is None:
        yield Problem("launch.host", name, f"did not answer within {PREPARE_S} s", f"ssh {name} true")
        return
    if answer.returncode:
        last_line = (answer.stderr.strip().splitlines() or ["nothing"])[-1]
        what = "does not answer ssh" if answer.returncode == 255 else "cannot run llmtrain"
        yield Problem("launch.host", name, f"{what}: {last_line}", f"ssh {name} {sys.executable} -m llmtrain --help")
        return
    actual = json.loads(answer.stdout)
    pairs = [("Python", expected["python"], actual["python"])]
    names = sorted(expected["packages"].keys() | actual["packages"].keys())
    pairs += [(name, expected["packages"].get(name, "none"), actual["packages"].get(name, "none")) for name in names]
    different = [f"{name} {there} instead of {here}" for name, here, there in pairs if here != there]
    if actual["llmtrain"] != expected["llmtrain"]:
        different.append("different code of llmtrain")
    if actual["recipe"] != expected["recipe"]:
        different.append("a different recipe file" if actual["recipe"] else "no such recipe file")
    if different:
        yield Problem(
            "launch.versions", name, f"differs from this machine: {', '.join(different)}", "install the same there"
        )


def _on_all_hosts(job: HostsJob, verb: str, *more: int, text: str = "", seconds: float = 30.0) -> list[Any]:
    """Runs a verb of `host_agent` on each host. Returns the ended processes; None for one that does not end in time."""

    def ask(node: int) -> Any:
        numbers = () if verb in ("prepare", "forget") else (node, *more)
        program = remote_python("-m", "llmtrain.launch.host_agent", verb, job.token, *numbers)
        command = ["ssh", *SSH_OPTIONS, job.hosts[node].name, program]
        try:
            return subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return None

    with ThreadPoolExecutor(len(job.hosts)) as pool:
        return list(pool.map(ask, range(len(job.hosts))))


@contextmanager
def _started(job: HostsJob, launch: Launch) -> Iterator[subprocess.Popen[str]]:
    """Starts the runner, with an environment and a working directory without special characters for a shell."""
    runner = RUNNERS[job.runner]
    with tempfile.TemporaryDirectory() as folder:
        # In a session of its own: a Ctrl-C reaches only us, and we signal the workers.
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
            process.kill()  # however this ended; no effect if it has exited
            process.wait()


def _wait(job: HostsJob, process: subprocess.Popen[str]) -> int:
    """Prints the launcher's lines until it ends. Returns its exit code, or 130 for an impatient user."""
    assert process.stdout is not None
    log, is_launcher_line = job.run_dir.logs / "launcher.log", RUNNERS[job.runner].launcher_line_filter()
    reader = Thread(target=_forward_output, args=(process.stdout, log, is_launcher_line), daemon=True)
    stopped_by: int | None = None
    with caught_signals() as events:
        reader.start()
        while process.poll() is None:
            try:
                event = events.get(timeout=0.2)
            except Empty:
                continue
            assert isinstance(event, int)
            if event == QUIT:
                return Exit.INTERRUPTED
            if stopped_by is None:
                _on_all_hosts(job, "signal", event)
            stopped_by = stopped_by or event
    reader.join(timeout=5)
    return process.returncode


def _forward_output(lines: IO[str], log: Path, is_launcher_line: Callable[[str], bool]) -> None:
    """Prints lines of workers on the terminal, and writes lines of the launchers to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for line in lines:
            if is_launcher_line(line):
                file.write(line)
                file.flush()
            else:
                print(line, end="", flush=True)


def _outcome(job: HostsJob, code: int, log_offset: int) -> int:
    """Returns the exit code of a job that ended well.

    Raises the error of the worker that failed first, as far as the run directory shows it. log_offset: offset in the
    runner's log at which this launch begins.
    """
    if code in (Exit.DONE, Exit.RESUME):
        return code
    log = job.run_dir.logs / "launcher.log"
    output = log.read_bytes()[log_offset:].decode(errors="replace") if log.exists() else ""
    runner, lost = RUNNERS[job.runner], []
    if match := runner.lost.search(output):
        message = "the connection to it was lost, or the host went down"
        lost = [Problem("worker.host", match["host"], message, f"see {log}")]
    elif runner.killed and (match := runner.killed.search(output)):
        lost = [Problem("worker.died", f"rank {match['rank']}", f"killed by signal {match['signal']}", f"see {log}")]
    failures = [Failure.read(path) for path in job.run_dir.logs.glob("rank_*.error.json")]
    first = min(
        (failure for failure in failures if failure is not None),
        key=lambda failure: (failure.is_cut_off, failure.time),
        default=None,
    )
    if first is not None and not (first.is_cut_off and lost):
        error = first.error(job.run_dir.log_file(first.rank))
        raise WorkerError([*lost, *error.problems]) if not first.problems else error
    message = f"ended with exit code {code}"
    raise WorkerError(lost or [Problem("worker.died", "--launcher deepspeed", message, f"see {log}")])
