"""How the watchers of a run talk: each tells that of rank 0 how its rank does, and is told what to do.

Lines of JSON over TCP. A line that does not carry the token, which the ranks exchange through their store, ends the
connection it came by.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmtrain.errors import Problem
from llmtrain.heartbeat import Phase
from llmtrain.watchdog.verdict import Status

LONGEST_LINE = 65536
SILENT_S = 8.0
"""A watcher that says nothing for so long is taken for gone, and its rank with it; and one that takes nothing."""
SEND_S = 2.0
"""A connection that takes nothing for so long is given up."""


@dataclass
class _Connection:
    """One end of a line."""

    socket: socket.socket
    buffer: bytes = b""
    rank: int | None = None
    """Of whom the other end watches, once it has said so."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError where the other end is gone."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def received(self) -> list[dict[str, Any]]:
        """What has come. Raises OSError at the end of the line, ValueError for what is none."""
        data = self.socket.recv(LONGEST_LINE)
        if not data:
            raise ConnectionError("the other end is gone")
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        if len(self.buffer) > LONGEST_LINE:
            raise ValueError("a line without end")
        return [json.loads(line) for line in lines]


class Hub:
    """At rank 0's watcher: what those of the other ranks say."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._token = token
        self._frames: dict[int, str] = {}
        self._statuses: dict[int, tuple[float, Status]] = {}
        self._gone: set[int] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, None)

    @property
    def statuses(self) -> dict[int, Status]:
        """Of each rank that has ever been heard of; one that is gone has no process."""
        now = time.monotonic()
        return {
            rank: replace(status, state="") if rank in self._gone or now - heard > SILENT_S else status
            for rank, (heard, status) in self._statuses.items()
        }

    def poll(self, seconds: float) -> None:
        """Listens for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)

    def ask_for_stacks(self) -> None:
        """Has all ranks write their stacks to their logs."""
        self._frames.clear()
        self._send({"do": "dump"})

    def answers(self, seconds: float) -> dict[int, str]:
        """Where each rank is, of those that answer in time."""
        deadline = time.monotonic() + seconds
        while set(self._connected()) - set(self._frames) and time.monotonic() < deadline:
            self.poll(0.05)
        return dict(self._frames)

    def end(self, problem: Problem) -> None:
        """Has all ranks end."""
        self._send({"do": "end", "problem": problem.as_dict()})

    def _connected(self) -> list[int]:
        links = (key.data for key in self._selector.get_map().values())
        return [link.rank for link in links if link is not None and link.rank is not None]

    def _send(self, message: Mapping[str, Any]) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data.rank is not None:
                try:
                    key.data.send(message)
                except OSError:
                    self._drop(key.data)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(SEND_S)
            _notice_silence(connection)
            self._selector.register(connection, selectors.EVENT_READ, _Connection(connection))

    def _read(self, link: _Connection) -> None:
        try:
            for message in link.received():
                self._take(link, message)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._drop(link)

    def _take(self, link: _Connection, message: dict[str, Any]) -> None:
        if message.get("token") != self._token:
            raise ValueError("a stranger")
        link.rank = rank = int(message["rank"])
        self._gone.discard(rank)
        if "frame" in message:
            self._frames[rank] = str(message["frame"])
        else:
            fields = message["status"]
            self._statuses[rank] = time.monotonic(), Status(**fields | {"phase": Phase(fields["phase"])})

    def _drop(self, link: _Connection) -> None:
        self._selector.unregister(link.socket)
        link.socket.close()
        if link.rank is not None:
            self._gone.add(link.rank)


class Peer:
    """At the watcher of any other rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._link: _Connection | None = None
        self._token = ""

    @property
    def is_connected(self) -> bool:
        """Whether rank 0's watcher answers."""
        return self._link is not None

    def connect(self, address: str) -> None:
        """Tries to reach rank 0's watcher at what `address_of` made."""
        host, port, self._token = json.loads(address)
        with suppress(OSError):
            connection = socket.create_connection((host, port), timeout=SEND_S)
            _notice_silence(connection)
            self._link = _Connection(connection)

    def tell(self, status: Status) -> None:
        """How the rank does."""
        self._send({"status": asdict(status)})

    def answer(self, frame: str) -> None:
        """Where the rank is, after its stacks were written."""
        self._send({"frame": frame})

    def poll(self, seconds: float) -> list[dict[str, Any]]:
        """What it is told to do, within so many seconds."""
        link = self._link
        if link is None:
            time.sleep(seconds)
            return []
        link.socket.settimeout(seconds)
        try:
            return link.received()
        except TimeoutError:
            return []
        except (OSError, ValueError):
            self._close()
            return []

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is None:
            return
        try:
            self._link.socket.settimeout(SEND_S)
            self._link.send({"token": self._token, "rank": self.rank, **message})
        except OSError:
            self._close()

    def _close(self) -> None:
        if self._link is not None:
            self._link.socket.close()
            self._link = None


def _notice_silence(connection: socket.socket) -> None:
    """Has the kernel give up what nobody acknowledges: a machine without power closes no connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))


def listen() -> socket.socket:
    """A socket that the watchers of all nodes can reach."""
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=4096
    )


def address_of(host: str, port: int, token: str) -> str:
    """What `Peer.connect` takes."""
    return json.dumps([host, port, token])
