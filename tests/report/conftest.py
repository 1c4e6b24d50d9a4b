"""A run directory made by hand."""

import pytest

from tests.helpers.recorded_runs import short_run


@pytest.fixture
def run(tmp_path):
    return short_run(tmp_path / "run")
