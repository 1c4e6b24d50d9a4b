"""The programs of `docs/upstream` show the faults of other libraries that overrides mend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.overrides import OVERRIDES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/upstream"
NAMES = sorted(program.stem for program in FOLDER.glob("*.py"))
WITHOUT_OVERRIDE = {
    "ulysses_masks": "llmtrain/engines/deepspeed/ulysses.py",
    "llama4_image_outputs": "llmtrain/models/images.py",
}
"""Reports of what llmtrain does not use, or mends without private parts, and the files that say so."""


def test_every_report_has_a_program_and_is_referred_to():
    assert {page.stem for page in FOLDER.glob("*.md")} == {*NAMES, "README"}
    assert {one.report for one in OVERRIDES if one.report} | set(WITHOUT_OVERRIDE) == set(NAMES)
    assert all(f"docs/upstream/{name}.md" in (ROOT / file).read_text() for name, file in WITHOUT_OVERRIDE.items())
    overview = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"({name}.md)" in overview
        assert f"`python {name}.py`" in (FOLDER / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.breadth
@pytest.mark.parametrize("name", NAMES)
def test_the_fault_is_still_there(name, tmp_path):
    """If this fails because a release has mended the fault, the override may go. Run all of them after an update."""
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
