"""Attention of blocks of queries to blocks of keys, in parts that are combined exactly by their log-sum-exp.

A part is a call of a kernel. A query's softmax over all of its keys is the mean of its softmaxes over some of them,
weighted by their sums of exponentials, and with the final output and log-sum-exp the gradients of each part are exact
(FlashAttention-2, arXiv 2307.08691). GPUs run torch's kernel, CPUs torch's own operations in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from llmtrain.models.varlen import varlen_kernel
from llmtrain.overrides.torch import varlen_backward

Span = tuple[int, int]
"""First token and number of tokens."""


@dataclass
class Part:
    """Attention of spans of queries, each to the span of keys at the same place."""

    queries: list[Span]
    """They do not overlap, and are in order."""
    keys: list[Span]
    left: int
    """How far a query sees to the left of the key that is as far from the end of its span as the query is; -1: to all
    keys. If queries and keys are the same tokens, this is the size of a sliding window less 1."""
    is_causal: bool
    """Whether it sees no keys to the right of that key."""

    @cached_property
    def query_spans(self) -> list[Span]:
        """The queries, with adjacent spans joined."""
        return _joined(self.queries)

    @cached_property
    def key_spans(self) -> list[Span]:
        """The keys, with adjacent spans joined."""
        return _joined(self.keys)

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns where the spans of queries and of keys end, int32 [spans + 1] each; copied once to the device."""
        if self._bounds is None or self._bounds[0].device != device:
            ends = ([0, *accumulate(length for _, length in spans)] for spans in (self.queries, self.keys))
            queries, keys = (torch.tensor(each, dtype=torch.int32).to(device, non_blocking=True) for each in ends)
            self._bounds = queries, keys
        return self._bounds

    _bounds: tuple[Tensor, Tensor] | None = None


def _joined(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for first, length in spans:
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((first, length))
    return joined


def take(states: Tensor, spans: Sequence[Span]) -> Tensor:
    """Returns the tokens of spans, one after the other; a view if there is one span. states: [tokens, …]."""
    return torch.cat([states.narrow(0, *span) for span in spans]) if len(spans) > 1 else states.narrow(0, *spans[0])


def add(total: Tensor, spans: Sequence[Span], part: Tensor) -> None:
    """Adds [tokens of the spans, …] to these tokens of a sum."""
    for (first, length), values in zip(spans, torch.split(part, [length for _, length in spans]), strict=True):
        total.narrow(0, first, length).add_(values)


class Combined:
    """The attention that parts have contributed so far, in fp32."""

    def __init__(self, query: Tensor, value_width: int) -> None:
        """query: [tokens, heads, width]."""
        tokens, heads, _ = query.shape
        self.output = query.new_zeros(tokens, heads, value_width, dtype=torch.float32)
        """[tokens, heads, value width]."""
        self.log_sums = query.new_full((heads, tokens), -math.inf, dtype=torch.float32)
        """[heads, tokens]."""

    def add(self, part: Part, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """Adds a part. query, key, value: [tokens, heads, width] of all blocks, keys and values of fewer heads."""
        states = take(query, part.query_spans), take(key, part.key_spans), take(value, part.key_spans)
        output, log_sums = _attention(part, *states, scale)
        lengths = [length for _, length in part.query_spans]
        each = zip(part.query_spans, torch.split(output, lengths), torch.split(log_sums, lengths, dim=1), strict=True)
        for (first, length), added, added_sums in each:
            sums, total = self.log_sums.narrow(1, first, length), self.output.narrow(0, first, length)
            whole = torch.logaddexp(sums, added_sums)
            total.mul_(_weights(sums, whole)).add_(added * _weights(added_sums, whole))
            sums.copy_(whole)


def _weights(sums: Tensor, whole: Tensor) -> Tensor:
    """Returns the weights of a part's values, [tokens, heads, 1], from the log-sum-exp of it and of the whole."""
    return (sums - whole).exp().T[..., None]


def _attention(part: Part, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention [tokens, heads, value width], and its log-sum-exp [heads, tokens] in fp32."""
    if query.is_cuda:
        longest = tuple(max(length for _, length in spans) for spans in (part.queries, part.keys))
        window = part.left, 0 if part.is_causal else -1
        return varlen_kernel(query, key, value, part.bounds(query.device), (longest[0], longest[1]), scale, window)
    outputs, sums = [], []
    for number, (queries, keys, values) in enumerate(_spans(part, query, key, value)):
        scores = _scores(part, number, queries, keys, scale)
        log_sums = scores.logsumexp(-1)
        outputs.append(_by_token((scores - log_sums[..., None]).exp() @ values))
        sums.append(log_sums.flatten(0, 1))
    return torch.cat(outputs), torch.cat(sums, dim=1)


def gradients(
    part: Part,
    gradient: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    log_sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of a part's queries, keys and values, [tokens of its spans, heads, width] each.

    gradient: that of the output. states, output, log_sums: of all blocks; the last two with what all parts contribute.
    """
    queries, keys = part.query_spans, part.key_spans
    states = take(states[0], queries), take(states[1], keys), take(states[2], keys)
    gradient, output, log_sums = take(gradient, queries), take(output, queries), take(log_sums.T, queries).T
    if gradient.is_cuda:
        longest = (max(length for _, length in part.queries), max(length for _, length in part.keys))
        window = part.left, 0 if part.is_causal else -1
        bounds = part.bounds(gradient.device)
        return varlen_backward(gradient, states, output, log_sums.contiguous(), bounds, longest, scale, window)
    of_queries, of_keys, of_values = [], [], []
    offset = 0
    for number, (query, key, value) in enumerate(_spans(part, *states)):
        here = slice(offset, offset := offset + part.queries[number][1])
        sums = log_sums[:, here].reshape(*query.shape[:2], -1)
        weights = (_scores(part, number, query, key, scale) - sums[..., None]).exp()
        given, computed = (_by_head(each[here], len(key)) for each in (gradient, output))
        of_scores = weights * (given @ value.mT - (given * computed).sum(-1, keepdim=True)) * scale
        of_queries.append(_by_token(of_scores @ key))
        of_keys.append(_by_token((of_scores.mT @ query).sum(1, keepdim=True)))
        of_values.append(_by_token((weights.mT @ given).sum(1, keepdim=True)))
    return torch.cat(of_queries), torch.cat(of_keys), torch.cat(of_values)


def _spans(part: Part, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, ...]]:
    """Returns the states of each pair of spans by heads, see `_by_head`, in fp32."""
    of_queries, of_keys = ([length for _, length in spans] for spans in (part.queries, part.keys))
    each = zip(torch.split(query, of_queries), torch.split(key, of_keys), torch.split(value, of_keys), strict=True)
    return [tuple(_by_head(states, key.shape[1]) for states in spans) for spans in each]


def _by_head(states: Tensor, key_heads: int) -> Tensor:
    """[tokens, heads, width] → [key heads, heads that share a key, tokens, width]."""
    return states.float().reshape(len(states), key_heads, -1, states.shape[-1]).permute(1, 2, 0, 3)


def _by_token(states: Tensor) -> Tensor:
    """[key heads, heads that share a key, tokens, width] → [tokens, heads, width]."""
    return states.permute(2, 0, 1, 3).flatten(1, 2)


def _scores(part: Part, number: int, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Returns the scores of a pair of spans, [key heads, heads that share a key, queries, keys]."""
    scores = query @ key.mT * scale
    if part.left < 0 and not part.is_causal:
        return scores
    (_, queries), (_, keys) = part.queries[number], part.keys[number]
    behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    is_seen = torch.ones_like(behind, dtype=torch.bool)
    if part.left >= 0:
        is_seen &= behind <= part.left
    if part.is_causal:
        is_seen &= behind >= 0
    return scores.masked_fill(~is_seen.to(scores.device), -math.inf)
