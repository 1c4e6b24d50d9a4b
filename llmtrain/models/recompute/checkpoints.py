"""Activation checkpointing: the backward pass recomputes activations of decoder layers that were not saved.

With `full`, only the input of a layer is saved. `selective` also saves the results of matrix products and of attention,
and recomputes norms, rotations and activation functions, which takes little time. Both are torch's checkpoints around
the `forward` of a layer. The hooks with which ZeRO-3 and FSDP2 gather the weights of a layer stay outside of it,
because they act differently in the forward pass and in the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel

from llmtrain.errors import FamilyError
from llmtrain.models.documents import on_same_documents, per_document
from llmtrain.models.own import OwnModel
from llmtrain.models.own_attention import on_same_route
from llmtrain.models.stages import Placeholder, decoder_layers
from llmtrain.plan.stages import is_recomputed
from llmtrain.recipe import ParallelConfig, Recipe

PRODUCTS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm"),
        *("transformers::grouped_mm_fallback", "torch_attn::_varlen_attn", "llmtrain::all_to_all"),
    }
)
"""Operations whose results `selective` keeps, in addition to those of attention: products, and the tokens that arrive
from other ranks."""
ATTENTION = (
    "aten::_scaled_dot_product_",
    "flash_attn",
    "torch_attn::_varlen_attn",
    "llmtrain::varlen",
    "llmtrain::ring",
)
"""Prefixes of the names of attention kernels. flash-attn registers its operations under `flash_attn` and similar."""


def use_recomputation(model: PreTrainedModel, parallel: ParallelConfig, is_ring: bool = False) -> None:
    """Sets what each layer of a model, or of a stage of it, recomputes.

    It is done by layers in every engine: DeepSpeed's interval would count stages, because it does not see layers.
    Called after `keep_apart`, and before layers are compiled: a selective checkpoint then is a part of the layer's
    graph. is_ring: whether sequence parallel ranks form a ring.
    """
    if parallel.activation_checkpointing == "none":
        return
    if isinstance(model, OwnModel) and parallel.offload_activations:
        field, reason = "parallel.offload_activations", "the inputs of the layers of a model of your own are not moved"
        raise FamilyError("recompute.every", field, "false", f"is not supported for {model.config.model_type}", reason)
    layers = [
        layer
        for number, layer in enumerate(decoder_layers(model)[1])
        if is_recomputed(parallel, number) and not isinstance(layer, Placeholder)
    ]
    inputs = OffloadedInputs()
    for number, layer in enumerate(layers):
        active = [on_same_route] if isinstance(model, OwnModel) else []
        active += [on_same_documents] if is_ring or per_document(layer) else []
        checkpoint_layer = partial(_checkpoint, active)
        if parallel.activation_checkpointing == "selective":
            layer.forward = partial(checkpoint_layer, layer.forward, context_fn=_contexts)
        elif parallel.offload_activations:
            layer.forward = FullCheckpoint(layer.forward, partial(inputs.run, checkpoint_layer, number == 0))
        else:
            layer.forward = FullCheckpoint(layer.forward, checkpoint_layer)


@dataclass(frozen=True)
class FullCheckpoint:
    """The forward pass of a layer, of which only the input is saved. A layer is compiled within its checkpoint."""

    forward: Callable[..., Any]
    checkpoint: Callable[..., Any]
    """Called with `forward` and its arguments."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs the layer within its checkpoint."""
        return self.checkpoint(self.forward, *args, **named)


def bind_to_copy(model: nn.Module) -> None:
    """Lets a copy of a model, as those of `nn.DataParallel`, recompute its own layers: a copied attribute `forward` is
    bound to the layer of the original."""
    for layer in model.modules():
        own = vars(layer).get("forward")
        if isinstance(own, FullCheckpoint):
            vars(layer)["forward"] = replace(own, forward=partial(type(layer).forward, layer))


def gathers_whole_layers(recipe: Recipe) -> bool:
    """Whether ZeRO-3 has to gather each layer as a whole, with hooks around it and none between its modules.

    A layer compiled as one graph has no modules left. The two passes of a selective checkpoint must run the same
    operations, but ZeRO-3 prefetches other weights in each. A feed-forward layer in tiles would be gathered for each.
    """
    parallel = recipe.parallel
    return recipe.kernels.blocks == "compiled" or parallel.activation_checkpointing == "selective" or parallel.tiled_mlp


def require_input_gradient(
    layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook that makes the input of a trained layer require a gradient, which is not used.

    Above frozen layers the input requires none. ZeRO-3 would then release the weights of a layer that it gathers as a
    whole before the layer's backward pass has read them.
    """
    hidden = args[0] if args else named["hidden_states"]
    is_trained = any(parameter.requires_grad for parameter in layer.parameters())
    if not torch.is_grad_enabled() or hidden.requires_grad or not is_trained:
        return None
    hidden = hidden.detach().requires_grad_()
    return ((hidden, *args[1:]), named) if args else (args, named | {"hidden_states": hidden})


def _checkpoint(
    active: Sequence[Callable[..., Any]],
    forward: Callable[..., Any],
    *args: Any,
    context_fn: Any = noop_context_fn,
    **named: Any,
) -> Any:
    """Runs a layer within a checkpoint.

    Its recomputation may come after the forward pass of another micro-batch. active: functions that return a function
    which has what is active now whenever it is called.
    """
    for keep in active:
        forward = keep(forward)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **named)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a layer's forward pass, and of its recomputation."""
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    is_kept = name in PRODUCTS or name.startswith(ATTENTION)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class OffloadedInputs:
    """Runs the checkpoints of a model's layers, whose inputs wait in host memory until the backward pass.

    Each input is copied to pinned memory while its layer computes, on a stream of its own, and back while the backward
    pass of the layer above computes. The device holds the inputs of two layers at a time. On a CPU they stay in place.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._newest: _Copy | None = None

    def run(
        self,
        checkpoint_layer: Callable[..., Any],
        is_first: bool,
        forward: Callable[..., Any],
        hidden_states: Tensor,
        *args: Any,
        **named: Any,
    ) -> Any:
        """Runs a layer by `checkpoint_layer`. is_first: whether it is the first one in a pass."""
        if not hidden_states.is_cuda:
            return checkpoint_layer(forward, hidden_states, *args, **named)
        address = hidden_states.data_ptr(), hidden_states.shape

        def pack(tensor: Tensor) -> Tensor | _Copy:
            # Masks and the like are the same tensors for all layers.
            return self._keep(tensor, is_first) if (tensor.data_ptr(), tensor.shape) == address else tensor

        with saved_tensors_hooks(pack, lambda kept: kept.take() if isinstance(kept, _Copy) else kept):
            return checkpoint_layer(forward, hidden_states, *args, **named)

    def _keep(self, tensor: Tensor, is_first: bool) -> _Copy:
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        if self._newest is not None:
            self._newest.leave()
        self._newest = _Copy(tensor.detach(), self._stream, None if is_first else self._newest)
        return self._newest


class _Copy:
    """A tensor on its way to the host, there, or on its way back."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream, below: _Copy | None) -> None:
        """below: the input of the layer below, which the backward pass needs next."""
        self._stream, self._below = stream, below
        self._device = tensor.device
        self._tensor: Tensor | None = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copied = self._copy(self._host, tensor)

    def leave(self) -> None:
        """Frees the memory on the device, for operations that come after the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._tensor = None

    def fetch(self) -> None:
        """Begins to copy the tensor back."""
        if self._tensor is None:
            self._tensor = torch.empty_like(self._host, device=self._device)
            self._copied = self._copy(self._tensor, self._host)

    def take(self) -> Tensor:
        """Returns the tensor on the device, and begins to copy back the one below."""
        self.fetch()
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        if self._below is not None:
            self._below.fetch()
            self._below = None
        return tensor

    def _copy(self, to: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copies after the current stream has written the source and no longer uses the destination's memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
            return event
