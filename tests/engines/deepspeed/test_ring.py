"""Ring attention without processes: the parts of all ranks are what documents and windows let tokens attend to."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from llmtrain.data import Documents
from llmtrain.engines.deepspeed.ring import parts_of, zigzag
from llmtrain.models.block_attention import Combined, add, gradients

T = 48
STARTS = ((0, 3, 5, 20), (0,), (0, 12, 24, 36), (0, 1, 47))
"""Where the documents of each row begin: within a block and across several, across all, at their edges, one token."""
ROWS = len(STARTS)
RANKS = (2, 3, 4)
WINDOWS = (None, 1, 5, 13, 40, T)


def _documents() -> Documents:
    rows = [torch.arange(T) - torch.tensor([max(s for s in starts if s <= i) for i in range(T)]) for starts in STARTS]
    return Documents.of(torch.stack(rows))


def _allowed(window: int | None) -> Tensor:
    """Which token attends to which, [tokens, tokens], of all rows one after the other."""
    places = torch.arange(ROWS * T)
    document = torch.bucketize(places, _documents().bounds, right=True)
    behind = places[:, None] - places
    allowed = (document[:, None] == document) & (behind >= 0)
    return allowed if window is None else allowed & (behind < window)


def _held(rank: int, ranks: int) -> Tensor:
    """The tokens that a rank of a ring holds, [rows · T / ranks]."""
    blocks = torch.arange(ROWS * T).view(ROWS, 2 * ranks, -1)
    return blocks[:, zigzag(ranks)[2 * rank : 2 * rank + 2]].flatten()


@pytest.mark.parametrize(("ranks", "window"), list(itertools.product(RANKS, WINDOWS)))
def test_parts_are_all_pairs_that_documents_and_windows_allow_once(ranks, window):
    seen = torch.zeros(ROWS * T, ROWS * T, dtype=torch.int64)
    for rank in range(ranks):
        for hop, parts in enumerate(parts_of(_documents(), T, rank, ranks, window)):
            tokens, theirs = _held(rank, ranks), _held((rank - hop) % ranks, ranks)
            for part in parts:
                for queries, keys in zip(part.queries, part.keys, strict=True):
                    of_queries, of_keys = tokens[slice(queries[0], sum(queries))], theirs[slice(keys[0], sum(keys))]
                    behind = torch.arange(queries[1])[:, None] + keys[1] - queries[1] - torch.arange(keys[1])
                    sees = (behind >= 0) | (not part.is_causal)
                    sees &= (behind <= part.left) | (part.left < 0)
                    assert sees.any(1).all()  # the log-sum-exp of nothing has no gradient
                    seen[of_queries[:, None], of_keys] += sees
    assert torch.equal(seen, _allowed(window).long())


@pytest.mark.parametrize(("ranks", "window"), [(2, None), (3, 5), (4, 13)])
def test_combined_parts_equal_attention_and_its_gradients(ranks, window):
    """With fewer heads of keys, and values that are wider."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 8), (2, 8), (2, 12))
    query, key, value = (torch.randn(ROWS * T, *shape, generator=generator).requires_grad_() for shape in shapes)
    gradient = torch.randn(ROWS * T, 6, 12, generator=generator)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(3, 1)).mul(0.3)
    weights = scores.masked_fill(~_allowed(window), -math.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(3, 1))
    expected.backward(gradient)
    found = [torch.zeros_like(states) for states in (query, key, value)]
    for rank in range(ranks):
        own = _held(rank, ranks)
        hops = [
            (part, _held((rank - hop) % ranks, ranks))
            for hop, parts in enumerate(parts_of(_documents(), T, rank, ranks, window))
            for part in parts
        ]
        combined = Combined(query[own], 12)
        with torch.no_grad():
            for part, theirs in hops:
                combined.add(part, query[own], key[theirs], value[theirs], 0.3)
            torch.testing.assert_close(combined.output, expected[own])
            for part, theirs in hops:
                states = query[own], key[theirs], value[theirs]
                sums = combined.output, combined.log_sums
                each = gradients(part, gradient[own], states, *sums, 0.3)
                for total, tokens, spans, of_part in zip(
                    found, (own, theirs, theirs), (part.query_spans, *2 * [part.key_spans]), each, strict=True
                ):
                    of_rank = torch.zeros_like(total[tokens])
                    add(of_rank, spans, of_part)
                    total[tokens] += of_rank
    for states, total in zip((query, key, value), found, strict=True):
        torch.testing.assert_close(total, states.grad)


def test_ranks_have_equally_many_pairs():
    """Of a row without boundaries."""
    whole = Documents.of(torch.arange(T)[None])
    for ranks in RANKS:
        work = [
            sum(
                length * keys[1] / (2 if part.is_causal else 1)
                for parts in parts_of(whole, T, rank, ranks)
                for part in parts
                for (_, length), keys in zip(part.queries, part.keys, strict=True)
            )
            for rank in range(ranks)
        ]
        assert len(set(work)) == 1
