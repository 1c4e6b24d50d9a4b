"""Bars and spinners are drawn on a terminal, and nowhere else."""

import io
import sys

import pytest

from llmtrain.errors import Problem, RecipeError
from llmtrain.system.streams import plain_console


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("kind", "compatible", "draws"), [(io.StringIO, "", False), (_Terminal, "", True), (_Terminal, "0", False)]
)
def test_variables_make_no_terminal_but_may_deny_one(monkeypatch, stream, kind, compatible, draws):
    monkeypatch.setenv("TTY_COMPATIBLE", compatible)  # 0 under mpirun
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in notebooks and in some CI
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, stream, kind())
    console = plain_console(stderr=stream == "stderr")
    with console.status("working"):
        console.print("a line")
    assert ("\x1b[" in getattr(sys, stream).getvalue()) == draws


def test_a_notebook_shows_the_message_of_an_error():
    error = RecipeError(Problem("batch.divides", "batch", "7 does not divide 8", "--set batch=8"))
    assert error._render_traceback_() == ["error: batch: 7 does not divide 8 [batch.divides]\n    --set batch=8"]
