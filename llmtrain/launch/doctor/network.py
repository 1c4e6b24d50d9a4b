"""Network interfaces, the address that the host's own name resolves to, and the choices of gloo and NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.launch.discovery.interfaces import (
    GLOO,
    NCCL,
    Interface,
    Network,
    choose_interfaces,
    is_link_local,
    nccl_setting,
)
from llmtrain.launch.doctor.devices import seen_by_torch
from llmtrain.launch.doctor.finding import Finding, HostContext, fault, ok, warning


def interfaces(context: HostContext) -> Iterator[Finding]:
    """Checks the interfaces that may lead to other hosts, with their addresses and rates."""
    network = Network.here()
    usable = [interface for interface in network.interfaces if interface.is_usable]
    if usable:
        yield ok("network.interfaces", "; ".join(_described(interface, context) for interface in usable))
    elif context.master:
        yield fault("network.interfaces", "no interface but the loopback is up", "bring one up: `ip address`")
    else:
        yield ok("network.interfaces", "no interface but the loopback is up; sufficient for this machine alone")


def host_name(context: HostContext) -> Iterator[Finding]:
    """Checks whether the host name resolves to the loopback."""
    network = Network.here()
    if not network.listens_on_loopback:
        yield ok("network.host_name", f"'{network.host}' resolves to {network.own_address}")
        return
    points = f"to {network.own_address}" if network.own_address else "to no address of this host"
    text = f"the host name '{network.host}' resolves {points}"
    if context.master is None:
        yield ok("network.host_name", f"{text}: llmtrain sets {GLOO} for workers of several hosts")
        return
    fix = f"nothing to do for llmtrain, which sets {GLOO}; for other programs, add this host's address to /etc/hosts"
    yield warning("network.host_name", text, fix)


def choices(context: HostContext) -> Iterator[Finding]:
    """Reports the interfaces that gloo and NCCL will use, and why; loads torch."""
    network = Network.here()
    wrong = list(wrong_settings(context, network))
    yield from wrong
    choice = choose_interfaces(context.master or "localhost", not seen_by_torch()[0], network, context.env)
    for line in choice.lines:
        check = f"network.{line.partition(':')[0].lower()}"
        if check == "network.gloo" and not choice.is_reachable:
            yield fault(check, line, f"export {GLOO}=INTERFACE, one of {_names(network)}")
        elif check not in {finding.check for finding in wrong}:
            yield ok(check, line)


def wrong_settings(context: HostContext, network: Network) -> Iterator[Finding]:
    """Reports a user's choice of interfaces that do not exist here or that other hosts cannot reach."""
    names = [interface.name for interface in network.interfaces]
    absent = [name for name in context.env.get(GLOO, "").split(",") if name and name not in names]
    if absent:
        text = f"{GLOO} names {', '.join(absent)}, but there are only {_names(network)}"
        yield fault("network.gloo", text, f"unset {GLOO}: llmtrain chooses the interface of the route to rank 0")
    loopbacks = [interface.name for interface in network.interfaces if interface.is_loopback]
    if context.master and context.env.get(GLOO) in loopbacks:
        text = f"{GLOO}={context.env[GLOO]} is the loopback, which other hosts cannot reach"
        yield fault("network.gloo", text, f"unset {GLOO}: llmtrain chooses the interface of the route to rank 0")
    value, origin = nccl_setting(context.env) or ("", NCCL)
    if value and not value.startswith("^"):
        prefixes = [part for part in value.lstrip("=").split(",") if part]
        matches = (
            name == part if value.startswith("=") else name.startswith(part) for part in prefixes for name in names
        )
        if not any(matches):
            text = f"{origin} names {value}, which matches no interface here; there are {_names(network)}"
            yield fault("network.nccl", text, f"correct or unset {NCCL}")


def _names(network: Network) -> str:
    return ", ".join(interface.name for interface in network.interfaces)


def _described(interface: Interface, context: HostContext) -> str:
    addresses = [address for address in interface.addresses if not is_link_local(address)] or list(interface.addresses)
    try:
        speed = int((context.sys / "class" / "net" / interface.name / "speed").read_text())
    except (OSError, ValueError):  # virtual interfaces report none
        speed = -1
    rate = f" ({speed / 1000:g} Gbit/s)" if speed > 0 else ""
    return f"{interface.name} {', '.join(addresses)}{rate}"
