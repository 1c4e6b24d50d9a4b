"""Real shells complete recipes, variants, fields and values."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.commands.completion import SCRIPTS, assignments, recipes

ROOT = Path(__file__).parents[2]
TYPED = {
    "llmtrain plan recipes/ti": "llmtrain plan recipes/tiny.py",
    "llmtrain plan recipes/tiny.py:z": "llmtrain plan recipes/tiny.py:zero3",
    "llmtrain plan x --set parallel.zero_st": "llmtrain plan x --set parallel.zero_stage=",
    "llmtrain plan x --write ex": "llmtrain plan x --write examples/",
}
"""What is typed before the tabulator key, and the line after it."""


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, *command: str) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.chdir(ROOT)
            os.execvpe(command[0], command, {**os.environ, "PATH": path, "TERM": "dumb", "COLUMNS": "200"})
        self.said = ""

    def type(self, text: str, expected: str) -> None:
        """Types a text, and waits until the terminal shows another."""
        start, end = len(self.said), time.monotonic() + 60
        os.write(self._terminal, text.encode())
        while expected not in self.said[start:]:
            assert time.monotonic() < end, f"{expected!r} is not in {self.said[start:]!r}"
            if select.select([self._terminal], [], [], 1)[0]:
                self.said += os.read(self._terminal, 4096).decode(errors="replace")

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._process, 0)


BASH = ("bash", "--norc", "-i"), ""
ZSH = ("zsh", "-f", "-i"), "autoload -U compinit; compinit -u; "


@pytest.mark.parametrize(
    ("shell", "begin"), [pytest.param(*BASH, marks=pytest.mark.slow), pytest.param(*ZSH, marks=pytest.mark.breadth)]
)
def test_a_shell_completes_lines(shell, begin):
    if shutil.which(shell[0]) is None:
        pytest.skip(f"needs {shell[0]}")
    terminal = Terminal(*shell)
    terminal.type(f"{begin}source <(llmtrain completion {shell[0]}); echo rea''dy\n", "ready")
    for typed, line in TYPED.items():
        terminal.type(f"\x15{typed}\t", line.removeprefix(typed))
    terminal.close()


@pytest.mark.breadth
def test_fish_completes_lines():
    if shutil.which("fish") is None:
        pytest.skip("needs fish")
    lines = "\n".join(f"complete -C '{typed}'; echo" for typed in TYPED)
    command = ["fish", "-c", f"llmtrain completion fish | source\n{lines}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    found = [line.split("\t")[0] for line in done.stdout.split("\n\n")]
    assert [line.rsplit(" ", 1)[1] for line in TYPED.values()] == [one.strip() for one in found if one.strip()]


def test_a_faulty_file_has_no_variants_and_is_not_run(tmp_path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\ndef recipe_one(): pass\n")
    (tmp_path / "mine.yaml").write_text("extends: mine.py\nvariants: {two: {}}\n")
    (tmp_path / "broken.py").write_text("def recipe_(:\n")
    (tmp_path / "broken.yaml").write_text("variants: [\n")
    os.mkfifo(tmp_path / "pipe.py")
    assert recipes(f"{tmp_path}/mine.py:") == [f"{tmp_path}/mine.py:one"]
    assert recipes(f"{tmp_path}/mine.yaml:") == [f"{tmp_path}/mine.yaml:two"]
    for name in ("broken.py", "broken.yaml", "pipe.py", "gone.py", "\0.py"):
        assert recipes(f"{tmp_path}/{name}:") == []
    assert recipes(f"{tmp_path}/b") == [f"{tmp_path}/broken.py", f"{tmp_path}/broken.yaml"]
    assert not (tmp_path / "pwned").exists()


def test_fields_and_values_are_completed():
    assert assignments("parallel.zero_stage=") == [f"parallel.zero_stage={stage}" for stage in range(4)]
    assert {"model.adapter=", "model.adapter.rank=", "data.sources="} <= set(assignments(""))
    assert assignments("nothing.such=") == []
    assert set(SCRIPTS) == {"bash", "zsh", "fish"}
