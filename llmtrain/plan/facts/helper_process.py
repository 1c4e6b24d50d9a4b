"""Runs a module of llmtrain in a separate process, so that this one needs neither torch nor a user's own code.

What the process prints goes to standard error; its results are JSON documents.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import IO, Any

from llmtrain.errors import Problem, RecipeError, UserError
from llmtrain.system.parent import start_child

_IS_HELPER = "llmtrain-helper"
"""The argument of a helper process."""
MAX_ERROR_LINES = 20
"""Lines of a failed process that a message shows."""


def run_helper(module: str, request: dict[str, Any], what: str) -> dict[str, Any]:
    """Returns the result of a module's `answer` in a process of its own.

    what: what the process does, for messages. Raises RecipeError with the problems that it found, or with the last
    lines of its output if it died.
    """
    done = subprocess.run(
        _command("answer_request", module),
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    if done.returncode:
        lines = "\n".join(done.stderr.strip().splitlines()[-MAX_ERROR_LINES:])
        raise _died(what, done.returncode, lines or "it printed nothing")
    document: dict[str, Any] = _checked(json.loads(done.stdout))
    return document


class HelperProcess:
    """A process in which a module's `answers` runs: it gets an iterator of requests, and yields answers.

    The answers that a request has must be received before the next request is sent. What it prints appears at once.
    """

    def __init__(self, module: str, what: str) -> None:
        """what: what the process does, for messages."""
        self._what = what
        # PYTHONHASHSEED: sets of texts then have the same order in each process.
        environment = {**_environment(), "PYTHONHASHSEED": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = start_child(_command("answer_requests", module), env=environment, **pipes)

    def __enter__(self) -> HelperProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()

    def send(self, request: Any) -> None:
        """Sends a request, which is JSON data."""
        with suppress(BrokenPipeError):  # `receive` says why the process died
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def receive(self) -> Any:
        """Waits for the next answer. Raises RecipeError with the problems that the process found, or if it died."""
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line.endswith(b"\n"):
            raise _died(self._what, self._process.wait(), "its output is above")
        return _checked(json.loads(line))


def is_helper() -> bool:
    """Whether this process answers requests of another one."""
    return _IS_HELPER in sys.argv


def answer_request(module: str) -> None:
    """Answers the request on standard input: the main function of a process of `run_helper`."""
    with _result() as result:
        try:
            document = import_module(module).answer(json.load(sys.stdin))
        except UserError as error:
            document = _problems(error)
        json.dump(document, result)


def answer_requests(module: str) -> None:
    """Answers the requests on standard input, one a line: the main function of a `HelperProcess`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    with suppress(BrokenPipeError), _result() as result:
        for answer in _answers_or_problems(module, map(json.loads, sys.stdin)):
            print(json.dumps(answer), file=result, flush=True)


def _answers_or_problems(module: str, requests: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from import_module(module).answers(requests)
    except UserError as error:
        yield _problems(error)


@contextmanager
def _result() -> Iterator[IO[str]]:
    """Opens what was standard output; what a user's code prints must not be part of it."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as result:
        os.dup2(2, 1)
        yield result


def _command(function: str, module: str) -> list[str]:
    return [sys.executable, "-c", f"from {__name__} import {function}; {function}({module!r})", _IS_HELPER]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _died(what: str, code: int, output: str) -> RecipeError:
    ended = f"code {code}" if code > 0 else f"signal {-code}"
    return RecipeError(Problem("code.helper", "recipe", f"{what} ended with {ended}: {output}"))


def _checked(document: Any) -> Any:
    """Returns an answer. Raises RecipeError if it consists of problems."""
    if isinstance(document, dict) and (problems := document.get("problems")):
        raise RecipeError([Problem(**problem) for problem in problems])
    return document


def _problems(error: UserError) -> dict[str, Any]:
    return {"problems": [problem.as_dict() for problem in error.problems]}
