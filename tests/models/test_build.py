"""Builds the configuration of a recipe's model."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.models import model_configuration
from tests.helpers.batches import tiny_recipe


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"'llama': .*'rms_norm_eps' expected float, got str"):
        model_configuration(tiny_recipe(**{"model.config.rms_norm_eps": "small"}))
