"""Two hosts on one machine: network namespaces joined by a virtual cable, with an ssh server in each.

What runs in a namespace sees its own loopback and the cable, and nothing else: programs on the two
hosts meet over the network or not at all. They share files, process numbers and the host name, as
nodes of a cluster share a file system. Their name resolves to 127.0.1.1, as Debian's installer
writes it, so that gloo left alone would listen where the other host cannot reach it. It needs root,
because only root may create namespaces.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "cable"
"""Name of the network interface on both hosts."""
ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""From the range reserved for documentation (RFC 5737). The namespaces share no network with the machine or each
other."""
SSHD = "/usr/sbin/sshd"  # it insists on being started by its absolute path
PACKAGES = {
    **{"ip": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pdsh": "pdsh"},
    "mpirun.openmpi": "openmpi-bin",
}
"""Program → Debian package."""

SSHD_CONFIG = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
SSH_CONFIG = """
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
BatchMode yes
LogLevel ERROR
"""


def missing() -> str | None:
    """Returns what this machine lacks for two hosts, and how to install it; None if nothing is missing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = {package for program, package in PACKAGES.items() if shutil.which(program) is None}
    if not Path(SSHD).exists():
        packages.add("openssh-server")
    if packages:
        return f"apt-get install {' '.join(sorted(packages))}"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no network namespace may be made here: {probe.stderr.strip()}" if probe.returncode else None


@dataclass(frozen=True)
class Host:
    """One of the two."""

    namespace: str
    address: str

    def command(self, *arguments: object) -> list[str]:
        """Returns a command line that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.namespace, *map(str, arguments)]

    def processes(self) -> list[int]:
        """Returns the processes of this host, including its ssh server."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def listening(self) -> list[int]:
        """Returns the TCP ports that are open to other hosts, without the ssh server's."""
        lines = _run(*self.command("ss", "-H", "-ltnp")).splitlines()
        places = [line.split()[3].rpartition(":") for line in lines if '"sshd"' not in line]
        return [int(port) for address, _, port in places if not address.startswith("127.")]

    def add_address(self, address: str) -> None:
        """Adds the address of a third machine: its messages come from no host of the job."""
        _run("ip", "-n", self.namespace, "address", "add", f"{address}/24", "dev", INTERFACE)

    def cut_off(self) -> None:
        """Disconnects the cable: connections stay open, but nothing is transmitted."""
        _run("ip", "-n", self.namespace, "link", "set", INTERFACE, "down")

    def kill_all(self) -> None:
        """Kills every process of this host, like a power failure; returns when they are gone."""
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@dataclass(frozen=True)
class TwoHosts:
    """The two hosts, and methods to use them."""

    hosts: tuple[Host, Host]
    folder: Path
    """Keys and configurations; removed with the hosts."""

    def hostfile(self, slots: int) -> Path:
        """Writes a hostfile with this number of workers on each host."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{host.address} slots={slots}\n" for host in self.hosts))
        return path

    def environment(self, workers: Mapping[str, str]) -> dict[str, str]:
        """For DeepSpeed's launcher on a host: it hands `workers` to its workers, and no others but PYTHON*."""
        exported = self.folder / "deepspeed_env"
        exported.write_text("".join(f"{name}={value}\n" for name, value in workers.items()))
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        return {**os.environ, **workers, **root, "PATH": path, "DS_ENV_FILE": str(exported)}


@contextmanager
def two_hosts(folder: Path, other_files: Mapping[Path, Path] | None = None) -> Iterator[TwoHosts]:
    """Creates both hosts, and finally removes them and everything that ran on them.

    folder: empty, for keys and configurations. other_files: file → what the second host sees in its place.
    """
    pair = secrets.token_hex(3)
    names = [f"llmtrain-{pair}-{number}" for number in (1, 2)]
    hosts = (Host(names[0], ADDRESSES[0]), Host(names[1], ADDRESSES[1]))
    with ExitStack() as undo:
        for host in hosts:
            _name(host, undo)
            _run("ip", "netns", "add", host.namespace)
            undo.callback(_run, "ip", "netns", "delete", host.namespace)
            undo.callback(host.kill_all)
        _connect(*hosts)
        _make_keys(folder)
        _start_sshd(hosts[0], folder)
        _start_sshd(hosts[1], folder, other_files or {})
        yield TwoHosts(hosts, folder)


def _name(host: Host, undo: ExitStack) -> None:
    """Writes the file that `ip netns exec` mounts over /etc/hosts."""
    folder = Path("/etc/netns") / host.namespace
    folder.mkdir(parents=True)
    undo.callback(shutil.rmtree, folder)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")


def _connect(one: Host, other: Host) -> None:
    peer = ("peer", "name", INTERFACE, "netns", other.namespace)
    _run("ip", "-n", one.namespace, "link", "add", INTERFACE, "type", "veth", *peer)
    for host in (one, other):
        inside = ("ip", "-n", host.namespace)
        _run(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", INTERFACE, "up")


def _make_keys(folder: Path) -> None:
    """One key for the servers, one for their user, and an `ssh` that uses these and reads no one's configuration.

    Both DeepSpeed's launcher and pdsh call `ssh` by its name, the first without a way to add options.
    """
    for name in ("host_key", "key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"{address} {public}" for address in ADDRESSES))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {shlex.quote(str(folder / "ssh_config"))} "$@"\n')
    wrapper.chmod(0o755)


def _start_sshd(host: Host, folder: Path, other_files: Mapping[Path, Path] | None = None) -> None:
    """An ssh server of a host, with a file system of its own: `ip netns exec` makes one for what it runs."""
    Path("/run/sshd").mkdir(exist_ok=True)  # its place to drop privileges in; an init script makes it elsewhere
    config = folder / f"sshd_{host.address}.conf"
    config.write_text(SSHD_CONFIG.format(address=host.address, folder=folder))
    server = shlex.join([SSHD, "-f", str(config), "-E", str(folder / f"sshd_{host.address}.log")])
    mounts = [shlex.join(["mount", "--bind", str(new), str(old)]) for old, new in (other_files or {}).items()]
    _run(*host.command("sh", "-c", " && ".join([*mounts, server])))  # returns when it listens


def _run(*command: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{shlex.join(map(str, command))}: {result.stderr.strip()}")
    return result.stdout
