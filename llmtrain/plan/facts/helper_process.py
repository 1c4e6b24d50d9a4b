"""Runs a module of llmtrain in a separate process, so that this one needs neither torch nor a user's own code.

What the process prints goes to standard error; its result is one JSON document.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from typing import Any

from llmtrain.errors import Problem, RecipeError, UserError

MAX_ERROR_LINES = 20
"""Lines of a failed process that a message shows."""


def run_helper(module: str, request: dict[str, Any], what: str) -> dict[str, Any]:
    """Returns the result of a module's `answer` in a process of its own.

    what: what the process does, for messages. Raises RecipeError with the problems that it found, or with the last
    lines of its output if it died.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import answer_request; answer_request({module!r})"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        lines = "\n".join(done.stderr.strip().splitlines()[-MAX_ERROR_LINES:])
        ended = f"code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        raise RecipeError(
            Problem("code.helper", "recipe", f"{what} ended with {ended}: {lines or 'it printed nothing'}")
        )
    document: dict[str, Any] = json.loads(done.stdout)
    if problems := document.get("problems"):
        raise RecipeError([Problem(**problem) for problem in problems])
    return document


def answer_request(module: str) -> None:
    """Answers the request on standard input: the main function of a helper process."""
    result = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a user's code prints must not be part of the result
    try:
        document = import_module(module).answer(json.load(sys.stdin))
    except UserError as error:
        document = {"problems": [problem.as_dict() for problem in error.problems]}
    with result:
        json.dump(document, result)
