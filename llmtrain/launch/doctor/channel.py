"""Connects the doctor to a host: through an agent on this machine, or over ssh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from llmtrain.launch.doctor.finding import Finding, fault
from llmtrain.launch.runners import SSH_OPTIONS, SSH_TIMEOUT_S, remote_python

REACHED = "llmtrain-doctor-reached"
"""Printed by the host's shell before Python is started there."""
START_TIMEOUT_S = 120
"""Longest time in seconds to import llmtrain on a host, which may use a network file system."""
END_S = 3
# Message of ssh → (its meaning, how to fix it). HOST stands for the host's name.
SSH_FAULTS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key differs from the one in ~/.ssh/known_hosts",
        "ask its administrator whether it was reinstalled; then `ssh-keygen -R HOST` and `ssh HOST true`",
    ),
    (
        r"Host key verification failed|host key is known",
        "its host key is not in ~/.ssh/known_hosts, and cannot be accepted without a terminal",
        "`ssh HOST true` once by hand, or `ssh-keyscan HOST >> ~/.ssh/known_hosts` on a network you trust",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "ssh would ask for a password: none of your keys is accepted there",
        "`ssh-copy-id HOST`; a key with a passphrase needs `ssh-add`",
    ),
    (r"Could not resolve hostname", "its name is unknown here", "correct the hostfile, /etc/hosts or ~/.ssh/config"),
    (r"No route to host|Network is unreachable", "no route leads there", "`ip route get HOST`; is it on?"),
    (r"Connection refused", "no ssh server listens there", "start sshd there, or set its port in ~/.ssh/config"),
    (
        r"timed out|Operation timed out",
        f"it does not answer within {SSH_TIMEOUT_S} s",
        "is it on? `ping HOST`; check firewalls",
    ),
    (r"Connection (closed|reset)", "its ssh server ends the connection", "check sshd's log there, and its MaxStartups"),
)


class UnreachableError(Exception):
    """A host that cannot be reached; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


class Channel:
    """An agent, and the connection to it."""

    def __init__(self, name: str, command: list[str]) -> None:
        """name: the host's name, for messages."""
        self.name = name
        self.replies: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the channel
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C only reaches us: the agent ends with its input
        )
        assert self._process.stdout is not None
        Thread(target=self._read_replies, args=(self._process.stdout,), daemon=True).start()

    def send(self, do: str, **fields: Any) -> None:
        """Sends a request that is answered later, or not at all."""
        assert self._process.stdin is not None
        with suppress(OSError):  # the reader notices if it has ended
            self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._process.stdin.flush()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next reply, or None if the agent has ended. Raises Empty if none comes in time."""
        reply = self.replies.get(timeout=max(0.0, seconds))
        if reply is None:
            self.replies.put(None)  # for later calls
        return reply

    def request(self, do: str, seconds: float, **fields: Any) -> dict[str, Any]:
        """Sends a request and returns its reply. Raises UnreachableError."""
        self.send(do, **fields)
        return self.reply(seconds)

    def reply(self, seconds: float) -> dict[str, Any]:
        """Returns the next reply. Raises UnreachableError if none comes."""
        try:
            reply = self.next(seconds)
        except Empty:
            text = f"{self.name} did not answer within {seconds:.0f} s"
            raise UnreachableError(fault("ssh.answer", text, f"`ssh {self.name} uptime`")) from None
        if reply is None:
            raise UnreachableError(self._ended())
        return reply

    def close(self) -> None:
        """Ends the agent and the processes that it has started."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ended(self) -> Finding:
        code = self._process.wait()
        self._errors.seek(0)
        return explain_end(self.name, code, self._errors.read().splitlines())

    def _read_replies(self, lines: IO[str]) -> None:
        """Reads replies. Lines that are not replies come from a shell's start-up files."""
        for line in lines:
            if line.strip() == REACHED:
                self.replies.put({"reached": True})
                continue
            with suppress(ValueError):
                reply = json.loads(line)
                if isinstance(reply, dict):
                    self.replies.put(reply)
        self.replies.put(None)


def open_locally() -> Channel:
    """Starts an agent on this machine."""
    return Channel("this machine", [sys.executable, "-m", "llmtrain.launch.doctor.agent"])


def open_over_ssh(host: str, env: Mapping[str, str]) -> Channel:
    """Starts an agent on a host, in the same folder, with the same Python. Raises UnreachableError.

    env: the variables that workers would get, which are sent over ssh's standard input, where nobody can see them.
    """
    command = f"echo {REACHED}; {remote_python('-m', 'llmtrain.launch.doctor.agent')}"
    channel = Channel(host, ["ssh", *SSH_OPTIONS, host, command])
    deadline = time.monotonic() + SSH_TIMEOUT_S + 1  # ssh itself gives up after SSH_TIMEOUT_S, and says why
    try:
        if channel.next(deadline - time.monotonic()) is None:
            raise UnreachableError(channel._ended())
        channel.request("begin", START_TIMEOUT_S, env=dict(env))
    except Empty:
        channel.close()
        text = f"{host} did not answer within {SSH_TIMEOUT_S} s"
        raise UnreachableError(fault("ssh.answer", text, f"is it on? `ssh {host} true`")) from None
    except UnreachableError:
        channel.close()
        raise
    return channel


def explain_end(host: str, code: int, errors: list[str]) -> Finding:
    """Explains why a connection to a host, or the agent there, has ended."""
    message = "\n".join(errors)
    last = next((line for line in reversed(errors) if line.strip()), "no message")
    for pattern, meaning, fix in SSH_FAULTS if code == 255 else ():
        if re.search(pattern, message, re.IGNORECASE):
            return fault("ssh.connection", f"{host}: {meaning} ({last.strip()})", fix.replace("HOST", host))
    if code == 255:
        return fault("ssh.connection", f"{host}: the connection was lost: {last}", f"`ssh -v {host} true`")
    if re.search(r"cd:.*(No such file|can't cd|not a directory)", message, re.IGNORECASE):
        text = f"{host}: the folder {Path.cwd()} of this command does not exist there"
        return fault("ssh.folder", text, "hosts need the same files at the same path: share them, or copy them")
    if code in (126, 127) or "No module named" in message:
        text = f"{host}: {sys.executable} or llmtrain is not installed there: {last}"
        return fault("ssh.llmtrain", text, "install the same there, at the same path")
    return fault("ssh.llmtrain", f"{host}: llmtrain ended with code {code} there: {last}", "see the host")
