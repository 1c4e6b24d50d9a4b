"""The choice of network interfaces, on described networks and on this machine's own."""

from __future__ import annotations

import socket

import pytest

from llmtrain.launch.discovery import interfaces
from llmtrain.launch.discovery.interfaces import (
    ELSEWHERE,
    GLOO,
    NCCL,
    Interface,
    Network,
    choose_interfaces,
    nccl_setting,
    set_interfaces,
)
from llmtrain.launch.discovery.rank import Rank

LO = Interface("lo", ("127.0.0.1", "::1"), is_loopback=True)
ETH0 = Interface("eth0", ("10.0.0.5", "fe80::5"))
ETH1 = Interface("eth1", ("10.1.0.5",))
DOWN = Interface("eth2", (), is_up=False)
VIRBR = Interface("virbr0", ("192.168.122.1",))
IB = Interface("ib0", ("10.2.0.5",))
MASTER = "10.1.0.1"


@pytest.fixture(autouse=True)
def _nobody_has_told_nccl(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def routes(monkeypatch):
    """Address → the address that this host sends from to it."""
    found: dict[str, str] = {}
    monkeypatch.setattr(interfaces, "route_source", found.get)
    return found


def _network(*known, own="127.0.1.1"):
    return Network("node5", own, (LO, *known))


def test_the_route_replaces_a_host_name_on_the_loopback(routes):
    routes[MASTER] = "10.1.0.5"
    choice = choose_interfaces(MASTER, True, _network(ETH0, ETH1), {})
    assert choice.variables == {GLOO: "eth1"}
    assert choice.lines == (
        f"gloo: eth1 (10.1.0.5), by the route to {MASTER}, since the host name 'node5' resolves to 127.0.1.1",
    )


@pytest.mark.parametrize("own", [None, "127.0.0.1", "::1"])
def test_the_route_replaces_a_host_name_without_a_local_address(routes, own):
    routes[MASTER] = "10.1.0.5"
    assert choose_interfaces(MASTER, True, _network(ETH0, ETH1, own=own), {}).variables == {GLOO: "eth1"}


def test_a_host_name_with_a_real_address_is_kept(routes):
    routes[MASTER] = "10.1.0.5"
    choice = choose_interfaces(MASTER, True, _network(ETH0, ETH1, own="10.0.0.5"), {})
    assert choice.variables == {}
    assert choice.lines == ("gloo: eth0 (10.0.0.5), which the host name 'node5' resolves to",)


def test_the_users_own_value_wins(routes):
    routes[MASTER] = "10.1.0.5"
    choice = choose_interfaces(MASTER, False, _network(VIRBR, ETH1), {GLOO: "eth7", NCCL: "eth8"})
    assert choice.variables == {}
    assert choice.lines == (f"gloo: eth7, set by {GLOO}", f"NCCL: eth8, set by {NCCL}")


def test_rank_0_uses_the_interface_of_the_rendezvous_address(routes):
    """Its own address is reached through the loopback, but is that of an interface."""
    routes[MASTER] = MASTER
    master = Interface("eth1", (MASTER,))
    assert choose_interfaces(MASTER, True, _network(ETH0, master), {}).variables == {GLOO: "eth1"}


def test_rank_0_with_a_loopback_name_uses_the_default_route(routes):
    routes["node5"], routes[ELSEWHERE] = "127.0.1.1", "10.0.0.5"
    assert choose_interfaces("node5", True, _network(ETH0, ETH1), {}).variables == {GLOO: "eth0"}


def test_without_a_route_only_a_single_interface_is_used(routes):
    assert choose_interfaces("node5", True, _network(ETH0, DOWN), {}).variables == {GLOO: "eth0"}
    choice = choose_interfaces("node5", True, _network(ETH0, ETH1), {})
    assert (choice.variables, choice.is_reachable) == ({}, False)
    assert f"no route leads to node5; set {GLOO}" in choice.lines[0]


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "::1"])
def test_ranks_with_a_loopback_rendezvous_use_the_loopback(routes, master):
    choice = choose_interfaces(master, True, _network(ETH0), {})
    assert (choice.variables, choice.is_reachable) == ({}, True)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ((ETH0, ETH1), None),
        ((VIRBR, ETH0, ETH1), "^docker,lo,virbr0"),
        ((VIRBR, IB), None),  # NCCL takes ib* alone
        ((VIRBR,), None),  # better than none
    ],
)
def test_only_bridges_of_this_machine_are_excluded_for_nccl(routes, known, expected):
    choice = choose_interfaces(MASTER, False, _network(*known, own=known[-1].addresses[0]), {})
    assert choice.variables.get(NCCL) == expected


def test_nccl_variables_are_not_set_on_cpus(routes):
    assert [line[:4] for line in choose_interfaces(MASTER, True, _network(VIRBR, ETH0, own="10.0.0.5"), {}).lines] == [
        "gloo"
    ]


def test_settings_in_nccls_own_file_are_kept(tmp_path):
    assert nccl_setting({}) is None
    (tmp_path / ".nccl.conf").write_text(f"NCCL_DEBUG=WARN\n{NCCL} = eth3\n")
    assert nccl_setting({}) == ("eth3", str(tmp_path / ".nccl.conf"))
    assert nccl_setting({NCCL: "eth4"}) == ("eth4", NCCL)


def test_this_machines_interfaces_are_those_of_the_kernel():
    found = {one.name: one for one in interfaces.interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert found["lo"].is_loopback
    assert "127.0.0.1" in found["lo"].addresses
    assert not found["lo"].is_usable


def test_routes_are_those_of_the_kernel():
    assert interfaces.route_source("127.0.0.1") == "127.0.0.1"
    assert interfaces.route_source("::1") in ("::1", None)
    assert interfaces.route_source("no.such.host.invalid") is None


def _rank(local_world_size):
    return Rank(0, 0, 4, local_world_size, MASTER, 29500, "test")


def test_workers_of_one_machine_get_no_interface(monkeypatch):
    monkeypatch.setattr(Network, "here", lambda: pytest.fail("not asked for"))
    env: dict[str, str] = {}
    assert set_interfaces(_rank(4), True, env).lines == ()
    assert env == {}


def test_workers_of_several_machines_get_an_interface(monkeypatch, routes):
    routes[MASTER] = "10.1.0.5"
    monkeypatch.setattr(Network, "here", lambda: _network(ETH0, ETH1))
    env: dict[str, str] = {}
    set_interfaces(_rank(2), True, env)
    assert env == {GLOO: "eth1"}
