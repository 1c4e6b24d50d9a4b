"""Measures what each decoder layer saves for its backward pass, by running the real model with fake tensors.

Fake tensors have shapes but no memory, so a model of any size can be traced on a laptop. Every tensor that autograd
would save passes through `torch.autograd.graph.saved_tensors_hooks`. A storage counts once, in the layer that saves it
first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from llmtrain.errors import Problem, RecipeError, UserError
from llmtrain.models.build import causal_lm, training_configuration
from llmtrain.models.precision import autocast, weight_dtype
from llmtrain.models.stages import decoder_layers
from llmtrain.overrides.torch import fake_tensors, storage_of
from llmtrain.plan import Plan
from llmtrain.plan.facts.model import SavedBytes
from llmtrain.recipe import ModelConfig, Precision

TRACED_LENGTHS = (16, 32, 64)
"""Tokens of the traces from which `saved_per_token` is found. A recurrence in a plain loop takes longer for more."""


def traced_layers(plan: Plan) -> tuple[int, ...]:
    """Returns the bytes that each layer saves for one micro-batch on one rank that holds the layer unsplit.

    Raises RecipeError for a model whose forward pass reads the values of its tensors, for fused attention, and for a
    model of which a part is frozen.
    """
    recipe = plan.recipe
    if recipe.model.is_partly_frozen:
        message = "traces what a layer keeps if all of it is trained, but a part is frozen"
        raise RecipeError(Problem("plan.trace_frozen", "--trace", message, "leave it out for the estimate"))
    if recipe.model.attention_kernel not in ("sdpa", "eager") or not recipe.data.has_document_mask:
        # Fused kernels are not available on every machine. If documents are not kept apart, `transformers` reads the
        # positions to decide whether it needs a mask, and fake tensors have no values.
        raise _untraceable("only 'sdpa' and 'eager' attention with masked documents")
    try:
        size = (recipe.batch.micro_batch_size, recipe.data.sequence_length)
        return _saved_by_layers(training_configuration(recipe), recipe.model, recipe.parallel.precision, size)
    except UserError:
        raise
    except Exception as error:  # a model may raise anything if it reads values that are not there
        raise _untraceable(f"'{plan.model.model_type}' fails: {type(error).__name__}") from error


def saved_per_token(config: PreTrainedConfig, model: ModelConfig, precision: Precision) -> tuple[SavedBytes, ...]:
    """Returns what each layer saves, by the number of tokens; empty if the forward pass reads the values of tensors.

    It is found from traces of three lengths: autocast saves weights, and attention may save its scores or a mask.
    """
    try:
        traces = [_saved_by_layers(config, model, precision, (1, length)) for length in TRACED_LENGTHS]
    except Exception:  # a user's module may raise anything if it reads values that are not there
        return ()
    saved = []
    short, middle, long = TRACED_LENGTHS
    for of_short, of_middle, of_long in zip(*traces, strict=True):
        first, second = (of_middle - of_short) / (middle - short), (of_long - of_middle) / (long - middle)
        per_pair = (second - first) / (long - short)
        per_token = first - per_pair * (short + middle)
        fixed = of_short - per_token * short - per_pair * short**2
        saved.append(SavedBytes(fixed=fixed, per_token=per_token, per_pair=per_pair))
    return tuple(saved)


def _saved_by_layers(
    config: PreTrainedConfig, model: ModelConfig, precision: Precision, size: tuple[int, int]
) -> tuple[int, ...]:
    """Returns the bytes that each layer saves for tokens of a size [batch, T]."""
    with fake_tensors():
        built = causal_lm(config, model, weight_dtype(precision)).train()
        saved_bytes = _SavedBytes(decoder_layers(built)[1], {storage_of(weight) for weight in built.parameters()})
        # Has the dtype and shape of the masks of packed documents, which are normally computed from positions.
        dtype = torch.bool if model.attention_kernel == "sdpa" else built.dtype
        mask = torch.ones(size[0], 1, size[1], size[1], dtype=dtype)
        with (
            torch.autograd.graph.saved_tensors_hooks(saved_bytes.pack, lambda tensor: tensor),
            autocast(precision, "cpu"),
        ):
            built(input_ids=torch.zeros(size, dtype=torch.long), attention_mask=mask, use_cache=False)
    return tuple(saved_bytes.saved)


def _untraceable(reason: str) -> RecipeError:
    fix = "leave --trace out: the estimate needs no model"
    return RecipeError(Problem("memory.trace", "--trace", f"a model is traced without values: {reason}", fix))


class _SavedBytes:
    """Counts the saved bytes of each layer, with hooks around the layers."""

    def __init__(self, layers: Any, excluded: set[int]) -> None:
        self.saved = [0] * len(layers)
        self._excluded = excluded
        self._inside: int | None = None
        self._kept: list[Tensor] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(
                lambda _, arguments, named, index=index: self._enter(index, named), with_kwargs=True
            )
            layer.register_forward_hook(lambda *_: self._leave())

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd is about to save."""
        storage = storage_of(tensor)
        if self._inside is not None and storage not in self._excluded:
            self._excluded.add(storage)
            self._kept.append(tensor)  # keeps it alive, since another tensor could otherwise get its address
            self.saved[self._inside] += tensor.untyped_storage().nbytes()
        return tensor

    def _enter(self, index: int, named: dict[str, Any]) -> None:
        """Excludes a layer's keyword arguments, such as masks and rotary tables, because all layers share them."""
        self._inside = index
        for argument in named.values():
            for tensor in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(tensor, Tensor):
                    self._kept.append(tensor)
                    self._excluded.add(storage_of(tensor))

    def _leave(self) -> None:
        self._inside = None
