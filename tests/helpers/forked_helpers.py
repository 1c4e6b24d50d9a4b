"""Helper processes as forks of the test's process, which need not import llmtrain, numpy and torch again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from tempfile import TemporaryFile
from typing import IO, Any

import pytest

from llmtrain.plan.facts import helper_process
from llmtrain.system.parent import die_with


def fork_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `llmtrain.plan.facts.helper_process` fork instead of starting another Python.

    A helper then also has the modules that the test has imported, and sets of texts have the order that they have here.
    """
    monkeypatch.setattr(helper_process, "_command", lambda function, module: (function, module))
    monkeypatch.setattr(helper_process, "start_child", lambda command, **_: _Fork(command))
    monkeypatch.setattr(helper_process, "subprocess", _Subprocess)


class _Fork:
    """What `HelperProcess` uses of `subprocess.Popen`."""

    def __init__(self, command: tuple[str, str], errors: IO[str] | None = None) -> None:
        """command: the main function and the module of the helper. errors: its standard error."""
        (requests, to_requests), (from_answers, answers) = os.pipe(), os.pipe()
        parent, self._code = os.getpid(), None
        self._pid = os.fork()
        if not self._pid:
            try:
                die_with(parent)
                os.close(to_requests)
                for number, stream in ((0, requests), (1, answers), (2, errors and errors.fileno())):
                    if stream is not None:
                        os.dup2(stream, number)
                sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
                sys.argv = [*sys.argv[:1], helper_process._IS_HELPER]
                function, module = command
                getattr(helper_process, function)(module)
                sys.stderr.flush()
            finally:
                os._exit(0)
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(to_requests, "wb"), os.fdopen(from_answers, "rb")

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def communicate(self) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()


class _Subprocess:
    """What `helper_process` uses of the module `subprocess`."""

    PIPE = subprocess.PIPE

    @staticmethod
    def run(command: tuple[str, str], input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        with TemporaryFile("w+") as errors:
            fork = _Fork(command, errors)
            fork.stdin.write(input.encode())
            fork.stdin.close()
            answer, code = fork.stdout.read().decode(), fork.wait()
            fork.stdout.close()
            errors.seek(0)
            return subprocess.CompletedProcess(command, code, answer, errors.read())
