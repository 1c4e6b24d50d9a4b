"""What watchers say to each other, and what strangers cannot."""

import json
import socket
from contextlib import suppress
from threading import Thread

import pytest

from llmtrain.errors import Problem
from llmtrain.heartbeat import Phase
from llmtrain.watchdog import link
from llmtrain.watchdog.link import Hub, Peer, address_of, listen
from llmtrain.watchdog.verdict import Status

STATUS = Status("a", 7, 3, Phase.TRAINING, 0.5, 60.0, False, "S")


@pytest.fixture
def hub():
    listener = listen()
    hub = Hub(listener, "secret")
    hub.port = listener.getsockname()[1]
    yield hub
    listener.close()


def connected(hub, rank):
    peer = Peer(rank)
    peer.connect(address_of("127.0.0.1", hub.port, "secret"))
    assert peer.is_connected
    return peer


def test_statuses_stacks_and_the_end(hub):
    peers = [connected(hub, rank) for rank in (1, 2)]
    for peer in peers:
        peer.tell(STATUS)
    hub.poll(0.2)
    assert hub.statuses == {1: STATUS, 2: STATUS}
    hub.ask_for_stacks()
    threads = [Thread(target=lambda peer=peer: peer.poll(5) and peer.answer(f"frame {peer.rank}")) for peer in peers]
    for thread in threads:
        thread.start()
    assert hub.answers(5) == {1: "frame 1", 2: "frame 2"}
    for thread in threads:
        thread.join()
    hub.end(Problem("worker.hang", "rank 1", "m", "f"))
    assert peers[0].poll(5) == [{"do": "end", "problem": Problem("worker.hang", "rank 1", "m", "f").as_dict()}]


def test_who_hangs_up_has_no_process_any_more(hub):
    peer = connected(hub, 1)
    peer.tell(STATUS)
    hub.poll(0.2)
    peer._close()
    hub.poll(0.2)
    assert hub.statuses[1].state == ""
    again = connected(hub, 1)
    again.tell(STATUS)
    hub.poll(0.2)
    assert hub.statuses[1].state == "S"


def test_who_is_silent_is_gone_too(hub, monkeypatch):
    peer = connected(hub, 1)
    peer.tell(STATUS)
    hub.poll(0.2)
    monkeypatch.setattr(link, "SILENT_S", 0.0)
    assert hub.statuses[1].state == ""
    assert hub.answers(0.3) == {}


@pytest.mark.parametrize(
    "line",
    [
        b'{"token": "guess", "rank": 1, "status": {}}\n',
        b'{"rank": 1}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token": "secret", "rank": 1, "status": {"host": 3}}\n',
        b"[1]\n",
        b"x" * 200_000,
    ],
)
def test_a_stranger_is_hung_up_on(hub, line):
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        sender = Thread(target=lambda: _send(stranger, line))
        sender.start()
        hub.poll(0.3)
        sender.join()
        stranger.settimeout(5)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert hub.statuses == {}
    peer = connected(hub, 1)
    peer.tell(STATUS)
    hub.poll(0.2)
    assert hub.statuses == {1: STATUS}


def _send(connection, line):
    with suppress(OSError):
        connection.sendall(line)


def test_a_hub_that_is_gone_is_noticed(hub):
    peer = connected(hub, 1)
    hub.poll(0.1)
    for key in list(hub._selector.get_map().values()):
        if key.data is not None:
            hub._drop(key.data)
    assert peer.poll(5) == []
    assert not peer.is_connected
    assert peer.poll(0.01) == []
    peer.tell(STATUS)
    peer.connect(json.dumps(["127.0.0.1", 1, "secret"]))
    assert not peer.is_connected
