"""A job on several hosts by DeepSpeed's launcher over ssh, with what that leaves out.

DeepSpeed 0.19.8 hands variables and paths to the hosts' shells unquoted, ends workers by `pkill -f`, and compares
nothing (`launcher/multinode_runner.py`, `launcher/runner.py`). So it is given nothing but paths of our own making:
all else goes to each host before, by ssh's standard input, into a file that only the user may read; and workers are
told and ended by their process ids (`llmtrain.launch.on_host`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from threading import Thread
from typing import IO, Any

from llmtrain.errors import Exit, Problem, RecipeError, UserError, WorkerError
from llmtrain.launch.failure import Failure
from llmtrain.launch.hostfile import Host, hostfile_of, include_of
from llmtrain.launch.local import caught_signals
from llmtrain.launch.on_host import facts, folder_of
from llmtrain.run_dir import RunDir

ANSWER_S = 10
"""A host that does not answer ssh so soon is named and nothing is started."""
PREPARE_S = 120
"""Longest time for a host to say what it has: imports over a network filesystem."""
FORWARDED = re.compile(
    r"(NCCL|GLOO|UCX|FI|OMP|MKL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|HF|TRANSFORMERS|TOKENIZERS|LLMTRAIN|DS|WANDB|MLFLOW"
    r"|HOROVOD)_\w+|PYTHON\w*|PATH|LD_LIBRARY_PATH|CUDA_(?!VISIBLE_DEVICES)\w+"
)
"""Variables that workers get as they are here; what ~/.deepspeed_env says comes after them."""
CHATTER = re.compile(
    r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[(DEBUG|INFO|WARNING|ERROR)\] \["
    r"|pdsh@|ssh exited with exit code|closed by remote host"
)
"""Lines of DeepSpeed's launcher and of pdsh, which go to the log."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={ANSWER_S}")
ALIVE = "-o ServerAliveInterval=3 -o ServerAliveCountMax=3"
"""Has ssh notice a host without power, which closes no connection."""
SSH_ENDED = 255
"""Exit code of ssh for trouble of its own."""
SAFE = re.compile(r"[A-Za-z0-9_./-]+")


@dataclass(frozen=True)
class HostsJob:
    """What is started on all hosts."""

    hosts: tuple[Host, ...]
    recipe: Path
    argv: tuple[str, ...]
    """Of each worker, after its Python."""
    run_dir: RunDir
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def command(self, hostfile: Path) -> list[str]:
        """DeepSpeed's launcher. hostfile: one that names these hosts."""
        launcher = [sys.executable, str(Path(sys.executable).parent / "deepspeed")]
        hosts = ["--hostfile", str(hostfile), "--include", include_of(self.hosts)]
        options = ["--launcher", "pdsh", "--launcher_args=-N", "--no_local_rank", "--force_multi"]
        return [*launcher, *hosts, *options, str(folder_of(self.token) / "start.py")]


def run_on_hosts(job: HostsJob) -> int:
    """Prepares every host, starts the workers, waits, and ends what is left of them; returns as `run_workers`.

    A signal that stops is handed to every worker, which saves; Ctrl-C after it ends them. Raises RecipeError where a
    host does not answer or has another version, and the error of the worker that failed first.
    """
    _check_here()
    _prepare(job)
    try:
        with _deepspeed(job) as process:
            code, killed_by = _wait(job, process)
    finally:
        _everywhere(job, "end")
        _everywhere(job, "forget")
    return 128 + killed_by if killed_by else _outcome(job, code)


def _check_here() -> None:
    problems = [
        Problem("launch.program", program, "is not installed here", f"apt-get install {package}")
        for program, package in (("pdsh", "pdsh"), ("ssh", "openssh-client"))
        if shutil.which(program) is None
    ]
    if not SAFE.fullmatch(sys.executable):
        message = f"{sys.executable} is handed to the hosts' shells unquoted by DeepSpeed's launcher"
        problems.append(Problem("launch.python", "python", message, "use a Python whose path is letters and digits"))
    if problems:
        raise RecipeError(problems)


def forwarded(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """The variables that workers get: the chosen ones, then those of `.deepspeed_env`. Raises RecipeError."""
    found = {name: value for name, value in env.items() if FORWARDED.fullmatch(name)}
    for folder in (home, Path.cwd()):
        file = folder / ".deepspeed_env"
        if not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, equals, value = line.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name.strip()):
                raise RecipeError(
                    Problem("launch.env_file", f"{file}:{number}", f"'{line[:60]}' is not NAME=VALUE", "mend the line")
                )
            found[name.strip()] = value
    return found


def _prepare(job: HostsJob) -> None:
    """Raises RecipeError naming each host that does not answer, lacks llmtrain or has something else than this one."""
    env = forwarded(os.environ, Path.home())
    content = {"env": env, "cwd": str(Path.cwd()), "argv": job.argv, "recipe": str(job.recipe)}
    own = facts(job.recipe)
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        answers = pool.map(lambda host: _ask(job, host, "prepare", json.dumps(content), PREPARE_S), job.hosts)
        problems = [
            problem for host, answer in zip(job.hosts, answers, strict=True) for problem in _judge(host, answer, own)
        ]
    if problems:
        _everywhere(job, "forget")
        raise RecipeError(problems)


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
    different = [key for key in ("python", "llmtrain", "recipe") if theirs[key] != own[key]]
    different += [
        f"{package} {theirs['packages'].get(package, 'missing')} instead of {own['packages'].get(package, 'none')}"
        for package in sorted(own["packages"].keys() | theirs["packages"].keys())
        if theirs["packages"].get(package) != own["packages"].get(package)
    ]
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
def _deepspeed(job: HostsJob) -> Iterator[subprocess.Popen[str]]:
    """DeepSpeed's launcher, with an environment and a folder that mean nothing to a shell."""
    kept = {name: value for name, value in os.environ.items() if not _exported(name)}
    kept |= {"DS_ENV_FILE": os.devnull, "PDSH_SSH_ARGS_APPEND": ALIVE}
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder) / "hostfile"
        hostfile.write_text(hostfile_of(job.hosts))
        # In a session of its own: a Ctrl-C is for us, and goes to the workers by another way.
        process = subprocess.Popen(
            job.command(hostfile),
            cwd="/",
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()  # whatever has ended this: nothing when it is over
            process.wait()


def _exported(name: str) -> bool:
    """What DeepSpeed's launcher would hand on by itself, unquoted."""
    return name.startswith(("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"))


def _wait(job: HostsJob, process: subprocess.Popen[str]) -> tuple[int, int]:
    """Passes lines on until the launcher ends; its exit code, and the signal of an impatient user, or 0."""
    assert process.stdout is not None
    reader = Thread(target=_pass_on, args=(process.stdout, job.run_dir.logs / "launcher.log"), daemon=True)
    stopped_by: int | None = None
    with caught_signals() as events:
        reader.start()
        while process.poll() is None:
            try:
                event = events.get(timeout=0.2)
            except Empty:
                continue
            assert isinstance(event, int)
            if stopped_by is not None and event == signal.SIGINT:
                return 0, stopped_by
            if stopped_by is None:
                _everywhere(job, "signal", event)
            stopped_by = stopped_by or event
    reader.join(timeout=5)
    return process.returncode, 0


def _pass_on(lines: IO[str], log: Path) -> None:
    """What workers say goes to the terminal, what launchers say to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for line in lines:
            if CHATTER.search(line):
                file.write(line)
                file.flush()
            else:
                print(line, end="", flush=True)


def _outcome(job: HostsJob, code: int) -> int:
    """Raises the error of the worker that failed first, where the run directory shows it."""
    if code in (Exit.DONE, Exit.RESUME):
        return code
    lost = []
    if code == SSH_ENDED:
        message = "the ssh connection to a host has ended, or the host is lost"
        lost = [Problem("worker.host", "--launcher deepspeed", message, f"see {job.run_dir.logs / 'launcher.log'}")]
    failures = [Failure.read(path) for path in job.run_dir.logs.glob("rank_*.error.json")]
    first = min((one for one in failures if one is not None), key=lambda one: one.time, default=None)
    if first is not None:
        error: UserError | None = first.user_error()
        died = Problem("worker.died", f"rank {first.rank}", first.summary, f"see {job.run_dir.log_file(first.rank)}")
        raise error or WorkerError([*lost, died])
    log = job.run_dir.logs / "launcher.log"
    message = f"ended with exit code {code}"
    raise WorkerError(lost or [Problem("worker.died", "--launcher deepspeed", message, f"see {log}")])


def described(hosts: Sequence[Host]) -> str:
    """A line for people."""
    return ", ".join(f"{host.name} × {len(host.devices)}" for host in hosts)
