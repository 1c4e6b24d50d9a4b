"""The folder in which `llmtrain generate` looks for a model."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.models.generate import model_folder


def test_a_model_is_a_folder_or_the_export_of_a_run(tmp_path):
    export = tmp_path / "run/export"
    export.mkdir(parents=True)
    (tmp_path / "run/checkpoints").mkdir()
    with pytest.raises(RecipeError) as error:
        model_folder(tmp_path / "run")
    assert error.value.problems[0].fix == f"llmtrain export {tmp_path / 'run'} OUT"
    with pytest.raises(RecipeError, match="name an exported folder or a run"):
        model_folder(tmp_path / "nothing")
    (export / "config.json").write_text("{}")
    assert model_folder(export) == model_folder(tmp_path / "run") == export
