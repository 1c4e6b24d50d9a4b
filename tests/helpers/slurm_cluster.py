"""A real Slurm on one machine: a controller and several nodes, each a `slurmd` on its own port.

The nodes share files and processes, as they would a file system; their names resolve to nothing, so
ranks have to ask Slurm for an address at which to meet. Everything lives in one folder and listens
on the loopback only. It needs root, since `slurmd` starts jobs as their users.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")
Daemon = subprocess.Popen[bytes]
NODES = ("n1", "n2", "n3")
CPUS = 16
"""Of each node; may exceed the machine's, because the tests do not measure speed."""
GPUS = 8
"""Of each node; they exist only by name."""
PACKAGES = {
    **dict.fromkeys(("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue"), "slurm-wlm"),
    "munged": "munge",
}
"""Program → Debian package."""
NODE_VARIABLE = "LLMTRAIN_TEST_NODE"
"""In the environment of a node's daemon, which the processes that it starts inherit."""

SLURM_CONF = """
ClusterName=llmtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job starts again once its old credential has expired.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000,bf_interval=2
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
KillWait={kill_wait}
InactiveLimit=0
MinJobAge=300
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs={cpus} Gres=gpu:{gpus}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str | None:
    """Returns what this machine lacks for a cluster, and how to install it; None if nothing is missing."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    packages = {package for program, package in PACKAGES.items() if shutil.which(program, path=path) is None}
    return f"apt-get install {' '.join(sorted(packages))}" if packages else None


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster, and how to use it."""

    folder: Path
    """Configuration, state and logs; removed with the cluster."""
    nodes: dict[str, Daemon]
    """Name → its daemon."""

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns the environment of a program that submits jobs, and thus of the jobs."""
        return {**os.environ, **(extra or {}), **_path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: object, check: bool = True, **env: str) -> str:
        """Returns the standard output of a Slurm command, or of a command that calls one."""
        line = [str(part) for part in command]
        result = subprocess.run(line, capture_output=True, text=True, timeout=120, env=self.environment(env))
        if check and result.returncode:
            raise AssertionError(f"{line}: {result.stdout}{result.stderr}")
        return result.stdout

    def job(self, job: str) -> dict[str, str]:
        """Returns the output of `scontrol show job` for a job: JobState, Restarts, NodeList, ExitCode, …"""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, job: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Waits until the job is in one of the states (default `("COMPLETED",)`), and returns the job."""
        wanted = states or ("COMPLETED",)
        return self.until(lambda: (found := self.job(job))["JobState"] in wanted and found, seconds, job)

    def until(self, condition: Callable[[], T], seconds: float, job: str = "") -> T:
        """Waits until a condition has a true value, and returns it."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {seconds} s: {self.told(job)}"
            time.sleep(0.25)
        return value

    def told(self, job: str) -> str:
        """Returns everything that explains the state of a job."""
        about = self.run("scontrol", "show", "job", job, check=False) if job else ""
        logs = [path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log"))]
        return "\n".join([about, self.run("sinfo", "-N", "-l", check=False), *logs])

    def kill_node(self, name: str) -> None:
        """Kills a node's daemon and all processes that it started, like a power failure."""
        self.nodes[name].kill()
        self.nodes[name].wait()
        _kill(self.folder, lambda env: env.get(NODE_VARIABLE) == name or env.get("SLURMD_NODENAME") == name)

    def start_node(self, name: str) -> None:
        """Starts a node, and waits until it accepts jobs."""
        self.nodes[name] = _start(self.folder, f"slurmd-{name}", ["slurmd", "-D", "-N", name], {NODE_VARIABLE: name})
        self.until(lambda: self.run("sinfo", "-h", "-n", name, "-o", "%t", check=False).strip() == "idle", 30)


@contextmanager
def slurm_cluster(folder: Path, slurmd_timeout: int = 6, kill_wait: int = 20) -> Iterator[SlurmCluster]:
    """Makes a cluster in an empty folder, and takes away all of its processes.

    slurmd_timeout: seconds after which a node that does not answer is down. kill_wait: seconds
    between SIGTERM and SIGKILL for a job that is ended. One cluster at a time on a machine: a second one waits.
    """
    with FileLock(Path(tempfile.gettempdir()) / "llmtrain-tests-slurm.lock"):
        yield from _cluster(folder, slurmd_timeout, kill_wait)


def _cluster(folder: Path, slurmd_timeout: int, kill_wait: int) -> Iterator[SlurmCluster]:
    ports = _free_ports(len(NODES) + 1)
    (folder / "state").mkdir()
    values = {"host": socket.gethostname(), "folder": folder, "nodes": len(NODES), "cpus": CPUS, "gpus": GPUS}
    (folder / "slurm.conf").write_text(
        SLURM_CONF.format(
            **values, port=ports[0], first_port=ports[1], last_port=ports[-1],
            slurmd_timeout=slurmd_timeout, kill_wait=kill_wait,
        )
    )  # fmt: skip
    for number in range(GPUS):
        (folder / f"gpu{number}").touch()  # Slurm counts device files, and binds no tasks to other files
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    with ExitStack() as undo:
        cluster = SlurmCluster(folder, {})
        daemons: list[Daemon] = []
        undo.callback(lambda: [daemon.wait() for daemon in (*daemons, *cluster.nodes.values())])
        undo.callback(_kill, folder, lambda _: True)
        daemons.append(_start_munge(folder))
        daemons.append(_start(folder, "slurmctld", ["slurmctld", "-D", "-i"]))
        cluster.until(lambda: "UP" in cluster.run("scontrol", "ping", check=False), 30)
        for name in NODES:
            cluster.start_node(name)
        yield cluster


def _start_munge(folder: Path) -> Daemon:
    home = folder / "munge"
    home.mkdir(mode=0o711)
    key = home / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"key-file": key, "socket": home / "socket", "seed-file": home / "seed"}
    files |= {"pid-file": home / "pid", "log-file": home / "log"}
    # --force: the folder lies below /tmp, which all may write to
    command = ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]
    daemon = _start(folder, "munged", command)
    deadline = time.monotonic() + 15
    while not (home / "socket").exists():
        assert time.monotonic() < deadline, (folder / "munged.log").read_text()
        time.sleep(0.05)
    return daemon


def _start(
    folder: Path, name: str, command: list[str], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **_path(), "SLURM_CONF": str(folder / "slurm.conf"), **(env or {})}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _path() -> dict[str, str]:
    return {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}


def _kill(folder: Path, which: Callable[[dict[str, str]], bool]) -> None:
    """Kills the processes of a cluster, recognized by its configuration, whose environment satisfies the condition."""
    mine = str(folder / "slurm.conf")
    while victims := [pid for pid, env in _processes() if env.get("SLURM_CONF") == mine and which(env)]:
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes() -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the id and the initial environment of every process except this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                parts = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                yield int(entry.name), dict(part.split("=", 1) for part in parts if "=" in part)


def _free_ports(count: int) -> list[int]:
    """Returns neighbouring free TCP ports."""
    for first in range(21000 + os.getpid() % 5000, 32000, count):
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise RuntimeError("no free ports")


__all__ = ["NODES", "SlurmCluster", "missing", "slurm_cluster"]
