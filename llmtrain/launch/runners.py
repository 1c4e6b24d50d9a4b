"""The programs that start workers on several hosts: DeepSpeed's launcher over pdsh, or Open MPI's mpirun."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from llmtrain.launch.hostfile import Host, include_option, render_hostfile

RunnerName = Literal["pdsh", "openmpi"]
SSH_TIMEOUT_S = 10
"""Seconds after which a host that does not answer ssh is reported, and nothing is started."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_TIMEOUT_S}")
SSH_KEEPALIVE = "-o ServerAliveInterval=3 -o ServerAliveCountMax=3"
"""Makes ssh notice a host without power, which closes no connection."""


@dataclass(frozen=True)
class Launch:
    """A job for a runner."""

    hosts: tuple[Host, ...]
    start: Path
    """The program of each worker: the same path on all hosts, without special characters for a shell."""
    address: str
    """The rendezvous of the workers: an address of the first host that the others can reach."""
    port: int


class Runner(Protocol):
    """A program that starts workers on hosts."""

    packages: Mapping[str, str]
    """Programs that it needs on this machine → Debian package."""
    takes_any_path: bool
    """Whether the path of Python may contain any character."""
    lost: re.Pattern[str]
    """Matches the lines of its log that report a lost `host`."""
    killed: re.Pattern[str] | None
    """Matches the lines of its log that report a `rank` that a `signal` ended, which cannot report that itself."""

    def command(self, launch: Launch, folder: Path) -> list[str]:
        """Returns its command line. folder: for files that it needs."""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns its environment: as few variables as possible, since it may pass them on in its own way."""

    def launcher_line_filter(self) -> Callable[[str], bool]:
        """Returns a function that recognises its own lines, which go to the log; it must see every line in order."""


class Pdsh(Runner):
    """DeepSpeed's launcher, which calls pdsh."""

    packages: Mapping[str, str] = {"pdsh": "pdsh", "ssh": "openssh-client"}
    takes_any_path = False
    lost = re.compile(r"pdsh@\S+: (?P<host>\S+): ssh exited with exit code 255")
    killed: re.Pattern[str] | None = None  # its log names the process, not the rank
    _LAUNCHER_LINE = re.compile(
        r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[(DEBUG|INFO|WARNING|ERROR)\] \["
        r"|pdsh@|ssh exited with exit code|closed by remote host"
    )

    def command(self, launch: Launch, folder: Path) -> list[str]:
        """Returns the command line. DeepSpeed sets variables that identify each worker."""
        hostfile = folder / "hostfile"
        hostfile.write_text(render_hostfile(launch.hosts))
        launcher = [sys.executable, str(Path(sys.executable).parent / "deepspeed")]
        hosts = ["--hostfile", str(hostfile), "--include", include_option(launch.hosts)]
        rendezvous = ["--master_addr", launch.address, "--master_port", str(launch.port)]
        options = ["--launcher", "pdsh", "--launcher_args=-N", "--no_local_rank", "--force_multi"]
        return [*launcher, *hosts, *rendezvous, *options, str(launch.start)]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Leaves out the variables that DeepSpeed's launcher would pass on by itself, unquoted."""
        exported = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
        passed = {name: value for name, value in env.items() if not name.startswith(exported)}
        return passed | {"DS_ENV_FILE": os.devnull, "PDSH_SSH_ARGS_APPEND": SSH_KEEPALIVE}

    def launcher_line_filter(self) -> Callable[[str], bool]:
        """Recognises its lines by their form."""
        return lambda line: self._LAUNCHER_LINE.search(line) is not None


class OpenMpi(Runner):
    """`mpirun`, called directly and not by DeepSpeed, whose runner supports no filter and passes on no signal."""

    packages: Mapping[str, str] = {"mpirun": "openmpi-bin", "ssh": "openssh-client"}
    takes_any_path = True
    lost = re.compile(
        r"lost communication with a remote daemon\.\s.*?Remote daemon: \S+ on node (?P<host>\S+)", re.DOTALL
    )
    killed = re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<signal>\d+ \(.*?\))")
    _RULE = re.compile(r"-{20,}\s*$")
    _PASSED_VARIABLES = re.compile(
        r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TERM|TMPDIR|SSH_\w+|KRB5CCNAME|(OMPI|PRTE|PMIX)_MCA_\w+"
    )
    _KEEPALIVE: Mapping[str, int] = {f"oob_tcp_keepalive_{name}": 3 for name in ("time", "intvl", "probes")}
    """Seconds after which a host without power is lost; Open MPI's own defaults are minutes."""

    def command(self, launch: Launch, folder: Path) -> list[str]:
        """Returns the command line.

        Each host is a separate part, so ranks follow the order of hosts and know their host.
        """
        parameters = {
            "plm": "rsh",
            "plm_rsh_args": " ".join((*SSH_OPTIONS, SSH_KEEPALIVE)),
            "plm_rsh_no_tree_spawn": 1,  # hosts need not reach each other by ssh
            **self._KEEPALIVE,
        }
        options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # By default it would bind each rank, including its threads, to one core.
        options += ["--bind-to", "none", "--wdir", "/"]
        for name, value in parameters.items():
            options += ["--mca", name, str(value)]
        parts: list[str] = []
        for node, host in enumerate(launch.hosts):
            count, devices = str(len(host.devices)), ",".join(map(str, host.devices))
            placement = [":"] * bool(node) + ["--host", f"{host.name}:{count}", "-n", count]
            rendezvous = [launch.address, str(launch.port)]
            parts += [*placement, sys.executable, str(launch.start), str(node), devices, *rendezvous]
        return [mpirun() or "mpirun", *options, *parts]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Keeps what ssh would set for a login.

        Ranks on this host would inherit other variables, but ranks on other hosts would not.
        """
        return {name: value for name, value in env.items() if self._PASSED_VARIABLES.fullmatch(name)}

    def launcher_line_filter(self) -> Callable[[str], bool]:
        """Recognises paragraphs between two lines of dashes, and single lines that begin with its own prefix."""
        inside = False

        def is_launcher_line(line: str) -> bool:
            nonlocal inside
            is_rule = self._RULE.match(line) is not None
            matches = inside or is_rule or re.match(r"\[\S+:\d+\] |mpirun: |Connection to \S+ closed", line) is not None
            inside = inside != is_rule
            return matches

        return is_launcher_line


RUNNERS: Mapping[RunnerName, Runner] = {"pdsh": Pdsh(), "openmpi": OpenMpi()}


def mpirun() -> str | None:
    """Returns the name of an Open MPI mpirun, or None. MPICH's program has the same name."""
    for name in ("mpirun", "mpirun.openmpi"):
        if shutil.which(name) is None:
            continue
        version = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
        if re.search(r"Open ?MPI|OpenRTE|PRRTE", version):
            return name
    return None


def remote_python(*arguments: object) -> str:
    """Returns the command for a host's shell that runs our Python with these arguments, in the same folder as here."""
    path = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
    return (
        f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', path, sys.executable, *map(str, arguments)])}"
    )
