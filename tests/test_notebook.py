"""The notebook of `examples/` runs, and the one in the repository shows what it prints."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples/first_run.ipynb"
SHORTER = {"max_steps=300": "max_steps=4", "warmup_steps=20": "warmup_steps=1", "every_steps=10": "every_steps=1"}


def _outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def _check_outputs(notebook: nbformat.NotebookNode, steps: int) -> None:
    """Checks that it planned, refused, trained, plotted and generated."""
    outputs = _outputs(notebook)
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "cluster  1 × 2 cpu = 2 workers" in printed
    assert "[pipeline.zero_stage]" in printed
    assert f"trained {steps} steps" in printed
    assert "A checkpoint is" in printed
    assert "\x1b[" not in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


def test_the_notebook_in_the_repository_has_its_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    _check_outputs(notebook, steps=300)
    assert str(ROOT) not in NOTEBOOK.read_text(encoding="utf-8")


@pytest.mark.breadth
def test_the_notebook_runs(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "docs/guides", tmp_path / "docs/guides")
    (tmp_path / "examples").mkdir()
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, a kernel does not show the output of other processes
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path / "examples")}}).execute()
    _check_outputs(notebook, steps=4)
