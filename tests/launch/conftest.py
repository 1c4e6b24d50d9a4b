import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain.plan import Plan
from llmtrain.run_dir import RunDir
from tests.helpers.small_plan import small_plan

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts that the tests start import the package that is tested."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run with spaces")
    run.logs.mkdir(parents=True)
    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a worker script."""
    count: Iterator[int] = iter(range(100))

    def write(body: str) -> Path:
        path = tmp_path / f"worker_{next(count)}.py"
        path.write_text(textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def plan() -> Plan:
    return small_plan()
