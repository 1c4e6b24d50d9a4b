"""Which network interface gloo and NCCL use, and which one they should; no packet is sent. Linux, pure.

Left alone, gloo listens on the address that the host's own name resolves to. Debian's and others' /etc/hosts make that
127.0.1.1, which no other host reaches: ranks of several hosts then wait for each other for ever.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmtrain.launch.rank import LOOPBACK, Rank
from llmtrain.untrusted import UNREADABLE, expanded, read_text

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
IFF_UP, IFF_LOOPBACK = 0x1, 0x8  # <net/if.h>
LOCAL_BRIDGES = ("virbr", "br-", "cni", "podman", "lxcbr", "lxdbr", "vboxnet", "vmnet")
"""Prefixes of interfaces that lead to guests and containers of this machine only. NCCL itself passes over `docker`."""
ELSEWHERE = "198.51.100.1"
"""Of a range kept for documentation (RFC 5737): who has a default route has one to it."""
DISCARD = 9
"""A port for sockets that send nothing."""


@dataclass(frozen=True)
class Interface:
    """A network interface, in the kernel's order."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6, in the kernel's order."""
    is_up: bool = True
    is_loopback: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether it may lead to another host."""
        return self.is_up and not self.is_loopback and bool(self.addresses)


@dataclass(frozen=True)
class Network:
    """What this host knows of its network."""

    host: str
    """Its own name."""
    own_address: str | None
    """What that resolves to, as far as something can listen there; gloo takes the loopback where nothing can."""
    interfaces: tuple[Interface, ...]

    @classmethod
    def here(cls) -> Network:
        """Looks at this host; resolving its name may take the seconds that a name server takes."""
        return cls(socket.gethostname(), _own_address(), tuple(interfaces()))

    @property
    def listens_on_loopback(self) -> bool:
        """Whether gloo, left alone, would be reached from this host only."""
        return self.own_address is None or is_loopback(self.own_address)

    def having(self, address: str | None) -> Interface | None:
        """The interface with an address."""
        return next((one for one in self.interfaces if address in one.addresses), None)

    def towards(self, master: str) -> Interface | None:
        """The interface that the route to rank 0 uses; on its own host, the one that others reach it by."""
        if names_this_machine_only(master):
            return None
        source = route_source(master)
        if source is None or is_loopback(source):  # no route, or this is the host, by a name for itself
            source = route_source(ELSEWHERE)
        usable = [one for one in self.interfaces if one.is_usable]
        return self.having(source) or (usable[0] if len(usable) == 1 else None)


@dataclass(frozen=True)
class Choice:
    """The interfaces of a worker."""

    lines: tuple[str, ...]
    """What gloo and NCCL use and why, for people."""
    variables: dict[str, str] = field(default_factory=dict)
    """What has to be set for it; empty where their own choice will do or is the user's."""
    is_reachable: bool = True
    """Whether gloo listens where other hosts reach it, as far as can be told."""


def set_interfaces(rank: Rank, on_cpu: bool, env: MutableMapping[str, str] | None = None) -> Choice:
    """Sets in `env` what the workers of several hosts need, before their process group is made.

    Nothing is looked at where all workers are on one machine.
    """
    env = os.environ if env is None else env
    if rank.on_one_machine:
        return Choice(())
    choice = choose(rank.master_addr, on_cpu, Network.here(), env)
    env.update(choice.variables)
    return choice


def stay_on_loopback(env: MutableMapping[str, str] | None = None) -> None:
    """Has gloo and NCCL listen where only this machine reaches them; what the user has set is kept."""
    env = os.environ if env is None else env
    name = next((one.name for one in interfaces() if one.is_up and LOOPBACK in one.addresses), None)
    if name is None:
        return
    env.setdefault(GLOO, name)
    if nccl_setting(env) is None:
        env[NCCL] = name


def choose(master: str, on_cpu: bool, network: Network, env: Mapping[str, str]) -> Choice:
    """The interfaces to reach the ranks of other hosts by; what the user has set is kept."""
    gloo = _for_gloo(master, network, env)
    if on_cpu:
        return gloo
    line, found = _for_nccl(network, env)
    return replace(gloo, lines=(*gloo.lines, line), variables=gloo.variables | found)


def _for_gloo(master: str, network: Network, env: Mapping[str, str]) -> Choice:
    if env.get(GLOO):
        return Choice((f"gloo: {env[GLOO]}, as {GLOO} says",))
    if not network.listens_on_loopback:
        found = network.having(network.own_address)
        name = found.name if found else "the interface"
        return Choice((f"gloo: {name} ({network.own_address}), which the host name '{network.host}' resolves to",))
    if names_this_machine_only(master):
        return Choice((f"gloo: the loopback, where rank 0 is ({master})",))
    points = f"resolves to {network.own_address}" if network.own_address else "resolves to no address of this host"
    chosen = network.towards(master)
    if chosen is None:
        line = f"gloo: the loopback, since '{network.host}' {points} and no route leads to {master}; set {GLOO}"
        return Choice((line,), is_reachable=False)
    addresses = ", ".join(address for address in chosen.addresses if not is_link_local(address))
    why = f"by the route to {master}, since the host name '{network.host}' {points}"
    return Choice((f"gloo: {chosen.name} ({addresses}), {why}",), {GLOO: chosen.name})


def _for_nccl(network: Network, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """NCCL passes over the loopback by itself; only bridges to guests of this machine are kept from it.

    Left out by name and not by naming one interface: NCCL sends over several where there are several.
    """
    told = nccl_setting(env)
    if told:
        return f"NCCL: {told[0]}, as {told[1]} says", {}
    taken = nccl_order(network.interfaces)
    bridges = [one.name for one in taken if one.name.startswith(LOCAL_BRIDGES)]
    if bridges and len(bridges) < len(taken):
        value = "^docker,lo," + ",".join(bridges)
        rest = ", ".join(one.name for one in taken if one.name not in bridges)
        return f"NCCL: {rest}; {', '.join(bridges)} led to this machine only", {NCCL: value}
    return f"NCCL: its own choice, {', '.join(one.name for one in taken) or 'none but the loopback'}", {}


def nccl_setting(env: Mapping[str, str]) -> tuple[str, str] | None:
    """What the user tells NCCL of interfaces, and where: the variable, or NCCL's own files."""
    if env.get(NCCL):
        return env[NCCL], NCCL
    named = env.get("NCCL_CONF_FILE")
    for file in (Path(named) if named else expanded("~/.nccl.conf"), Path("/etc/nccl.conf")):
        with suppress(*UNREADABLE):
            for line in read_text(file).splitlines():
                name, _, value = line.partition("=")
                if name.strip() == NCCL and value.strip():
                    return value.strip(), str(file)
    return None


def nccl_order(known: tuple[Interface, ...]) -> list[Interface]:
    """What NCCL takes by itself: `ib*`, else all but docker's and the loopback, else docker's (NCCL's manual)."""
    usable = [one for one in known if one.is_usable]
    groups = (
        [one for one in usable if one.name.startswith("ib")],
        [one for one in usable if not one.name.startswith(("docker", "lo"))],
        usable,
    )
    return next((group for group in groups if group), [])


def route_source(address: str) -> str | None:
    """The address that this host would send from to another; None where no route leads there or the name is unknown.

    A UDP socket that is connected asks for the route and sends nothing.
    """
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(address, DISCARD, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                return _plain(probe.getsockname()[0])
    return None


def _own_address() -> str | None:
    """The first address of the own name that can be listened on, found as torch and gloo find it."""
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(place)
                return _plain(probe.getsockname()[0])
    return None


def names_this_machine_only(address: str) -> bool:
    """Whether an address can only be that of ranks on one machine. A name that resolves to the loopback may be more."""
    return address == "localhost" or is_loopback(address)


def is_loopback(address: str) -> bool:
    """Whether this is an address of the loopback, written as a number."""
    with suppress(ValueError):
        return ipaddress.ip_address(_plain(address)).is_loopback
    return False


def is_link_local(address: str) -> bool:
    """Whether this is an address that each host gives itself."""
    with suppress(ValueError):
        return ipaddress.ip_address(_plain(address)).is_link_local
    return False


def _plain(address: str) -> str:
    return address.partition("%")[0]


class _Entry(ctypes.Structure):
    """The head of `struct ifaddrs`."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> list[Interface]:
    """The network interfaces of this host, as `getifaddrs(3)` lists them."""
    flags: dict[str, int] = {}
    addresses: dict[str, list[str]] = {}
    for name, flag, address in _entries():
        flags[name] = flag
        addresses.setdefault(name, []).extend([address] if address else [])
    return [
        Interface(name, tuple(addresses[name]), bool(flag & IFF_UP), bool(flag & IFF_LOOPBACK))
        for name, flag in flags.items()
    ]


def _entries() -> Iterator[tuple[str, int, str | None]]:
    """(name, flags, address or None) of each entry."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        entry = first
        while entry:
            one = entry.contents
            yield one.name.decode(), one.flags, _address_at(one.address)
            entry = one.next
    finally:
        libc.freeifaddrs(first)


def _address_at(pointer: int | None) -> str | None:
    """The IP address in a `struct sockaddr`; None for other families."""
    if not pointer:
        return None
    family = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_ushort)).contents.value
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(pointer + 8, 16))
    return None
