"""Prints a command of README.md, so that what CI runs is what README says.

    python3 .ci/readme_command.py train|test

Fails where README holds no such command, or more than one.
"""

import re
import sys
from pathlib import Path

MARKS = {"train": "llmtrain train recipes/tiny.py", "test": "&& pytest"}


def command(kind: str) -> str:
    """The only line of a code block of README that holds the mark of `kind`."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [line for line in lines if MARKS[kind] in line and line.startswith("pip install")]
    if len(found) != 1:
        raise SystemExit(f"README.md states {len(found)} commands for '{kind}', not one")
    return found[0]


if __name__ == "__main__":
    print(command(sys.argv[1]))
