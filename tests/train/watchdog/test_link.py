"""The messages between watchers, and unauthenticated connections."""

import json
import socket
from contextlib import suppress
from dataclasses import asdict
from threading import Thread

import pytest

from llmtrain.errors import Problem
from llmtrain.launch.authentication import MessageAuthenticator
from llmtrain.launch.discovery.rank import LOOPBACK
from llmtrain.system.heartbeat import Phase
from llmtrain.train.watchdog import link
from llmtrain.train.watchdog.diagnosis import Status
from llmtrain.train.watchdog.link import Hub, Peer, address_of, listen

AUTHENTICATOR = MessageAuthenticator("secret")
WORLD_SIZE = 4
STATUS = Status("a", 7, 3, Phase.TRAINING, 0.5, 60.0, False, "S")


@pytest.fixture
def hub():
    listener = listen(on_one_machine=True)
    hub = Hub(listener, AUTHENTICATOR, WORLD_SIZE)
    hub.port = listener.getsockname()[1]
    yield hub
    listener.close()


def connected(hub, rank):
    peer = Peer(rank)
    peer.connect(address_of(LOOPBACK, hub.port, AUTHENTICATOR))
    greeted(hub, peer)
    return peer


def greeted(hub, *peers):
    """Has both ends read each other's first line."""
    hub.poll(0.05)
    for peer in peers:
        assert peer.poll(5) == []
        assert peer.is_connected


def told(peer):
    """The first order that is more than a sign of life."""
    while not (orders := peer.poll(5)):
        assert peer.is_connected
    return orders


def test_the_hub_collects_statuses_and_stacks_and_announces_the_end(hub):
    peers = [connected(hub, rank) for rank in (1, 2)]
    for peer in peers:
        peer.send_status(STATUS)
    hub.poll(0.2)
    assert hub.statuses == {1: STATUS, 2: STATUS}
    hub.request_stacks()
    threads = [Thread(target=lambda peer=peer: told(peer) and peer.send_frame(f"frame {peer.rank}")) for peer in peers]
    for thread in threads:
        thread.start()
    assert hub.collect_frames(5) == {1: "frame 1", 2: "frame 2"}
    for thread in threads:
        thread.join()
    hub.end(Problem("worker.hang", "rank 1", "m", "f"))
    assert told(peers[0]) == [Problem("worker.hang", "rank 1", "m", "f")]


def test_a_closed_connection_means_a_dead_process(hub):
    peer = connected(hub, 1)
    peer.send_status(STATUS)
    hub.poll(0.2)
    peer._close()
    hub.poll(0.2)
    assert hub.statuses[1].state == ""
    again = connected(hub, 1)
    again.send_status(STATUS)
    hub.poll(0.2)
    assert hub.statuses[1].state == "S"


def test_a_silent_watcher_counts_as_gone(hub, monkeypatch):
    peer = connected(hub, 1)
    peer.send_status(STATUS)
    hub.poll(0.2)
    monkeypatch.setattr(link, "SILENT_S", 0.0)
    assert hub.statuses[1].state == ""
    assert hub.collect_frames(0.3) == {}


WORD = b"0" * 32 + b"\n"
MESSAGE = {"rank": 1, "status": {**asdict(STATUS), "phase": 2}}


def line_of(authenticator, message, number=0, end="peer"):
    """An unauthenticated line, which does not contain the hub's word."""
    return authenticator.sign(f"{end} {'0' * 32} {'1' * 32} {number}", json.dumps(message)).encode() + b"\n"


@pytest.mark.parametrize(
    "line",
    [
        b'{"token": "guess", "rank": 1, "status": {}}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 200_000,
        b"[" * 60_000 + b"\n",
        WORD + b"[" * 60_000 + b"\n",
        WORD + b"x" * 200_000,
        WORD + b"\xff\n",
        WORD + line_of(MessageAuthenticator("guess"), MESSAGE),
        WORD + line_of(AUTHENTICATOR, MESSAGE),  # that of another connection, sent again
    ],
    ids=["token", "http", "endless", "deep", "deep message", "endless message", "bytes", "guess", "replay"],
)
def test_an_unauthenticated_connection_is_closed(hub, line):
    with socket.create_connection((LOOPBACK, hub.port)) as stranger:
        sender = Thread(target=lambda: _send(stranger, line))
        sender.start()
        hub.poll(0.3)
        sender.join()
        stranger.settimeout(5)
        with suppress(ConnectionResetError):
            assert len(stranger.recv(100)) in (0, len(WORD))
            assert stranger.recv(1) == b""
    assert hub.statuses == {}
    peer = connected(hub, 1)
    peer.send_status(STATUS)
    hub.poll(0.2)
    assert hub.statuses == {1: STATUS}


def test_a_repeated_message_ends_the_connection(hub):
    peer = connected(hub, 1)
    peer.send_status(STATUS)
    peer._link.num_sent = 0
    peer.send_status(STATUS)
    hub.poll(0.2)
    assert hub.statuses[1].state == ""


def test_silent_unauthenticated_connections_make_room(hub):
    most = WORLD_SIZE + link.MAX_UNIDENTIFIED
    strangers = [socket.create_connection((LOOPBACK, hub.port)) for _ in range(most + 5)]
    hub.poll(0.3)
    assert len(hub._links()) == most
    peer = connected(hub, 1)
    peer.send_status(STATUS)
    hub.poll(0.1)
    assert hub.statuses == {1: STATUS}
    for stranger in strangers:
        stranger.close()


def test_a_hub_of_another_run_is_not_obeyed(hub):
    peer = Peer(1)
    peer.connect(address_of(LOOPBACK, hub.port, MessageAuthenticator("another")))
    greeted(hub, peer)
    hub._links()[0].rank = 1
    hub.end(Problem("worker.hang", "rank 1", "m", "f"))
    assert peer.poll(5) == []
    assert not peer.is_connected


def test_an_unresponsive_hub_counts_as_gone(hub, monkeypatch):
    """Its machine still accepts connections, but answers none."""
    peer = connected(hub, 1)
    peer.poll(0.01)
    monkeypatch.setattr(link, "SILENT_S", 0.1)
    for _ in range(20):
        peer.poll(0.02)
    assert not peer.is_connected
    peer.connect(address_of(LOOPBACK, hub.port, AUTHENTICATOR))
    assert peer.has_link
    assert not peer.is_connected


def test_only_this_machine_reaches_the_watcher_of_one_machine():
    with listen(on_one_machine=True) as listener:
        assert listener.getsockname()[0] == LOOPBACK
    with listen(on_one_machine=False) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def _send(connection, line):
    with suppress(OSError):
        connection.sendall(line)


def test_a_missing_hub_is_detected(hub):
    peer = connected(hub, 1)
    hub.poll(0.1)
    for key in list(hub._selector.get_map().values()):
        if key.data is not None:
            hub._drop(key.data)
    while peer.is_connected:
        assert peer.poll(5) == []
    assert peer.poll(0.01) == []
    peer.send_status(STATUS)
    peer.connect(address_of(LOOPBACK, 1, AUTHENTICATOR))
    assert not peer.is_connected
