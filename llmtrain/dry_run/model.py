"""The tiny copy of a recipe's model, in the form of a recipe's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from llmtrain.errors import Problem, RecipeError
from llmtrain.models import model_configuration
from llmtrain.models.proof.cut import MODEL_ERRORS
from llmtrain.models.proof.tiny import shrink_configuration
from llmtrain.plan.families import FAMILIES
from llmtrain.recipe import LoraConfig, ModelConfig, Recipe

IDENTITY = ("model_type", "architectures", "dtype", "transformers_version", "_name_or_path", "name_or_path")
"""Fields of a configuration that describe neither sizes nor switches."""
RANK = 2
"""Of the adapters of a tiny copy."""


def tiny_model(recipe: Recipe, layers: int) -> ModelConfig:
    """Returns the recipe's model in tiny sizes, with this many layers, the same switches and dropout, and new weights.

    Raises RecipeError for a model with custom code, and if no tiny copy can be made.
    """
    with _without_warnings():
        return _tiny_model(recipe, layers)


def _tiny_model(recipe: Recipe, layers: int) -> ModelConfig:
    config = model_configuration(recipe)
    if config.model_type not in CONFIG_MAPPING:
        raise _refused(recipe, f"'{config.model_type}' is custom code, of which no tiny copy can be made by name")
    values = config.to_dict()
    dropout = {key: value for key, value in values.items() if "drop" in key and isinstance(value, float)}
    try:
        tiny = shrink_configuration(config, layers, **dropout)
    except (*MODEL_ERRORS, StrictDataclassError) as error:
        raise _refused(recipe, f"no tiny copy of '{config.model_type}' can be made ({error})") from None
    family = FAMILIES.get(config.model_type)
    declared = {
        key: value
        for key, value in tiny.to_diff_dict().items()
        if key not in IDENTITY and (family is None or key in family.keys)
    }
    declared["vocab_size"] = tiny.vocab_size
    model, adapter = recipe.model, None
    if model.adapter is not None:  # of every layer, since patterns may name layers that the copy does not have
        own = model.adapter
        adapter = LoraConfig(rank=RANK, dropout=own.dropout, dora=own.dora, rslora=own.rslora)
    return ModelConfig(architecture=config.model_type, config=declared, attention=model.attention, adapter=adapter)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences the library, which warns about the unusual sizes of a tiny copy."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _refused(recipe: Recipe, message: str) -> RecipeError:
    field = "model.architecture" if recipe.model.architecture else "model.pretrained"
    return RecipeError(Problem("dry_run.model", field, message, "`llmtrain verify` a small recipe of this model"))
