"""Slices of the residual stream beside split modules (Megatron-LM, arXiv 2205.05198, section 4.2.2).

Between attention and feed-forward, a layer computes each token alone: norms, the residual's sums, dropout. There each
tensor parallel rank holds a slice of every sequence. What enters attention or feed-forward is gathered, and what leaves
it is reduced and scattered, which sends as many bytes as the sum of whole activations does. The regions begin at the
first layer, with the sum of what the embedding has found, and end behind the last norm, where the sequence is gathered
for the head. Pipeline stages send each other slices.

Parameters that are used within the regions, such as those of norms, get their gradient from a rank's own tokens only,
so it is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    sum_gradient,
)
from llmtrain.plan.model_facts import decoder_lists


class GatheredSection(SplitSection):
    """The split modules of attention or feed-forward, and of adapters there; the input was gathered before the first.

    Of an adapter, the whole matrix is applied to the gathered input of a split one, or to slices of its output. In
    either case a rank computes a part of its gradient.
    """

    def enter(self, value: Tensor) -> Tensor:
        """Returns the value."""
        return value

    def leave(self, partial: Tensor) -> Tensor:
        """Sums partial results, each rank for its own tokens."""
        return reduce_tokens(partial, self.ranks)

    def use(self, parameter: Tensor) -> None:
        """Lets the gradients of a parameter be summed over the ranks."""
        sum_gradient(parameter, self.ranks)


class OutsideSection(SplitSection):
    """The embedding, whose sum waits until the regions begin, or the head, for which their end gathers."""

    def enter(self, value: Tensor) -> Tensor:
        """Returns the value."""
        return value

    def leave(self, partial: Tensor) -> Tensor:
        """Returns the partial results."""
        return partial


class Regions:
    """A rank's slices of the residual stream of a model."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.sections = GatheredSection(ranks), OutsideSection(ranks)
        """Those within layers, and outside of them."""
        self._gathering: set[str] = set()

    def install(self, model: PreTrainedModel, split: Iterable[str]) -> None:
        """Lets a model, or a part of one, hold slices.

        split: names of all split modules. Raises ValueError if the model has no single list of decoder layers.
        """
        ((path, layers),) = decoder_lists(model).items()
        split = frozenset(split)
        for number, layer in enumerate(layers):
            self._divide(layer, f"{path}.{number}", split)
        tables = model.get_input_embeddings(), model.get_output_embeddings()
        in_layers = {id(module) for module in layers.modules()}
        for module in model.modules():
            if id(module) not in in_layers and not any(module is table for table in tables):
                self._use(module.parameters(recurse=False))
        names = {id(module): name for name, module in model.named_modules()}
        has_parts = [names.get(id(table)) in split for table in tables]
        if _is_here(layers[0]):
            begin = reduce_tokens if has_parts[0] else part_of_tokens
            _change_input(layers[0], lambda hidden: begin(hidden, self._ranks))
        if _is_here(layers[-1]):
            end = gather_tokens if has_parts[1] else join_tokens
            model.base_model.register_forward_hook(lambda _, inputs, output: _replaced(output, end, self._ranks))

    def gathers(self, name: str) -> bool:
        """Whether a module is within attention or feed-forward, where the sequence is whole."""
        return any(name.startswith(f"{one}.") for one in self._gathering)

    def _divide(self, layer: nn.Module, path: str, split: Iterable[str]) -> None:
        """Lets the parts of a layer that hold split modules gather their input, and the others use slices."""
        self._use(layer.parameters(recurse=False))
        for name, part in layer.named_children():
            if any(one.startswith(f"{path}.{name}.") for one in split):
                self._gathering.add(f"{path}.{name}")
                part.register_forward_pre_hook(self._gathered, with_kwargs=True)
            else:
                self._use(part.parameters())

    def _gathered(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (gather_tokens(args[0], self._ranks), *args[1:]), named
        return args, named | {"hidden_states": gather_tokens(named["hidden_states"], self._ranks)}

    def _use(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            sum_gradient(parameter, self._ranks)


def _is_here(layer: nn.Module) -> bool:
    """Whether a layer is this stage's own; of others it has placeholders."""
    return next(layer.parameters(), None) is not None


def _change_input(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes what a layer is called with. A hook would run within its checkpoint, which would keep the whole input."""
    kind = type(layer)

    def call(self: nn.Module, hidden: Tensor, *args: Any, **named: Any) -> Any:
        return kind.__call__(self, change(hidden), *args, **named)

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _replaced(output: Any, end: Callable[[Tensor, Ranks], Tensor], ranks: Ranks) -> Any:
    output.last_hidden_state = end(output.last_hidden_state, ranks)
    return output
