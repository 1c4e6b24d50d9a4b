"""Ulysses (arXiv 2309.14509) around the attention of any `transformers` model, by DeepSpeed's all-to-all.

Each rank of a group holds a slice of the sequence. Around attention, each rank exchanges slices of its heads for the
other ranks' tokens, so that it attends over the whole sequence with its share of the heads. Where the ranks do not
divide the heads, groups of them form a ring: a group exchanges heads for its own tokens, and attends to those of other
groups as they pass by (`ring.py`).

Whatever else a model computes from all tokens is also computed for the whole sequence: attention masks, and the loss of
a router. Recurrences and convolutions continue from the states of the rank before (`handover.py`), or gather the tokens
that the rank's slice depends on (`llmtrain.models.documents`).

A family that computes attention itself exchanges what its projections return (`own_attention.py`).

An indexer chooses the keys of each token (DeepSeek's sparse attention). A rank chooses those of its own tokens, among
the keys of the whole sequence.

DeepSpeed's own adapter, `UlyssesSPAttentionHF`, drops masks (`docs/upstream/ulysses_masks.md`) and replaces a function
of `transformers` for the life of the process. This module uses its exchange without the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from deepspeed.sequence.layer import register_all_to_all_group
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmtrain.data import MicroBatch
from llmtrain.engines.deepspeed.handover import Neighbors
from llmtrain.engines.deepspeed.own_attention import SequenceRanks, calls_table, exchanges, names_in_forward
from llmtrain.engines.deepspeed.ring import Group, Ring, zigzag
from llmtrain.models.documents import Slices, holds_slices, outside_of_parts, per_document, sequences_in_slices
from llmtrain.overrides import replaced
from llmtrain.overrides.transformers import (
    CACHE,
    attention_of,
    defining_module,
    mask_arguments,
    router_loss,
    with_attention,
)

Function = Callable[..., Any]
INDEXED = "llmtrain_indexed"
"""The name of an attention that gets the keys that an indexer chose. `eager` and `sdpa` would get them as a mask, which
the family makes as large as the slice."""


class Ulysses:
    """One model's attention, shared by the ranks of a group within `active()`.

    `transformers` looks attention up in a table of the process. The context changes the table and restores it, so that
    several models, split or not, can exist side by side.
    """

    def __init__(self, model: PreTrainedModel, group: Group, heads: Group = None, ring: Group = None) -> None:
        """group: the ranks that share sequences. heads, ring: those with which this rank divides heads, and those with
        which it forms a ring; by default all divide heads. Raises ValueError if its slices must be in order."""
        self.group = group
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        self.ring = Ring(ring) if ring else None
        self._head_ranks = self.size // (self.ring.size if self.ring else 1)
        self._model = model
        self._attention: str = attention_of(model)
        self._positions = torch.empty(0)
        self._interleaved = False
        self._group_name = register_all_to_all_group(group)
        self._heads_name = register_all_to_all_group(heads) if heads else self._group_name
        self._exchanges = exchanges(model, SequenceRanks(self.rank, self.size, self._all_to_all, self._whole))
        self._neighbors = Neighbors(group, self.rank)
        self._indexed: list[Any] = []
        """Attention modules whose keys are chosen by an indexer: their own, or that of an earlier layer."""
        outside = outside_of_parts(model)
        self._counting = [] if self._exchanges else [one for one in outside if _counts_positions(one)]
        if self._attention in ("eager", "sdpa"):
            self._indexed = [one for one in outside if hasattr(one, "indexer") and calls_table(one)]
        if self.ring and (per_document(model) or self._exchanges or self._counting or self._indexed):
            raise ValueError("it needs slices in the order of the tokens, which the ranks of a ring do not hold")

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context of forward passes, and of backward passes, which may recompute attention."""
        inner = ALL_ATTENTION_FUNCTIONS.get(self._attention)  # None for `eager`, which is in the family's own file

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            function = inner or defining_module(module).eager_attention_forward
            if holds_slices():
                return self._attend(function, module, *args, **kwargs)
            output: tuple[Tensor, None] = function(module, *args, **kwargs)  # in a part that has gathered them
            return output

        with ExitStack() as stack:
            ALL_ATTENTION_FUNCTIONS[self._attention] = attention
            stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, self._attention)
            if self._indexed:
                ALL_ATTENTION_FUNCTIONS[INDEXED] = attention
                stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, INDEXED)
            for indexed in self._indexed:
                stack.enter_context(self._choose_keys(indexed))
            for exchange in self._exchanges:
                stack.enter_context(exchange.active())
            for module in self._counting:
                hook = module.register_forward_pre_hook(self._continue_counting, with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(sequences_in_slices(Slices(self.rank, self.size, self._whole, self._neighbors.begin)))
            stack.enter_context(mask_arguments(self._whole_masks))
            stack.enter_context(router_loss(self._model, self._whole_router_loss))
            yield

    def slice(self, batch: MicroBatch) -> MicroBatch:
        """Returns this rank's part of the sequences, each [batch, T / size]; masks are made for `batch` from now on.

        Positions are those of the whole sequence.
        """
        self._positions = batch.position_ids
        return MicroBatch(
            self.part(batch.input_ids),
            self.part(batch.position_ids),
            self.part(batch.labels),
            batch.completions and replace(batch.completions, segment_ids=self.part(batch.completions.segment_ids)),
            None if batch.values is None else self.part(batch.values),
        )

    def part(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of whole sequences, [batch, T, …] → [batch, T / size, …]."""
        if self.ring:
            whole = _in_order(whole, zigzag(self.ring.size))
        return whole.view(len(whole), self.size, -1, *whole.shape[2:])[:, self.rank].contiguous()

    def receive(self, position_ids: Tensor) -> None:
        """Sets the positions, in place of `slice`, from slices [batch, T / size] of interleaved micro-batches."""
        self._positions = self._whole(position_ids)
        self._interleaved = True

    def _whole(self, part: Tensor) -> Tensor:
        """Joins the slices of all ranks, [batch, T / size, …] → [batch, T, …]; differentiable."""
        joined = self._all_to_all([part] * self.size, join=1)
        if self.ring is None:
            return joined
        order = zigzag(self.ring.size)
        return _in_order(joined, [order.index(block) for block in range(len(order))])

    @contextmanager
    def _choose_keys(self, attention: Any) -> Iterator[None]:
        """A context in which an indexer chooses among the keys of the whole sequence, for the tokens of this slice."""
        with replaced((attention, "config", with_attention(attention.config, INDEXED))):
            if attention.indexer is None:  # the layer uses the choice of an earlier one
                yield
                return
            hook = attention.indexer.register_forward_pre_hook(self._read_whole_keys, with_kwargs=True)
            try:
                yield
            finally:
                hook.remove()

    def _read_whole_keys(self, indexer: nn.Module, args: Any, named: Any) -> tuple[Any, dict[str, Any]]:
        """Gives an indexer the rows of the mask for its tokens, and the keys of all tokens as if from a cache."""
        given = signature(indexer.forward).bind(*args, **named)
        mask: Tensor = given.arguments["attention_mask"]
        given.arguments["attention_mask"] = mask.chunk(self.size, dim=-2)[self.rank]
        given.arguments[CACHE] = _Slices(self._whole)
        return given.args, given.kwargs

    def _continue_counting(self, attention: nn.Module, args: Any, named: Any) -> tuple[Any, dict[str, Any]]:
        """Lets attention count the positions of this slice after those of the slices before it, as if in a cache."""
        given = signature(attention.forward).bind(*args, **named)
        length = next(value for value in given.arguments.values() if isinstance(value, Tensor)).shape[1]
        given.arguments[CACHE] = _Slices(self._whole, before=self.rank * length)
        return given.args, given.kwargs

    def _attend(
        self,
        inner: Function,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """query, key, value: [batch, heads, T / size, head_dim] → [batch, T / size, heads, head_dim]."""
        # If key and value heads are not divisible by the ranks, they are repeated until they are.
        copies = self._head_ranks // math.gcd(self._head_ranks, key.shape[1])
        if copies > 1:
            key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
        query, key, value = (self._exchange(states, split=1, join=2) for states in (query, key, value))
        sinks: Tensor | None = getattr(module, "sinks", None)
        own_sinks = None if sinks is None else sinks.chunk(self._head_ranks)[self.rank % self._head_ranks]
        share = _HeadShare(module, query.shape[1] // key.shape[1], own_sinks)
        if "s_aux" in kwargs:  # the sinks again, as a fused kernel takes them
            kwargs["s_aux"] = share.sinks
        if self.ring:
            return self._exchange(self.ring.attend(share, query, key, value, **kwargs), split=1, join=2), None
        chosen = kwargs.pop("indices", None)
        if chosen is not None:
            attention_mask = _without_others(attention_mask, self._whole(chosen), key.shape[2])
        positions = kwargs.get("position_ids")
        if positions is not None:  # a kernel without masks finds the documents in the positions
            # With interleaved micro-batches, a backward pass may recompute the attention of an earlier one.
            whole = self._whole(positions) if self._interleaved else self._positions
            kwargs["position_ids"] = whole.to(query.device, non_blocking=True)
        output = inner(share, query, key, value, attention_mask, **kwargs)[0]
        return self._exchange(output, split=1, join=2), None

    def _exchange(self, states: Tensor, split: int, join: int) -> Tensor:
        """Sends slice r along `split` to the r-th rank that divides heads, and joins what it receives along `join`."""
        if self._head_ranks == 1:
            return states
        return self._all_to_all(states.chunk(self._head_ranks, dim=split), join, self._heads_name)

    def _all_to_all(self, parts: Sequence[Tensor], join: int, group_name: str = "") -> Tensor:
        """Sends part r to rank r, and joins the received parts along `join` in rank order; differentiable."""
        name = group_name or self._group_name
        received = torch.ops.deepspeed.dim_zero_all_to_all(torch.stack(tuple(parts)), name)
        return torch.cat(received.unbind(), dim=join)

    def _whole_masks(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Makes a mask of the whole sequence, not of the slice."""
        length = arguments["q_length"] * self.size
        return arguments | {"q_length": length, "kv_length": length}

    def _whole_router_loss(self, original: Function, logits: tuple[Tensor, ...], *rest: Any, **named: Any) -> Any:
        """Computes the router loss, a product of two means over tokens, from the tokens of all slices."""
        return original(tuple(self._all_to_all([layer] * self.size, join=0) for layer in logits), *rest, **named)


class _Slices:
    """The slices of a sequence as a cache, for code of attention that continues one."""

    def __init__(self, whole: Callable[[Tensor], Tensor], before: int = 0) -> None:
        """before: number of tokens in the slices before this one."""
        self._whole = whole
        self._before = before

    def get_seq_length(self, layer: int) -> int:
        """Returns the number of tokens before this slice."""
        return self._before

    def update(self, key: Tensor, value: Tensor, layer: int, **others: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of this slice, which attention exchanges."""
        return key, value

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Returns an indexer's keys [batch, T, head_dim] of all slices, given those of this one."""
        return self._whole(keys)


def _in_order(rows: Tensor, blocks: Sequence[int]) -> Tensor:
    """Puts the blocks of rows [batch, T, …], equally many tokens each, in another order."""
    return rows.reshape(len(rows), len(blocks), -1, *rows.shape[2:])[:, blocks].flatten(1, 2)


def _counts_positions(module: nn.Module) -> bool:
    """Whether attention counts positions after those in its cache. A scale of Llama 4's queries depends on them."""
    return hasattr(module, "layer_idx") and "get_seq_length" in names_in_forward(module)


def _without_others(mask: Tensor, chosen: Tensor, length: int) -> Tensor:
    """Returns a mask [batch, 1, T, T], in which each token attends to chosen keys only. chosen: [batch, T, keys]."""
    others = chosen.new_ones((*chosen.shape[:2], length), dtype=torch.bool).scatter(-1, chosen.long(), False)
    others = others.unsqueeze(1)
    return mask & ~others if mask.dtype == torch.bool else mask.masked_fill(others, torch.finfo(mask.dtype).min)


class _HeadShare:
    """An attention module as its attention function sees it, with a share of its heads."""

    def __init__(self, module: nn.Module, num_key_value_groups: int, sinks: Tensor | None) -> None:
        self._module = module
        self.num_key_value_groups = num_key_value_groups
        self.sinks = sinks
        """For each head, the logit of attending to nothing (gpt-oss); None for families without sinks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
