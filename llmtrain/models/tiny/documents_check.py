"""Finds out on a tiny copy of a model which parts of it mix packed documents in spite of their masks.

These parts compute each document on its own (`llmtrain.models.documents.keep_apart`). Whether documents still influence
each other is then tried with the whole copy.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data import MicroBatch
from llmtrain.errors import FamilyError, Problem, RecipeError
from llmtrain.models.build import model_configuration
from llmtrain.models.documents import Rows, compute_per_document, document_masks, keep_apart
from llmtrain.models.stages import decoder_layers
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.model import COPY_ERRORS, MODEL_ERRORS, TOLERANCE, build_tiny_model, relative_deviation
from llmtrain.plan.facts.families import MIXING_PARTS
from llmtrain.recipe import Recipe

ALONE = 1e-4
"""Largest relative deviation of a document's logits from those of the document alone: products have other shapes there,
so that sums may be in another order."""
FIRST, BOTH = 40, 60
"""Tokens of the first of two documents, and of both: many more than the windows and strides of tiny copies."""
FIX = "--set data.packing=none, or --set data.mask_documents=false"
Kinds = frozenset[type[nn.Module]]
"""Classes of modules."""
_found: dict[str, Kinds] = {}
"""What `mixing_parts` has found in this process, by the configuration of the tiny copy."""


def mixing_parts(config: PreTrainedConfig) -> Kinds:
    """Returns the classes of the parts of decoder layers that compute something else from packed documents than from
    each document on its own, although masks separate these.

    config: of a model; a tiny copy of it is tried on the CPU, part by part. Raises RecipeError if that is not possible
    for a family that is known to have such parts.
    """
    try:
        return mixing_parts_of(shrink_configuration(config, LAYERS))
    except COPY_ERRORS as error:
        if config.get_text_config(decoder=True).model_type not in MIXING_PARTS:
            return frozenset()  # `check_documents` says so for a model with its own code
        text = " ".join(str(error).split())[:100]
        message = f"no tiny copy of '{config.model_type}' runs, to find the parts that mix packed documents ({text})"
        raise RecipeError(Problem("data.documents_mixed", "data.mask_documents", message, FIX)) from error


def mixing_parts_of(config: PreTrainedConfig) -> Kinds:
    """Does the same for the configuration of a tiny model. Raises what the model's code raises."""
    config = _with_constant_scale(config)
    key = f"{config.model_type} {config.to_json_string()}"
    if key not in _found:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build_tiny_model(config, "eager").eval()
            _found[key] = _mixing_parts(model) if _influences(model) else frozenset()
    return _found[key]


def build_kept_apart(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Builds a tiny model as `build_tiny_model` does, whose parts keep packed documents apart."""
    kinds = mixing_parts_of(config)
    model = build_tiny_model(config, attention)
    keep_apart(model, kinds)
    return model


def _mixing_parts(model: PreTrainedModel) -> Kinds:
    try:
        layers = decoder_layers(model)[1]
    except FamilyError:
        return frozenset()
    tokens = torch.randint(3, 90, (2, BOTH))
    positions = torch.stack([torch.arange(BOTH), torch.arange(BOTH) % FIRST])
    rows = Rows(positions)
    found: set[type[nn.Module]] = set()

    def compare(part: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if type(part) in found:
            return
        try:
            alone = compute_per_document(partial(type(part).forward, part), rows, args, named)
        except MODEL_ERRORS:
            return  # If it does mix documents, these influence each other in the whole copy.
        if not _agree(output, alone):
            found.add(type(part))

    parts = [part for layer in layers for part in layer.children()]
    handles = [part.register_forward_hook(compare, with_kwargs=True) for part in parts]
    try:
        _logits(model, tokens, positions)
    finally:
        for handle in handles:
            handle.remove()
    return frozenset(found)


def _agree(output: Any, alone: Any) -> bool:
    """Whether the first result of a part is that of each document on its own."""
    output, alone = (result[0] if isinstance(result, tuple | list) else result for result in (output, alone))
    return not isinstance(alone, Tensor) or relative_deviation(alone, output) <= ALONE


def influences(config: PreTrainedConfig) -> bool:
    """Returns whether the logits of a document depend on the one before it in its sequence, with masks, and with the
    parts that would mix documents kept apart.

    They are compared with those after another document, and with those of the document alone: an indexer may choose
    fewer tokens of a document because it has chosen some of the other one. config: of a tiny model, which is built on
    the CPU. Raises what the model's code raises.
    """
    config = _with_constant_scale(config)
    with torch.random.fork_rng(devices=[]):
        return _influences(build_kept_apart(config, "eager").eval())


def _with_constant_scale(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a configuration in which a scale of Llama 4's queries is constant, as in rows that are not too long."""
    if getattr(config, "floor_scale", None):
        config = copy(config)
        config.floor_scale = BOTH + 1
    return config


def _influences(model: PreTrainedModel) -> bool:
    torch.manual_seed(0)
    tokens = torch.randint(3, 90, (1, BOTH))
    positions = torch.cat([torch.arange(FIRST), torch.arange(BOTH - FIRST)])[None]
    other = tokens.clone()
    other[:, :FIRST] = 3 + (other[:, :FIRST] + 7) % 80
    after_first, after_other = (_logits(model, given, positions)[FIRST:] for given in (tokens, other))
    alone = _logits(model, tokens[:, FIRST:], positions[:, FIRST:])
    scale = after_first.abs().max()
    depends_on_other = (after_first - after_other).abs().max() > TOLERANCE * scale
    return bool(depends_on_other or (after_first - alone).abs().max() > ALONE * scale)


def check_documents(recipe: Recipe) -> str:
    """Tries whether a model with its own code keeps packed documents apart; other models are in a table.

    Returns a note if that cannot be tried, or an empty text. Raises RecipeError if documents influence each other.
    """
    config = model_configuration(recipe)
    if not recipe.data.has_document_mask or type(config).__module__.startswith("transformers."):
        return ""
    try:
        mixes = influences(shrink_configuration(config, LAYERS))
    except COPY_ERRORS as error:
        text = " ".join(str(error).split())[:100]
        return (
            f"it was not tried whether packed documents influence each other in '{config.model_type}', since no tiny "
            f"copy of its own code runs ({type(error).__name__}: {text}); they do not with --set data.packing=none"
        )
    if mixes:
        message = f"'{config.model_type}' lets packed documents influence each other, whatever the attention mask"
        raise RecipeError(Problem("data.documents_mixed", "data.mask_documents", message, FIX))
    return ""


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> Tensor:
    with document_masks(MicroBatch(tokens, positions, labels=tokens)):
        logits: Tensor = model(tokens, position_ids=positions, use_cache=False).logits
    return logits[0]
