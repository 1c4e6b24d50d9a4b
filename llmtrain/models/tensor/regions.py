"""Slices of the residual stream between split modules (Megatron-LM, arXiv 2205.05198, section 4.2.2).

Between attention and feed-forward, a layer computes each token alone: norms, the residual's sums, dropout. There each
tensor parallel rank holds a slice of every sequence. What enters attention or feed-forward is gathered, and what leaves
it is reduced and scattered, which sends as many bytes as the sum of whole activations does. The regions begin at the
first layer, where the embedding's results are summed, and end after the last norm, where the sequence is gathered for
the head. Pipeline stages send each other slices.

Parameters that are used within the regions, such as those of norms, get their gradient from a rank's own tokens only,
so it is summed over the ranks. So is that of a router: within a block of experts each rank computes a part of all
gradients, and the partial results of the experts wait until the block ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmtrain.models.tensor.exchanges import (
    Ranks,
    SplitSection,
    gather_tokens,
    join_tokens,
    part_of_tokens,
    reduce_tokens,
    shard_of,
    share_gradient,
    sum_gradient,
)
from llmtrain.plan.facts.built_model import decoder_lists

EXPERTS = "moe_tp_experts"
"""The style of the experts of a layer."""


class GatheredSection(SplitSection):
    """The split modules of attention or feed-forward, and of adapters there; the input was gathered before the first.

    The whole matrix of an adapter is applied to the gathered input of its split one, or to slices of its output. In
    either case a rank computes a part of the whole matrix's gradient.
    """

    def enter(self, value: Tensor) -> Tensor:
        """Returns the value. Each rank computes a part of its gradient."""
        return value

    def admit(self, value: Tensor) -> Tensor:
        """Returns the value, as `enter` does."""
        return value

    def leave(self, partial: Tensor) -> Tensor:
        """Sums partial results, each rank for its own tokens."""
        return reduce_tokens(partial, self.ranks)

    def use(self, parameter: Tensor) -> None:
        """Makes ranks sum the gradients of a parameter."""
        sum_gradient(parameter, self.ranks)


class PartialSection(GatheredSection):
    """Split modules whose outputs are summed later, and the head, whose input is gathered where the regions end.

    The outputs of the embedding are summed where the regions begin, those of experts where their block ends.
    """

    def leave(self, partial: Tensor) -> Tensor:
        """Returns the partial results."""
        return partial


class Regions:
    """A rank's slices of the residual stream of a model."""

    def __init__(self, ranks: Ranks, styles: Mapping[str, str]) -> None:
        """styles: those of all split modules, by name."""
        self._ranks = ranks
        self._styles = styles
        self._within, self._waiting = GatheredSection(ranks), PartialSection(ranks)
        self._gathering = {_part_of(name) for name in styles} - {""}
        """Parts of layers, such as attention, that need whole sequences."""
        self._of_experts = {_part_of(name) for name, style in styles.items() if style == EXPERTS}

    def section_of(self, name: str) -> SplitSection:
        """Returns the section of a split module."""
        part = _part_of(name)
        return self._within if part and part not in self._of_experts else self._waiting

    def has_partial_gradients(self, name: str) -> bool:
        """Whether a rank computes a part of the gradients of whole parameters of a module."""
        part = _part_of(name)
        return part not in self._gathering or part in self._of_experts

    def install(self, model: PreTrainedModel) -> None:
        """Makes a model, or a part of one, hold slices. Raises ValueError without a single list of decoder layers."""
        ((_, layers),) = decoder_lists(model).items()
        tables = model.get_input_embeddings(), model.get_output_embeddings()
        for name, module in model.named_modules():
            if self.has_partial_gradients(name) and not any(module is table for table in tables):
                for parameter in module.parameters(recurse=False):
                    if shard_of(parameter) is None:
                        sum_gradient(parameter, self._ranks)
            if name in self._gathering:
                module.register_forward_pre_hook(self._gathered, with_kwargs=True)
            if name in self._of_experts:
                module.register_forward_hook(self._scattered)
        names = {id(module): name for name, module in model.named_modules()}
        has_parts = [names.get(id(table)) in self._styles for table in tables]
        if _is_here(layers[0]):
            begin = reduce_tokens if has_parts[0] else part_of_tokens
            _change_input(layers[0], lambda hidden: begin(hidden, self._ranks))
        if _is_here(layers[-1]):
            end = gather_tokens if has_parts[1] else join_tokens
            model.base_model.register_forward_hook(lambda _, inputs, output: _replaced(output, end, self._ranks))
        if self._of_experts:
            model.register_forward_hook(self._shared_loss)

    def _gathered(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (gather_tokens(args[0], self._ranks), *args[1:]), named
        return args, named | {"hidden_states": gather_tokens(named["hidden_states"], self._ranks)}

    def _scattered(self, _: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # with the logits of the router
            return reduce_tokens(output[0], self._ranks), *output[1:]
        return reduce_tokens(output, self._ranks)

    def _shared_loss(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Lets the router's loss, whole on each rank, count once in the summed gradients of the router."""
        if getattr(output, "aux_loss", None) is not None:
            output.aux_loss = share_gradient(output.aux_loss, self._ranks)
        return output


def _part_of(name: str) -> str:
    """Returns the name of the part of a layer that a module is or belongs to, such as its attention; or nothing."""
    found = re.match(r".*?\.\d+\.[^.]+", name)
    return found.group() if found else ""


def _is_here(layer: nn.Module) -> bool:
    """Whether a layer belongs to this stage; for others it has placeholders."""
    return next(layer.parameters(), None) is not None


def _change_input(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the input of a layer. A hook would run within its checkpoint, which would keep the whole input."""
    kind = type(layer)

    def call(self: nn.Module, hidden: Tensor, *args: Any, **named: Any) -> Any:
        return kind.__call__(self, change(hidden), *args, **named)

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _replaced(output: Any, end: Callable[[Tensor, Ranks], Tensor], ranks: Ranks) -> Any:
    output.last_hidden_state = end(output.last_hidden_state, ranks)
    return output
