"""Finds out on a tiny copy of a model whether packed documents influence each other in spite of their masks."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data import MicroBatch
from llmtrain.errors import Problem, RecipeError
from llmtrain.models.build import model_configuration
from llmtrain.models.documents import document_masks
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.model import COPY_ERRORS, TOLERANCE, build_tiny_model
from llmtrain.recipe import Recipe

ALONE = 1e-4
"""Largest relative deviation of a document's logits from those of the document alone: products have other shapes there,
so that sums may be in another order."""
FIRST, BOTH = 40, 64
"""Tokens of the first of two documents, and of both: many more than the windows and strides of tiny copies."""


def influences(config: PreTrainedConfig) -> bool:
    """Returns whether, with masks, the logits of a document depend on the one before it in its sequence.

    They are compared with those after another document, and with those of the document alone: an indexer may choose
    fewer tokens of a document because it has chosen some of the other one. config: of a tiny model, which is built on
    the CPU. Raises what the model's code raises.
    """
    if getattr(config, "floor_scale", None):  # a scale of Llama 4's queries is constant in rows that are not longer
        config = copy(config)
        config.floor_scale = BOTH + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokens = torch.randint(3, 90, (1, BOTH))
        positions = torch.cat([torch.arange(FIRST), torch.arange(BOTH - FIRST)])[None]
        other = tokens.clone()
        other[:, :FIRST] = 3 + (other[:, :FIRST] + 7) % 80
        model = build_tiny_model(config, "eager").eval()
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
    fix = "--set data.packing=none, or --set data.mask_documents=false"
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
        raise RecipeError(Problem("data.documents_mixed", "data.mask_documents", message, fix))
    return ""


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> Tensor:
    with document_masks(MicroBatch(tokens, positions, labels=tokens)):
        logits: Tensor = model(tokens, position_ids=positions, use_cache=False).logits
    return logits[0]
