"""Determines the network interfaces that gloo and NCCL use, and should use. Sends no packet. Linux.

By default gloo listens on the address that the host's own name resolves to. In the /etc/hosts of Debian and others that
is 127.0.1.1, which no other host can reach: ranks of several hosts then wait for each other forever.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmtrain.launch.discovery.rank import LOOPBACK, Rank
from llmtrain.system.untrusted import UNREADABLE, expanded, read_text

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOCAL_BRIDGES = ("virbr", "br-", "cni", "podman", "lxcbr", "lxdbr", "vboxnet", "vmnet")
"""Prefixes of interfaces that only lead to guests and containers of this machine. NCCL skips `docker` by itself."""
ELSEWHERE = "198.51.100.1"
"""An address of a range reserved for documentation (RFC 5737): it is routed by the default route, if there is one."""
DISCARD = 9
"""The port to connect sockets to that send nothing."""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6 addresses, in the kernel's order."""
    is_up: bool = True
    is_loopback: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether it may lead to another host."""
        return self.is_up and not self.is_loopback and bool(self.addresses)


@dataclass(frozen=True)
class Network:
    """The network of this host."""

    host: str
    """The host's own name."""
    own_address: str | None
    """The first address of the host name that can be listened on; without one, gloo uses the loopback."""
    interfaces: tuple[Interface, ...]

    @classmethod
    def here(cls) -> Network:
        """Inspects this host; resolving its name may take seconds if a name server is involved."""
        return cls(socket.gethostname(), _own_address(), tuple(interfaces()))

    @property
    def listens_on_loopback(self) -> bool:
        """Whether gloo, by default, could only be reached from this host."""
        return self.own_address is None or is_loopback(self.own_address)

    def having(self, address: str | None) -> Interface | None:
        """Returns the interface that has an address, or None."""
        return next((interface for interface in self.interfaces if address in interface.addresses), None)

    def towards(self, master: str) -> Interface | None:
        """Returns the interface of the route to rank 0; on rank 0's own host, the one by which others reach it."""
        if names_this_machine_only(master):
            return None
        source = route_source(master)
        if source is None or is_loopback(source):  # no route, or rank 0 is this host, under a local name
            source = route_source(ELSEWHERE)
        usable = [interface for interface in self.interfaces if interface.is_usable]
        return self.having(source) or (usable[0] if len(usable) == 1 else None)


@dataclass(frozen=True)
class InterfaceChoice:
    """The interfaces that a worker uses."""

    lines: tuple[str, ...]
    """Lines for people about the interfaces that gloo and NCCL use, and the reasons."""
    variables: dict[str, str] = field(default_factory=dict)
    """The variables to set for it; empty if the defaults or the user's own settings are right."""
    is_reachable: bool = True
    """Whether other hosts can reach gloo, as far as is known."""


def set_interfaces(rank: Rank, on_cpu: bool, env: MutableMapping[str, str] | None = None) -> InterfaceChoice:
    """Sets the variables in `env` that workers on several hosts need, before their process group is created.

    Does nothing if all workers are on one machine.
    """
    env = os.environ if env is None else env
    if rank.on_one_machine:
        return InterfaceChoice(())
    choice = choose_interfaces(rank.master_addr, on_cpu, Network.here(), env)
    env.update(choice.variables)
    return choice


def stay_on_loopback() -> None:
    """Makes gloo and NCCL listen where only this machine can reach them; the user's own settings are kept."""
    name = next(
        (interface.name for interface in interfaces() if interface.is_up and LOOPBACK in interface.addresses), None
    )
    if name is None:
        return
    os.environ.setdefault(GLOO, name)
    if nccl_setting(os.environ) is None:
        os.environ[NCCL] = name


def choose_interfaces(master: str, on_cpu: bool, network: Network, env: Mapping[str, str]) -> InterfaceChoice:
    """Chooses the interfaces for reaching the ranks of other hosts; the user's own settings are kept."""
    gloo = _for_gloo(master, network, env)
    if on_cpu:
        return gloo
    line, variables = _for_nccl(network, env)
    return replace(gloo, lines=(*gloo.lines, line), variables=gloo.variables | variables)


def _for_gloo(master: str, network: Network, env: Mapping[str, str]) -> InterfaceChoice:
    if env.get(GLOO):
        return InterfaceChoice((f"gloo: {env[GLOO]}, set by {GLOO}",))
    if not network.listens_on_loopback:
        interface = network.having(network.own_address)
        name = interface.name if interface else "the interface"
        return InterfaceChoice(
            (f"gloo: {name} ({network.own_address}), which the host name '{network.host}' resolves to",)
        )
    if names_this_machine_only(master):
        return InterfaceChoice((f"gloo: the loopback, where rank 0 is ({master})",))
    points = f"resolves to {network.own_address}" if network.own_address else "resolves to no address of this host"
    chosen = network.towards(master)
    if chosen is None:
        line = f"gloo: the loopback, since '{network.host}' {points} and no route leads to {master}; set {GLOO}"
        return InterfaceChoice((line,), is_reachable=False)
    addresses = ", ".join(address for address in chosen.addresses if not is_link_local(address))
    why = f"by the route to {master}, since the host name '{network.host}' {points}"
    return InterfaceChoice((f"gloo: {chosen.name} ({addresses}), {why}",), {GLOO: chosen.name})


def _for_nccl(network: Network, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Returns NCCL's line and variables. NCCL skips the loopback by itself, so only bridges to guests are excluded.

    They are excluded by name instead of choosing one interface, since NCCL can use several interfaces at once.
    """
    setting = nccl_setting(env)
    if setting:
        return f"NCCL: {setting[0]}, set by {setting[1]}", {}
    candidates = nccl_order(network.interfaces)
    bridges = [interface.name for interface in candidates if interface.name.startswith(LOCAL_BRIDGES)]
    if bridges and len(bridges) < len(candidates):
        value = "^docker,lo," + ",".join(bridges)
        rest = ", ".join(interface.name for interface in candidates if interface.name not in bridges)
        return f"NCCL: {rest}; excluded are {', '.join(bridges)}, which only lead to this machine", {NCCL: value}
    return f"NCCL: its own choice, {', '.join(interface.name for interface in candidates) or 'only the loopback'}", {}


def nccl_setting(env: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the user's setting of NCCL's interfaces and where it was made: the variable, or one of NCCL's files."""
    if env.get(NCCL):
        return env[NCCL], NCCL
    conf_file = env.get("NCCL_CONF_FILE")
    for file in (Path(conf_file) if conf_file else expanded("~/.nccl.conf"), Path("/etc/nccl.conf")):
        with suppress(*UNREADABLE):
            for line in read_text(file).splitlines():
                name, _, value = line.partition("=")
                if name.strip() == NCCL and value.strip():
                    return value.strip(), str(file)
    return None


def addresses() -> list[str]:
    """Returns the addresses at which other hosts may reach this one, without link-local ones; IPv4 first."""
    usable = [interface for interface in interfaces() if interface.is_usable]
    reachable = [address for interface in usable for address in interface.addresses if not is_link_local(address)]
    return sorted(reachable, key=lambda address: ":" in address)


def nccl_order(interfaces: tuple[Interface, ...]) -> list[Interface]:
    """Returns NCCL's default choice of interfaces: `ib*`, else all but docker's and the loopback, else docker's."""
    usable = [interface for interface in interfaces if interface.is_usable]
    groups = (
        [interface for interface in usable if interface.name.startswith("ib")],
        [interface for interface in usable if not interface.name.startswith(("docker", "lo"))],
        usable,
    )
    return next((group for group in groups if group), [])


def route_source(address: str) -> str | None:
    """Returns the address that this host would send from to reach another, or None if no route leads there.

    Also returns None for an unknown name. Connecting a UDP socket looks up the route and sends nothing.
    """
    with suppress(OSError):
        for family, kind, _, _, socket_address in socket.getaddrinfo(address, DISCARD, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(socket_address)
                return _plain(probe.getsockname()[0])
    return None


def _own_address() -> str | None:
    """Returns the first address of the host name that can be listened on, determined as torch and gloo do."""
    with suppress(OSError):
        for family, kind, _, _, socket_address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(socket_address)
                return _plain(probe.getsockname()[0])
    return None


def names_this_machine_only(address: str) -> bool:
    """Whether an address can only belong to ranks on one machine.

    A name that resolves to the loopback may be valid elsewhere.
    """
    return address == "localhost" or is_loopback(address)


def is_loopback(address: str) -> bool:
    """Whether this is a numeric loopback address."""
    with suppress(ValueError):
        return ipaddress.ip_address(_plain(address)).is_loopback
    return False


def is_link_local(address: str) -> bool:
    """Whether this is a link-local address, which each host assigns to itself."""
    with suppress(ValueError):
        return ipaddress.ip_address(_plain(address)).is_link_local
    return False


def _plain(address: str) -> str:
    return address.partition("%")[0]


def interfaces() -> list[Interface]:
    """Returns the network interfaces of this host."""
    import psutil

    states = psutil.net_if_stats()
    return [
        Interface(
            name,
            tuple(_plain(entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)),
            is_up=states[name].isup,
            is_loopback="loopback" in states[name].flags.split(","),
        )
        for name, entries in psutil.net_if_addrs().items()
        if name in states
    ]
