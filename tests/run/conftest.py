"""The recipe of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import write_small_recipe


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory) -> Path:
    """A recipe file that trains in a second."""
    return write_small_recipe(tmp_path_factory.mktemp("small"))
