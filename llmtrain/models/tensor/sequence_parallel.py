"""Megatron-LM's sequence parallelism: tensor parallel ranks shard the residual stream along the sequence.

Korthikanti et al., arXiv 2205.05198, section 4.2.2. It is not the axis `parallel.sequence` (Ulysses), which shards
sequences among ranks that each hold the whole model.

Between attention and feed-forward, a layer computes each token alone: norms, residual additions, dropout. There, each
rank holds a shard of every sequence. The input of attention or feed-forward is all-gathered, and its output is
reduce-scattered, which together sends as many bytes as the all-reduce of tensor parallelism alone. The stream is
sharded from the first layer on, where the outputs of the embedding are reduced. It is gathered after the last norm, for
the head. Pipeline stages send shards to each other.

Parameters that are applied to the sharded stream, such as those of norms, get gradients from a rank's own tokens only,
so their gradients are all-reduced. So is that of a router: within a block of experts, each rank computes a part of
every gradient, and the outputs of the experts stay partial until the block ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmtrain.models.tensor.collectives import (
    Communicator,
    TensorParallelBlock,
    all_reduce_gradient,
    divide_gradient,
    gather_from_sequence_parallel,
    gather_to_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_sequence_parallel,
    shard_of,
)
from llmtrain.plan.facts.built_model import decoder_lists

EXPERTS = "moe_tp_experts"
"""The style of the experts of a layer."""


class SequenceParallelBlock(TensorParallelBlock):
    """The collectives of an attention or a feed-forward, and of adapters in it, whose input is gathered by a hook.

    An adapter has a split matrix and a whole one. The whole one is applied to the gathered input, or to shards of the
    output. In either case a rank computes a part of its gradient.
    """

    def copy_shared_input(self, value: Tensor) -> Tensor:
        """Returns the gathered input, whose partial gradients the hook reduces."""
        return value

    def copy_input(self, value: Tensor) -> Tensor:
        """Returns the gathered input, as `copy_shared_input` does."""
        return value

    def reduce_output(self, partial: Tensor) -> Tensor:
        """Returns this rank's shard of the output, given its partial one."""
        return reduce_scatter_to_sequence_parallel(partial, self.group)

    def prepare_whole_parameter(self, parameter: Tensor) -> None:
        """All-reduces the gradient of a parameter."""
        all_reduce_gradient(parameter, self.group)


class DeferredReductionBlock(SequenceParallelBlock):
    """The collectives of modules whose partial outputs are reduced later: of the embedding and of experts.

    Those of the embedding are reduced before the first layer, those of experts at the end of their block. The head has
    such a block, too: its output is not partial, and its input is gathered after the last norm.
    """

    def reduce_output(self, partial: Tensor) -> Tensor:
        """Returns the partial output."""
        return partial


class SequenceParallel:
    """Shards the residual stream of a model on a tensor parallel rank."""

    def __init__(self, group: Communicator, styles: Mapping[str, str]) -> None:
        """styles: those of all split modules, by name."""
        self._group = group
        self._styles = styles
        self._block, self._deferred_block = SequenceParallelBlock(group), DeferredReductionBlock(group)
        self._sublayers = {sublayer_of(name) for name in styles} - {""}
        """Names of the attentions and feed-forwards, which need whole sequences."""
        self._experts = {sublayer_of(name) for name, style in styles.items() if style == EXPERTS}

    def block_of(self, name: str) -> TensorParallelBlock:
        """Returns the collectives of a split module."""
        sublayer = sublayer_of(name)
        return self._block if sublayer and sublayer not in self._experts else self._deferred_block

    def has_partial_gradients(self, name: str) -> bool:
        """Whether a rank computes a part of the gradients of whole parameters of a module."""
        sublayer = sublayer_of(name)
        return sublayer not in self._sublayers or sublayer in self._experts

    def install(self, model: PreTrainedModel) -> None:
        """Registers the collectives of a model or a stage.

        Raises ValueError unless it has a single list of decoder layers.
        """
        ((_, layers),) = decoder_lists(model).items()
        tables = model.get_input_embeddings(), model.get_output_embeddings()
        for name, module in model.named_modules():
            if self.has_partial_gradients(name) and not any(module is table for table in tables):
                for parameter in module.parameters(recurse=False):
                    if shard_of(parameter) is None:
                        all_reduce_gradient(parameter, self._group)
            if name in self._sublayers:
                module.register_forward_pre_hook(self._gather_input, with_kwargs=True)
            if name in self._experts:
                module.register_forward_hook(self._reduce_scatter_output)
        names = {id(module): name for name, module in model.named_modules()}
        are_split = [names.get(id(table)) in self._styles for table in tables]
        if _is_on_this_stage(layers[0]):
            shard_stream = reduce_scatter_to_sequence_parallel if are_split[0] else scatter_to_sequence_parallel
            _wrap_input(layers[0], lambda hidden: shard_stream(hidden, self._group))
        if _is_on_this_stage(layers[-1]):
            gather = gather_to_tensor_parallel if are_split[1] else gather_from_sequence_parallel
            model.base_model.register_forward_hook(
                lambda _, inputs, output: _gather_output(output, gather, self._group)
            )
        if self._experts:
            model.register_forward_hook(self._divide_router_gradient)

    def _gather_input(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (gather_to_tensor_parallel(args[0], self._group), *args[1:]), named
        return args, named | {"hidden_states": gather_to_tensor_parallel(named["hidden_states"], self._group)}

    def _reduce_scatter_output(self, _: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # with the logits of the router
            return reduce_scatter_to_sequence_parallel(output[0], self._group), *output[1:]
        return reduce_scatter_to_sequence_parallel(output, self._group)

    def _divide_router_gradient(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Divides the gradient of the router's loss, which is whole on each rank, because gradients are all-reduced."""
        if getattr(output, "aux_loss", None) is not None:
            output.aux_loss = divide_gradient(output.aux_loss, self._group)
        return output


def sublayer_of(name: str) -> str:
    """Returns the name of the child of a layer that a module is or belongs to, such as its attention; else empty."""
    match = re.match(r".*?\.\d+\.[^.]+", name)
    return match.group() if match else ""


def _is_on_this_stage(layer: nn.Module) -> bool:
    """Whether a layer belongs to this stage; others are placeholders without parameters."""
    return next(layer.parameters(), None) is not None


def _wrap_input(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Makes a layer apply `change` to its input.

    A hook would run within the layer's activation checkpoint, which would keep the whole input.
    """
    kind = type(layer)

    def call(self: nn.Module, hidden: Tensor, *args: Any, **named: Any) -> Any:
        return kind.__call__(self, change(hidden), *args, **named)

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _gather_output(output: Any, gather: Callable[[Tensor, Communicator], Tensor], group: Communicator) -> Any:
    output.last_hidden_state = gather(output.last_hidden_state, group)
    return output
