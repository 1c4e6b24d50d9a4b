"""Output of libraries during a command does not mix with the output of the command."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from llmtrain.errors import RecipeError
from llmtrain.system.streams import quiet_libraries

try:
    with quiet_libraries():
        print("by Python")
        print("a warning", file=sys.stderr)
        os.write(1, b"by C\\n")
        os.system("echo by a child >&2")
        {action}
except Exception:
    pass
print("done")
"""
CHATTER = ["a warning", "by C", "by Python", "by a child"]


@pytest.mark.parametrize(
    ("action", "shown"),
    [("pass", []), ("raise RecipeError('no')", []), ("1 / 0", CHATTER)],
    ids=["success", "a mistake of the user", "a bug"],
)
def test_library_output_is_shown_if_it_may_explain_a_bug(action, shown):
    script = SCRIPT.format(action=action)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout == "done\n"
    assert sorted(result.stderr.splitlines()) == shown
