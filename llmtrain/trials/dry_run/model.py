"""The tiny copy of a recipe's model, in the form of a recipe's model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging

from llmtrain.errors import Problem, RecipeError
from llmtrain.models import model_configuration
from llmtrain.models.adapter import Trained, select_trained
from llmtrain.models.hub_names import empty_model
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import MODEL_ERRORS
from llmtrain.plan.facts.families import FAMILIES
from llmtrain.recipe import LoraConfig, ModelConfig, Recipe

IDENTITY = (
    *("model_type", "architectures", "dtype", "transformers_version", "_name_or_path", "name_or_path"),
    *("id2label", "label2id"),
)
"""Fields of a configuration that describe neither sizes nor switches."""
_LAYER = re.compile(r"\.(\d+)\.")
RANK = 2
"""Rank of the adapters of a tiny copy."""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences the library, which warns about the unusual sizes of a tiny copy."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@_without_warnings()
def tiny_model(recipe: Recipe, layers: int) -> ModelConfig:
    """Returns the recipe's model in tiny sizes, with this many layers, the same switches and dropout, and new weights.

    For a loss of the user's own, the vocabulary is the same, too.

    Raises RecipeError for a model with custom code, and if no tiny copy can be made.
    """
    if recipe.model.images:
        message = "a dry run trains on synthetic texts, and a model with model.images on images"
        raise RecipeError(Problem("dry_run.model", "model.images", message, "--set model.images=false"))
    config = model_configuration(recipe)
    if config.model_type not in CONFIG_MAPPING:
        raise _refused(recipe, f"'{config.model_type}' is custom code, so no tiny copy can be made by name")
    values = config.to_dict()
    same = {key: value for key, value in values.items() if "drop" in key and isinstance(value, float)}
    if recipe.objective.is_own and "vocab_size" in values:
        same["vocab_size"] = values["vocab_size"]  # the user's loss may read logits of some tokens
    try:
        tiny = shrink_configuration(config, layers, **same)
    except (*MODEL_ERRORS, StrictDataclassError) as error:
        raise _refused(recipe, f"no tiny copy of '{config.model_type}' can be made ({error})") from None
    family = FAMILIES.get(config.model_type)
    declared = {
        key: value
        for key, value in tiny.to_diff_dict().items()
        if key not in IDENTITY and (family is None or key in family.keys)
    }
    declared["vocab_size"] = tiny.vocab_size
    attention, labels = recipe.model.attention, recipe.model.num_labels
    copy = ModelConfig(architecture=config.model_type, config=declared, attention=attention, num_labels=labels)
    trained = select_trained(recipe, config)
    return copy if trained is None else copy.model_copy(update=_trained(recipe.model, trained, config, tiny))


def _trained(model: ModelConfig, trained: Trained, config: PreTrainedConfig, tiny: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields that train the same part of a tiny copy."""
    copy = empty_model(tiny, torch.float32)
    depth, tiny_depth = (
        configuration.get_text_config(decoder=True).num_hidden_layers for configuration in (config, tiny)
    )
    modules, weights = (dict(named) for named in (copy.named_modules(), copy.named_parameters()))

    def chosen(names: Iterable[str], among: Iterable[str]) -> tuple[str, ...]:
        """Returns the names of the copy that correspond to some of `among`, the names in the whole model.

        The copy's layers correspond to layers at equal distances, from the first to the last. If none of the layers
        in `among` corresponds to one of the copy, all layers of the copy are chosen.
        """
        names_in_model = set(among)
        kinds: dict[str, list[str]] = {}
        for name in names:
            kinds.setdefault(_LAYER.sub(".*.", name, count=1), []).append(name)
        meant = {_LAYER.sub(".*.", name, count=1) for name in names_in_model}
        groups = (named for kind, named in kinds.items() if kind in meant)
        return tuple(
            name for named in groups for name in [n for n in named if corresponding(n) in names_in_model] or named
        )

    def corresponding(name: str) -> str:
        return _LAYER.sub(lambda m: f".{int(m[1]) * (depth - 1) // max(tiny_depth - 1, 1)}.", name, count=1)

    if (declared := model.adapter) is None:
        return {"trainable": chosen(weights, trained.weights) or tuple(weights)}
    every = declared.pretrained is None and declared.targets == "all-linear"
    targets = () if every else chosen(modules, trained.modules)
    adapter = LoraConfig(
        rank=RANK,
        dropout=declared.dropout,
        targets=targets or "all-linear",
        dora=declared.dora,
        rslora=declared.rslora,
        modules_to_save=chosen(modules, trained.saved),
    )
    return {"adapter": adapter}


def _refused(recipe: Recipe, message: str) -> RecipeError:
    field = "model.architecture" if recipe.model.architecture else "model.pretrained"
    return RecipeError(Problem("dry_run.model", field, message, "`llmtrain verify` a small recipe of this model"))
