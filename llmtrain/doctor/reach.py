"""How the doctor reaches a host: an agent beside this process, or at the other end of an ssh connection."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from llmtrain.doctor.finding import Finding, fault
from llmtrain.launch.runners import ANSWER_S, SSH_OPTIONS

REACHED = "llmtrain-doctor-reached"
"""Said by the host's shell, before Python is started there."""
BEGIN_S = 120
"""Longest time for llmtrain to be imported on a host: it may lie on a network filesystem."""
END_S = 3
# What ssh says → (what it means, what mends it). HOST stands for the host's name.
SSH_FAULTS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is another one than ~/.ssh/known_hosts has",
        "ask who looks after it whether it was installed anew; then `ssh-keygen -R HOST` and `ssh HOST true`",
    ),
    (
        r"Host key verification failed|host key is known",
        "its host key is not in ~/.ssh/known_hosts, and nobody is there to accept it",
        "`ssh HOST true` once by hand, or `ssh-keyscan HOST >> ~/.ssh/known_hosts` on a network you trust",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "ssh would ask for a password: no key of yours is accepted there",
        "`ssh-copy-id HOST`; a key with a passphrase wants `ssh-add`",
    ),
    (r"Could not resolve hostname", "its name is unknown here", "mend the hostfile, /etc/hosts or ~/.ssh/config"),
    (r"No route to host|Network is unreachable", "no route leads there", "`ip route get HOST`; is it on?"),
    (r"Connection refused", "no ssh server listens there", "start sshd there, or name its port in ~/.ssh/config"),
    (r"timed out|Operation timed out", f"it does not answer within {ANSWER_S} s", "is it on? `ping HOST`; firewalls"),
    (r"Connection (closed|reset)", "its ssh server ends the connection", "sshd's log there; its MaxStartups"),
)


class UnreachableError(Exception):
    """A host that is not answered by; carries what to tell."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


class Channel:
    """An agent, and the line to it."""

    def __init__(self, name: str, command: list[str]) -> None:
        """name: of the host, for messages."""
        self.name = name
        self.replies: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.errors: deque[str] = deque(maxlen=40)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C is for us: the agent ends with its input
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = (
            Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            Thread(target=self._note, args=(self._process.stderr,), daemon=True),
        )
        for reader in self._readers:
            reader.start()

    def send(self, do: str, **fields: Any) -> None:
        """A request that is answered later, or not at all."""
        assert self._process.stdin is not None
        with suppress(OSError):  # the reader notices that it has ended
            self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._process.stdin.flush()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next reply; None where the agent has ended. Raises Empty where nothing comes in time."""
        reply = self.replies.get(timeout=max(0.0, seconds))
        if reply is None:
            self.replies.put(None)  # for who asks again
        return reply

    def ask(self, do: str, seconds: float, **fields: Any) -> dict[str, Any]:
        """A request and its answer. Raises UnreachableError."""
        self.send(do, **fields)
        return self.reply(seconds)

    def reply(self, seconds: float) -> dict[str, Any]:
        """The next reply. Raises UnreachableError where none comes."""
        try:
            reply = self.next(seconds)
        except Empty:
            text = f"{self.name} does not answer within {seconds:.0f} s"
            raise UnreachableError(fault("ssh.answer", text, f"`ssh {self.name} uptime`")) from None
        if reply is None:
            raise UnreachableError(self._ended())
        return reply

    @property
    def exit_code(self) -> int | None:
        """Of the agent, or of ssh; None while it runs, negative where it was killed."""
        return self._process.poll()

    def close(self) -> None:
        """Ends the agent and what it has started."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> Finding:
        for reader in self._readers:
            reader.join(timeout=END_S)
        return explain(self.name, self._process.wait(), list(self.errors))

    def _read(self, lines: IO[str]) -> None:
        """Lines that are no reply come from a shell's start-up files."""
        for line in lines:
            if line.strip() == REACHED:
                self.replies.put({"reached": True})
                continue
            with suppress(ValueError):
                reply = json.loads(line)
                if isinstance(reply, dict):
                    self.replies.put(reply)
        self.replies.put(None)

    def _note(self, lines: IO[str]) -> None:
        for line in lines:
            self.errors.append(line.rstrip())


def beside() -> Channel:
    """An agent on this machine."""
    return Channel("this machine", [sys.executable, "-m", "llmtrain.doctor.agent"])


def over_ssh(host: str, env: Mapping[str, str]) -> Channel:
    """An agent on a host, in the same folder, with the same Python. Raises UnreachableError.

    env: what workers would get; it goes through ssh's standard input, where nobody sees it.
    """
    path = os.environ.get("PYTHONPATH", "")
    agent = ["env", f"PYTHONPATH={path}", sys.executable, "-m", "llmtrain.doctor.agent"]
    there = f"echo {REACHED}; cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(agent)}"
    channel = Channel(host, ["ssh", *SSH_OPTIONS, host, there])
    deadline = time.monotonic() + ANSWER_S + 1  # ssh itself gives up after ANSWER_S, and says why
    try:
        if channel.next(deadline - time.monotonic()) is None:
            raise UnreachableError(channel._ended())
        channel.ask("begin", BEGIN_S, env=dict(env))
    except Empty:
        channel.close()
        text = f"{host} does not answer within {ANSWER_S} s"
        raise UnreachableError(fault("ssh.answer", text, f"is it on? `ssh {host} true`")) from None
    except UnreachableError:
        channel.close()
        raise
    return channel


def explain(host: str, code: int, errors: list[str]) -> Finding:
    """Why a connection to a host, or the agent there, has ended."""
    said = "\n".join(errors)
    last = next((line for line in reversed(errors) if line.strip()), "it said nothing")
    for pattern, meaning, fix in SSH_FAULTS if code == 255 else ():
        if re.search(pattern, said, re.IGNORECASE):
            return fault("ssh.connection", f"{host}: {meaning} ({last.strip()})", fix.replace("HOST", host))
    if code == 255:
        return fault("ssh.connection", f"{host}: the connection has ended: {last}", f"`ssh -v {host} true`")
    if re.search(r"cd:.*(No such file|can't cd|not a directory)", said, re.IGNORECASE):
        text = f"{host}: there is no folder {Path.cwd()}, where this command was given"
        return fault("ssh.folder", text, "hosts need the same files at the same path: share them, or copy them")
    if code in (126, 127) or "No module named" in said:
        text = f"{host}: {sys.executable} or llmtrain is not there: {last}"
        return fault("ssh.llmtrain", text, "install the same there, at the same path")
    return fault("ssh.llmtrain", f"{host}: llmtrain ended with code {code} there: {last}", "see the host")
