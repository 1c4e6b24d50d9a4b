"""Ulysses around attention that a family computes itself, without a function of `transformers`' table.

Its queries, keys and values cannot be exchanged, but what its projections return can. Each rank projects its slice, and
gets the columns of its share of the heads for the whole sequence. The family's code then computes as on a tensor
parallel rank, and what enters the last projection is exchanged back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmtrain.models.documents import outside_of_parts
from llmtrain.models.tensor.collectives import HIDDEN_SHARD, SEQUENCE_SHARD, Shard
from llmtrain.models.tensor.usual_plan import COUNTS, biases_of_heads, split_attention
from llmtrain.overrides import replaced

_OF_TOKENS = ("position_ids", "position_embeddings")
"""Arguments of attention that have a row for each token of the sequence."""


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share a sequence, as one of them exchanges slices with the others."""

    rank: int
    size: int
    all_to_all: Callable[[Sequence[Tensor], int], Tensor]
    """Sends part r to rank r, and joins the received parts along a dimension."""
    whole: Callable[[Tensor], Tensor]
    """Returns [batch, T, ...] of the whole sequence, given this rank's slice."""


def exchanges(model: PreTrainedModel, ranks: SequenceRanks) -> list[Exchange]:
    """Returns what is exchanged in a family that computes all attention itself; nothing for other models.

    Parts that gather whole sequences (`llmtrain.models.documents`) exchange nothing.
    """
    is_family = type(model).__module__.startswith("transformers")  # a user's own model calls a function of the table
    if not is_family or any(map(calls_table, model.modules())):
        return []
    outside = set(outside_of_parts(model))
    return [Exchange(*parts, ranks) for parts in split_attention(model) if parts[0] in outside]


def calls_table(module: nn.Module) -> bool:
    """Whether a module calls a function of `transformers`' table of attention."""
    return "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module)


def names_in_forward(module: nn.Module) -> set[str]:
    """Returns the global names and attributes that the forward method of a module reads."""
    methods = (inspect.unwrap(vars(kind)["forward"]) for kind in type(module).__mro__ if "forward" in vars(kind))
    return {name for method in methods if (code := getattr(method, "__code__", None)) for name in code.co_names}


class Exchange:
    """What is exchanged around the code of one attention module."""

    def __init__(
        self, attention: nn.Module, projections: dict[nn.Module, Shard], last: nn.Module, ranks: SequenceRanks
    ) -> None:
        """projections: with the columns that the heads of a rank need."""
        self._attention = attention
        self._projections = projections
        self._last = last
        self._ranks = ranks
        self._slice: Tensor | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the attention computes a share of the heads, for the whole sequence."""
        counts = [
            (self._attention, name, count // self._ranks.size)
            for name in COUNTS
            if isinstance(count := vars(self._attention).get(name), int) and count % self._ranks.size == 0
        ]
        hooks = [
            self._attention.register_forward_pre_hook(self._show_whole_length, with_kwargs=True),
            self._last.register_forward_pre_hook(self._return_tokens),
        ]
        for projection, shard in self._projections.items():
            hooks.append(projection.register_forward_pre_hook(lambda *_: self._slice))
            hooks.append(projection.register_forward_hook(self._share_heads(shard)))
        try:
            with replaced(*counts):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _show_whole_length(self, attention: nn.Module, args: Any, named: Any) -> tuple[Any, dict[str, Any]]:
        """Keeps the slice for the projections. Attention reads the length of its input, so it gets zeros."""
        given = inspect.signature(attention.forward).bind(*args, **named)
        first = next(iter(given.arguments))
        self._slice = hidden = given.arguments[first]
        batch, length, width = hidden.shape
        given.arguments[first] = hidden.new_zeros(()).expand(batch, length * self._ranks.size, width)
        for name in _OF_TOKENS:
            value = given.arguments.get(name)
            if value is not None:
                is_one = isinstance(value, Tensor)
                given.arguments[name] = self._ranks.whole(value) if is_one else tuple(map(self._ranks.whole, value))
        for name, shard in biases_of_heads(attention, given.arguments, self._ranks.size):
            if (bias := given.arguments[name]).shape[-1] == length:
                raise ValueError("it biases the scores of attention by positions that it counts in each slice")
            given.arguments[name] = shard.part(bias, self._ranks.rank, self._ranks.size)
        return given.args, given.kwargs

    def _share_heads(self, shard: Shard) -> Callable[..., Tensor]:
        def exchange(_: nn.Module, inputs: Any, states: Tensor) -> Tensor:
            parts = [shard.part(states, rank, self._ranks.size) for rank in range(self._ranks.size)]
            return self._ranks.all_to_all(parts, SEQUENCE_SHARD.dim)

        return exchange

    def _return_tokens(self, _: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        self._slice = None
        return self._ranks.all_to_all(inputs[0].chunk(self._ranks.size, SEQUENCE_SHARD.dim), HIDDEN_SHARD.dim)
