"""Ring attention (arXiv 2310.01889): keys and values pass from rank to rank, and meet the queries of each.

Sequences are cut into twice as many blocks as a ring has ranks. Rank r of R holds blocks r and 2·R - 1 - r (zigzag), so
that all ranks have as many pairs of a query and an earlier key. While a rank computes, the keys and values of the next
blocks arrive. In the backward pass they go around once more, and their gradients, summed in fp32, travel with them.

Blocks of the same document attend to each other. Which tokens these are follows from the boundaries of the documents,
which are known on the host, so the kernels need no masks, and pairs of blocks without a document in common no kernels.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.data import Documents
from llmtrain.models.block_attention import Combined, Part, Span, add, gradients
from llmtrain.models.documents import Rows, active_rows
from llmtrain.models.varlen import (
    chunk_size,
    flatten_batch,
    padded_for_kernel,
    require_supported,
    sink_gradients,
    with_sinks,
)

Group = Any
"""A process group; torch's type for it is not public."""


def zigzag(ranks: int) -> list[int]:
    """Returns the blocks of a row in the order in which the ranks of a ring hold them, two each."""
    return [block for rank in range(ranks) for block in (rank, 2 * ranks - 1 - rank)]


def parts_of(documents: Documents, length: int, rank: int, ranks: int, window: int | None = None) -> list[list[Part]]:
    """Returns what a rank computes when keys and values have made 0, 1, …, ranks - 1 hops.

    Tokens are counted in the two blocks of a rank, row by row. documents: of rows of `length` tokens. window: how many
    tokens attend to each other, as in `varlen_attention`.
    """
    bounds = documents.bounds.tolist()
    rows, block = bounds[-1] // length, length // (2 * ranks)
    own = rank, 2 * ranks - 1 - rank
    hops: list[list[Part]] = [[_diagonal(bounds, length, own, rows, block, window)]]
    hops += [[] for _ in range(1, ranks)]
    for hop, parts in enumerate(hops):
        sender = (rank - hop) % ranks
        theirs = sender, 2 * ranks - 1 - sender
        for (query_half, query_block), (key_half, key_block) in itertools.product(enumerate(own), enumerate(theirs)):
            if key_block < query_block:
                parts += _crossing(bounds, length, rows, block, (query_half, key_half), query_block, key_block, window)
    return hops


def _diagonal(bounds: list[int], length: int, own: tuple[int, int], rows: int, block: int, window: int | None) -> Part:
    """Returns the attention within the blocks of a rank."""
    spans: list[Span] = []
    for row, (half, number) in itertools.product(range(rows), enumerate(own)):
        first, here = row * length + number * block, (2 * row + half) * block
        begin = first
        while begin < first + block:
            end = min(bounds[bisect_right(bounds, begin)], first + block)
            spans.append((here + begin - first, end - begin))
            begin = end
    longest = max(size for _, size in spans)
    return Part(spans, spans, -1 if window is None or window >= longest else window - 1, is_causal=True)


def _crossing(
    bounds: list[int],
    length: int,
    rows: int,
    block: int,
    halves: tuple[int, int],
    query_block: int,
    key_block: int,
    window: int | None,
) -> Iterator[Part]:
    """Yields the attention of a block to an earlier one: in each row, that of the one document which has both ends."""
    # With a window, the first query of a block and the last key of an earlier one see each other if it reaches 1.
    reach = math.inf if window is None else window - 1 - (query_block - key_block - 1) * block
    spans: dict[int, tuple[list[Span], list[Span]]] = defaultdict(lambda: ([], []))
    for row in range(rows) if reach > 0 else ():
        first_query, end_of_keys = (row * length + number * block for number in (query_block, key_block + 1))
        document = bisect_right(bounds, end_of_keys - 1)
        queries = int(min(bounds[document] - first_query, block, reach))
        keys = int(min(end_of_keys - bounds[document - 1], block, reach))
        if queries > 0:
            left = -1 if queries + keys - 1 <= reach else int(reach) - queries
            of_queries, of_keys = spans[left]
            of_queries.append(((2 * row + halves[0]) * block, queries))
            of_keys.append(((2 * row + halves[1] + 1) * block - keys, keys))
    for left, (of_queries, of_keys) in spans.items():
        yield Part(of_queries, of_keys, left, is_causal=False)


class Ring:
    """A ring of ranks that hold the blocks of sequences."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        self._turns: WeakKeyDictionary[Rows, dict[int | None, Turn]] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Returns attention to the whole sequences, [batch, tokens, heads, head_dim]; arguments as `varlen_attention`.

        query, key, value: [batch, heads, tokens, head_dim] of the blocks of this rank. Documents are those of the
        active micro-batch. Raises ValueError for unsupported kinds of attention.
        """
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        require_supported(query, key, None, dropout, causal, others)
        batch, _, tokens, width = query.shape
        chunk = chunk_size(module)
        if chunk is not None and chunk < tokens * self.size:
            raise ValueError("it attends within chunks of a row, which a ring does not compute")
        states = [flatten_batch(each) for each in (query, key, value)]
        kept = states[2].shape[-1]
        if query.is_cuda:
            states = [*padded_for_kernel(*states)]
        scale = 1 / math.sqrt(width) if scaling is None else scaling
        sinks = None if s_aux is None else s_aux.float()
        turn = self._turn(sliding_window)
        output: Tensor = _ring_operator(*states, sinks, turn.number, scale)[0]
        return output.view(batch, tokens, *output.shape[1:])[..., :kept]

    def _turn(self, window: int | None) -> Turn:
        rows = active_rows()
        if rows is None:
            raise ValueError("the documents of its sequences are unknown")
        turns = self._turns.setdefault(rows, {})
        if window not in turns:
            parts = parts_of(rows.documents, rows.shape[1], self.rank, self.size, window)
            turns[window] = Turn(self, parts, next(_numbers))
            _turns[turns[window].number] = turns[window]
        return turns[window]

    def pass_on(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Sends tensors to the next rank. Returns a function that waits for those of the rank before, and returns them.

        All ranks send tensors of the same shapes.
        """
        following, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, self.size - 1)
        )
        received = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors)
        messages = [dist.P2POp(dist.isend, tensor.contiguous(), following, self.group) for tensor in tensors]
        messages += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in received]
        works = dist.batch_isend_irecv(messages)

        def wait() -> tuple[Tensor, ...]:
            for work in works:
                work.wait()
            messages.clear()  # what is sent lives until it has been
            return received

        return wait


@dataclass
class Turn:
    """What a rank computes while keys and values go around, for a micro-batch and a sliding window."""

    ring: Ring
    hops: list[list[Part]]
    number: int
    """The number by which the operator finds it."""


_numbers = itertools.count()
_turns: WeakValueDictionary[int, Turn] = WeakValueDictionary()
"""Those of living micro-batches. Operators take no objects."""


@torch.library.custom_op("llmtrain::ring_attention", mutates_args=())
def _ring_operator(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, turn: int, scale: float
) -> tuple[Tensor, Tensor]:
    """An operator, so that selective recomputation can keep its results. Returns the output and its log-sum-exp.

    query, key, value: [tokens, heads, width]; sinks: [heads]; turn: the number of one. Returns [tokens, heads, width]
    and [heads, tokens] in fp32, sinks included.
    """
    ring, hops = _turns[turn].ring, _turns[turn].hops
    combined = Combined(query, value.shape[-1])
    for hop, parts in enumerate(hops):
        wait = ring.pass_on(key, value) if hop + 1 < ring.size else None
        for part in parts:
            combined.add(part, query, key, value, scale)
        if wait:
            key, value = wait()
    output, log_sums = with_sinks(combined.output, combined.log_sums, sinks)
    return output.to(query.dtype), log_sums


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, number, ctx.scale = inputs
    ctx.turn = _turns[number]
    ctx.save_for_backward(*tensors, *output)


def _ring_gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, output, log_sums = ctx.saved_tensors
    ring, hops = ctx.turn.ring, ctx.turn.hops
    gradient = gradient.contiguous()
    of_query = torch.zeros_like(query, dtype=torch.float32)
    theirs, wait_for_gradients = (key, value), None
    for hop, parts in enumerate(hops):
        wait = ring.pass_on(*theirs) if hop + 1 < ring.size else None
        of_theirs = tuple(torch.zeros_like(states, dtype=torch.float32) for states in theirs)
        for part in parts:
            found = gradients(part, gradient, (query, *theirs), output, log_sums, ctx.scale)
            add(of_query, part.query_spans, found[0])
            for total, each in zip(of_theirs, found[1:], strict=True):
                add(total, part.key_spans, each)
        if wait_for_gradients:  # what the ranks before have added to them
            for total, each in zip(of_theirs, wait_for_gradients(), strict=True):
                total.add_(each)
        wait_for_gradients = ring.pass_on(*of_theirs)
        if wait:
            theirs = wait()
    assert wait_for_gradients is not None
    of_key, of_value = wait_for_gradients()
    of_sinks = None if sinks is None else sink_gradients(gradient, output, log_sums, sinks)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None, None


_ring_operator.register_autograd(_ring_gradients, setup_context=_save_for_backward)
