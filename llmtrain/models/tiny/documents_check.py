"""Finds out on a tiny copy of a model which parts of it mix packed documents in spite of their masks.

These parts compute each document on its own (`llmtrain.models.documents.keep_apart`). Whether documents still influence
each other is then tried with the whole copy. Whether a part can continue a document from states, so that ranks with
slices of sequences hand them on, is tried with the part alone: some ignore initial states, as their kernels do.
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
from llmtrain.models.documents import (
    Kinds,
    Rows,
    compute_per_document,
    compute_segments,
    document_masks,
    keep_apart,
)
from llmtrain.models.stages import decoder_layers
from llmtrain.models.states import States, takes_states
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.model import (
    COPY_ERRORS,
    MODEL_ERRORS,
    TOLERANCE,
    build_tiny_model,
    relative_deviation,
)
from llmtrain.plan.facts.families import MIXING_PARTS
from llmtrain.recipe import Recipe

ALONE = 1e-4
"""Largest relative deviation of a document's logits from those of the document alone: products have other shapes there,
so that sums may be in another order."""
FIRST, BOTH = 40, 60
"""Tokens of the first of two documents, and of both: many more than the windows and strides of tiny copies."""
FIX = "--set data.packing=none, or --set data.mask_documents=false"
SLICES = 4
"""Slices in which a part continues from states: a document in one of them, and others in two, three and four."""
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
            return {}  # `check_documents` says so for a model with its own code
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
            _found[key] = _mixing_parts(model) if _influences(model) else {}
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
        return {}
    tokens = torch.randint(3, 90, (2, BOTH))
    positions = torch.stack([torch.arange(BOTH), torch.arange(BOTH) % FIRST])
    rows = Rows(positions)
    found: dict[type[nn.Module], bool] = {}

    def compare(part: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if type(part) in found:
            return
        try:
            alone = compute_per_document(partial(type(part).forward, part), rows, args, named)
        except MODEL_ERRORS:
            return  # If it does mix documents, these influence each other in the whole copy.
        if not _agree(output, alone):
            found[type(part)] = _continues_from_states(part, rows, args, named)

    parts = [part for layer in layers for part in layer.children()]
    handles = [part.register_forward_hook(compare, with_kwargs=True) for part in parts]
    try:
        _logits(model, tokens, positions)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _continues_from_states(part: nn.Module, rows: Rows, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a part computes the same documents, and the same gradients, slice by slice from states."""
    if not takes_states(type(part)):
        return False
    function = partial(type(part).forward, part)
    inputs: list[Tensor] = [parameter for parameter in part.parameters() if parameter.requires_grad]

    def is_of_tokens(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape[:2] == rows.shape

    def tracked(value: Any) -> Any:
        if not is_of_tokens(value) or not value.is_floating_point():
            return value
        inputs.append(value.detach().requires_grad_())
        return inputs[-1]

    def column(number: int, value: Any) -> Any:
        return value.chunk(SLICES, dim=1)[number] if is_of_tokens(value) else value

    try:
        with torch.enable_grad():
            args, named = tuple(map(tracked, args)), {name: tracked(value) for name, value in named.items()}
            expected = _first(compute_per_document(function, rows, args, named))
            handed, outputs = _Handed(), []
            for number in range(SLICES):
                cut = partial(column, number)
                own = {name: cut(value) for name, value in named.items()}
                segments = rows.segments(number, SLICES)
                outputs.append(_first(compute_segments(function, segments, handed, tuple(map(cut, args)), own)))
            output = torch.cat(outputs, dim=1)
            into = torch.randn_like(expected)
            of_states = torch.autograd.grad(output, handed.sent, into, retain_graph=True)
            ours, theirs = (
                torch.autograd.grad(result, inputs, into, allow_unused=True, materialize_grads=True)
                for result in (output, expected)
            )
    except MODEL_ERRORS:  # also if a state is not read, or has no gradient
        return False
    if not all(gradient.any() for gradient in of_states):
        return False
    # Of all gradients at once: that of a decay is small, because its terms cancel, and their rounding errors are not.
    handed_on, whole = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (ours, theirs))
    return relative_deviation(output, expected) <= ALONE and relative_deviation(handed_on, whole) <= ALONE


class _Handed:
    """Hands the states of a slice on to the next one within a process."""

    def __init__(self) -> None:
        self._states: list[States] = []
        self.sent: list[Tensor] = []
        """All states of all rows and slices."""

    def receive(self) -> States:
        """Returns the states of the next row."""
        return self._states.pop(0)

    def send(self, output: Tensor, states: States) -> Tensor:
        """Keeps the states of the next row."""
        self._states.append(states)
        self.sent += states.tensors
        return output


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple | list) else result


def _agree(output: Any, alone: Any) -> bool:
    """Whether the first result of a part is that of each document on its own."""
    output, alone = _first(output), _first(alone)
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
