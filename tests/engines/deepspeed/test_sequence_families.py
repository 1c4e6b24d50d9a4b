"""The documented table of families under sequence parallelism is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.breadth
def test_the_documented_families_are_up_to_date(tmp_path):
    written = tmp_path / "families_sequence.md"
    subprocess.run(
        [sys.executable, ROOT / "tools/render_families_sequence.py", written], check=True, cwd=ROOT, timeout=900
    )
    document = written.read_text(encoding="utf-8")
    assert "## Wrong" not in document
    assert document == (ROOT / "docs/reference/families_sequence.md").read_text(encoding="utf-8")
