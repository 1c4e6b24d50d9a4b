"""Communication between watchers: each reports its rank's status to that of rank 0, and receives orders from it.

The protocol is lines over TCP. Each end begins with a nonce. Every further line is JSON after an HMAC, which covers
both nonces, the direction and the number of the line: a forged or repeated line ends the connection before it is
parsed.
"""

from __future__ import annotations

import json
import re
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from llmtrain.errors import Problem
from llmtrain.launch.authentication import MessageAuthenticator
from llmtrain.launch.discovery.rank import LOOPBACK
from llmtrain.system.heartbeat import Phase
from llmtrain.train.watchdog.diagnosis import Status

MAX_LINE_BYTES = 65536
SILENT_S = 8.0
"""Seconds of silence after which a watcher is considered gone, and its rank too; also if it accepts no data."""
SEND_S = 2.0
"""Seconds after which a connection that accepts no data is given up."""
MAX_UNIDENTIFIED = 64
"""Connections beyond one per rank that have not been identified yet; a new one replaces the oldest."""
FULL_S = 0.1
"""Seconds of waiting if this process has too many open files to accept a connection."""
_NONCE = re.compile(rb"[0-9a-f]{32}")


@dataclass
class _Connection:
    """One end of a connection."""

    socket: socket.socket
    authenticator: MessageAuthenticator
    end: Literal["hub", "peer"]
    """The name of this end."""
    buffer: bytes = b""
    rank: int | None = None
    """The rank of the watcher at the other end, once it is known."""
    since: float = field(default_factory=time.monotonic)
    num_sent: int = 0
    num_received: int = 0
    """Number of lines sent and received."""
    own_nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    other_nonce: str | None = None

    def greet(self) -> None:
        """Sends this end's nonce. Raises OSError if the other end is gone."""
        self.socket.sendall(self.own_nonce.encode() + b"\n")

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Raises OSError if the other end is gone."""
        line = self.authenticator.sign(
            f"{self.end} {self.own_nonce} {self.other_nonce} {self.num_sent}", json.dumps(message)
        )
        self.num_sent += 1
        self.socket.sendall(line.encode() + b"\n")

    def received(self) -> list[dict[str, Any]]:
        """Returns the received messages. Raises OSError at the end of the connection, ValueError for foreign data."""
        data = self.socket.recv(MAX_LINE_BYTES)
        if not data:
            raise ConnectionError("the other end is gone")
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        if any(len(line) > MAX_LINE_BYTES for line in (*lines, self.buffer)):
            raise ValueError("a line without end")
        if self.other_nonce is None and lines:
            word = lines.pop(0)
            if not _NONCE.fullmatch(word):
                raise ValueError("not authenticated")
            self.other_nonce = word.decode()
        return [self._verified(line) for line in lines]

    def _verified(self, line: bytes) -> dict[str, Any]:
        other = "peer" if self.end == "hub" else "hub"
        content = self.authenticator.verify(f"{other} {self.other_nonce} {self.own_nonce} {self.num_received}", line)
        self.num_received += 1
        message: dict[str, Any] = json.loads(content)
        return message


class Hub:
    """Rank 0's end: receives the statuses of the other ranks."""

    def __init__(self, listener: socket.socket, authenticator: MessageAuthenticator, world_size: int) -> None:
        self._authenticator = authenticator
        self._world_size = world_size
        self._frames: dict[int, str] = {}
        self._statuses: dict[int, tuple[float, Status]] = {}
        self._gone: set[int] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, None)

    @property
    def statuses(self) -> dict[int, Status]:
        """Rank → status, for each rank that was ever heard of; a rank that is gone has no process state."""
        now = time.monotonic()
        return {
            rank: replace(status, state="") if rank in self._gone or now - heard > SILENT_S else status
            for rank, (heard, status) in self._statuses.items()
        }

    def poll(self, seconds: float) -> None:
        """Sends a sign of life to all watchers, and listens for `seconds`."""
        self._send({"do": "stay"})
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
        for connection in self._unidentified():
            if time.monotonic() - connection.since > SILENT_S:
                self._drop(connection)

    def request_stacks(self) -> None:
        """Makes all ranks write their stacks to their logs."""
        self._frames.clear()
        self._send({"do": "dump"})

    def collect_frames(self, seconds: float) -> dict[int, str]:
        """Returns rank → innermost frame, for the ranks that answer in time."""
        deadline = time.monotonic() + seconds
        while {link.rank for link in self._identified()} - set(self._frames) and time.monotonic() < deadline:
            self.poll(0.05)
        return dict(self._frames)

    def end(self, problem: Problem) -> None:
        """Makes all ranks end."""
        self._send({"do": "end", "problem": problem.as_dict()})

    def _links(self) -> list[_Connection]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _identified(self) -> list[_Connection]:
        return [link for link in self._links() if link.rank is not None]

    def _unidentified(self) -> list[_Connection]:
        """Returns the connections that have not been identified yet, the oldest first."""
        return [link for link in self._links() if link.rank is None]

    def _send(self, message: Mapping[str, Any]) -> None:
        for link in self._identified():
            try:
                link.send(message)
            except OSError:
                self._drop(link)

    def _accept(self) -> None:
        unidentified = self._unidentified()
        try:
            connection, _ = self._listener.accept()
        except OSError:  # possibly too many open files
            if unidentified:
                self._drop(unidentified[0])
            else:
                time.sleep(FULL_S)
            return
        if len(unidentified) >= self._world_size + MAX_UNIDENTIFIED:
            self._drop(unidentified[0])
        connection.settimeout(SEND_S)
        link = _Connection(connection, self._authenticator, "hub")
        self._selector.register(connection, selectors.EVENT_READ, link)
        try:
            _notice_silence(connection)
            link.greet()
        except OSError:
            self._drop(link)

    def _read(self, link: _Connection) -> None:
        if link.socket.fileno() < 0:
            return  # dropped for another one since it was selected
        try:
            for message in link.received():
                self._handle(link, message)
        except (OSError, ValueError):
            self._drop(link)

    def _handle(self, link: _Connection, message: dict[str, Any]) -> None:
        link.rank = rank = message["rank"]
        if "frame" in message:
            self._frames[rank] = message["frame"]
        else:
            status = message["status"]
            self._statuses[rank] = time.monotonic(), Status(**status | {"phase": Phase(status["phase"])})
        self._gone.discard(rank)

    def _drop(self, link: _Connection) -> None:
        self._selector.unregister(link.socket)
        link.socket.close()
        if link.rank is not None:
            self._gone.add(link.rank)


class Peer:
    """The end of any other rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._link: _Connection | None = None
        self._last_received = self._polled = 0.0

    @property
    def has_link(self) -> bool:
        """Whether there is a connection, even if nothing answers."""
        return self._link is not None

    @property
    def is_connected(self) -> bool:
        """Whether rank 0's watcher answers."""
        return self._link is not None and self._link.other_nonce is not None

    def connect(self, address: str) -> None:
        """Tries to reach rank 0's watcher at an address from `address_of`."""
        host, port, key = json.loads(address)
        with suppress(OSError):
            connection = socket.create_connection((host, port), timeout=SEND_S)
            _notice_silence(connection)
            link = _Connection(connection, MessageAuthenticator(key), "peer")
            link.greet()
            self._link, self._last_received = link, time.monotonic()

    def send_status(self, status: Status) -> None:
        """Sends the status of the rank."""
        self._send({"status": asdict(status)})

    def send_frame(self, frame: str) -> None:
        """Sends the rank's innermost frame, after its stacks were written."""
        self._send({"frame": frame})

    def poll(self, seconds: float) -> list[Literal["dump"] | Problem]:
        """Returns the orders received within `seconds`: to write the stacks, or to end for a reason."""
        link, now = self._link, time.monotonic()
        if now - self._polled > SILENT_S:
            self._last_received = now  # it was stopped itself
        self._polled = now + seconds
        if link is None:
            time.sleep(seconds)
            return []
        link.socket.settimeout(seconds)
        try:
            messages = link.received()
            self._last_received = time.monotonic()
            orders = [message for message in messages if message["do"] != "stay"]
            return ["dump" if order["do"] == "dump" else Problem(**order["problem"]) for order in orders]
        except TimeoutError:
            if time.monotonic() - self._last_received > SILENT_S:
                self._close()
        except (OSError, ValueError):
            self._close()
        return []

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is None or not self.is_connected:
            return
        try:
            self._link.socket.settimeout(SEND_S)
            self._link.send({"rank": self.rank, **message})
        except OSError:
            self._close()

    def _close(self) -> None:
        if self._link is not None:
            self._link.socket.close()
            self._link = None


def _notice_silence(connection: socket.socket) -> None:
    """Makes the kernel close a connection without acknowledgements: a machine without power does not close it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))


def listen(on_one_machine: bool) -> socket.socket:
    """Opens a socket that all watchers can reach; from other machines only if there are any."""
    if on_one_machine:
        return socket.create_server((LOOPBACK, 0), backlog=4096)
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=4096
    )


def address_of(host: str, port: int, authenticator: MessageAuthenticator) -> str:
    """Returns an address for `Peer.connect`."""
    return json.dumps([host, port, authenticator.key])
