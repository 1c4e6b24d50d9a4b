from pathlib import Path

import pytest

from llmtrain.plan.load import load_recipe
from llmtrain.recipe import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    """The recipe that the tests change one thing of."""
    return load_recipe(str(ROOT / "recipes/tiny.py"), [])[0]
