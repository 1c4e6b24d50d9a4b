from pathlib import Path

import pytest

from llmtrain.plan import Plan
from llmtrain.run_dir import RunDir
from tests.helpers.small_plan import small_plan


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    path = tmp_path / "run"
    path.mkdir()
    return RunDir(path)


@pytest.fixture
def plan() -> Plan:
    return small_plan()
