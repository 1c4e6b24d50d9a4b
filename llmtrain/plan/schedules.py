"""The schedules of a pipeline: on which rank each stage lies, and in which order a rank runs its passes.

- `1f1b`: a stage for each rank; forward and backward passes alternate (PipeDream-Flush, arXiv 2006.09503).
- `interleaved`: rank r of p holds the stages r, r + p, r + 2p, … (Megatron-LM, arXiv 2104.04473, section 2.2).
- `zero_bubble`: the stages run back and forth over the ranks, as a V or a W, and the gradients of the weights are
  computed when a rank would otherwise wait (ZB-V, arXiv 2405.15362; zero bubble, arXiv 2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Literal, NamedTuple, get_args

from llmtrain.recipe import ParallelConfig

PassKind = Literal["forward", "backward", "weights"]
KINDS: tuple[PassKind, ...] = get_args(PassKind)


class Pass(NamedTuple):
    """One pass of a stage over a micro-batch; `weights` computes the gradients of matrices that `backward` left out."""

    kind: PassKind
    stage: int
    micro_batch: int


class Slot(NamedTuple):
    """A pass, and when it runs."""

    rank: int
    action: Pass
    start: float
    end: float


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule of `ranks` × `chunks` stages."""

    name: str
    ranks: int
    chunks: int
    """Stages of a rank."""

    @classmethod
    def of(cls, parallel: ParallelConfig) -> PipelineSchedule:
        """Returns the schedule of a recipe."""
        return cls(parallel.pipeline_schedule, parallel.pipeline, parallel.pipeline_chunks)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed in passes of their own."""
        return self.name == "zero_bubble"

    def rank_of(self, stage: int) -> int:
        """Returns the rank, among those of the pipe, that holds a stage."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.splits_backward and turn % 2 else place

    @lru_cache(maxsize=4096)  # noqa: B019  (of instances, there are few)
    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a rank in ascending order."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def needs(self, action: Pass) -> Pass | None:
        """Returns the pass that a pass waits for; None for forward passes of the first stage."""
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "weights":
            return Pass("backward", stage, micro_batch)
        if action.kind == "forward":
            return Pass("forward", stage - 1, micro_batch) if stage else None
        if stage == self.stages - 1:
            return Pass("forward", stage, micro_batch)
        return Pass("backward", stage + 1, micro_batch)

    def receiver(self, action: Pass) -> int | None:
        """Returns the rank that waits for the result of a pass, which may be its own; None if nothing is passed on."""
        # Nothing waits for gradients of weights: their number of a stage is out of range.
        stage = action.stage + {"forward": 1, "backward": -1, "weights": self.stages}[action.kind]
        return self.rank_of(stage) if 0 <= stage < self.stages else None

    @lru_cache(maxsize=256)  # noqa: B019
    def passes(self, micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
        """Returns the passes of each rank in order."""
        if self.name == "zero_bubble":
            return _zero_bubble(self, micro_batches, *_best_order(self, min(micro_batches, self._enough)))
        return tuple(tuple(_alternating(self, rank, micro_batches)) for rank in range(self.ranks))

    @lru_cache(maxsize=16)  # noqa: B019
    def messages(self, micro_batches: int) -> tuple[Pass, ...]:
        """Returns the passes whose results go to another rank, in the order in which they end.

        Whatever a pass waits for ends before it. If each rank sends and receives its messages in this order, no two
        ranks wait for each other, however long the passes take.
        """
        slots = sorted(self.slots(micro_batches, lengths(self)), key=lambda slot: slot.end)
        return tuple(slot.action for slot in slots if self.receiver(slot.action) not in (None, slot.rank))

    def slots(self, micro_batches: int, lengths: Mapping[PassKind, float], message: float = 0.0) -> Iterator[Slot]:
        """Yields every pass with its times. A rank starts a pass when it is free and the input has arrived.

        lengths: durations of the passes of a stage, in any unit. message: duration of a message between ranks.
        """
        return _slots(self, self.passes(micro_batches), lengths, message)

    @lru_cache(maxsize=4096)  # noqa: B019
    def bubble(self, micro_batches: int) -> float:
        """Returns the share of a step in which a rank waits for the others, if all stages take equally long."""
        if not self.splits_backward:
            # arXiv 2104.04473, section 2.2: as the pipe fills and drains, a rank waits one stage's time for each other.
            return (self.ranks - 1) / (self.chunks * micro_batches + self.ranks - 1)
        shown = min(micro_batches, self._enough)
        end = max(slot.end for slot in self.slots(shown, lengths(self)))
        idle = end - 3.0 * self.chunks * shown
        return idle / (idle + 3.0 * self.chunks * micro_batches)

    @property
    def _enough(self) -> int:
        """A number of micro-batches beyond which each further one adds little but its own passes."""
        return 4 * self.ranks

    @property
    def least_idle(self) -> float:
        """Lower bound for the waits of a step; the unit is the time in which a rank computes one micro-batch.

        Exact for schedules with whole backward passes. If they are split, the rank of stage `ranks` − 1 first waits for
        `ranks` − 1 forward passes, each a third of a stage's work.
        """
        return (self.ranks - 1) / ((3 if self.splits_backward else 1) * self.chunks)

    def message_waits(self, micro_batches: int, message: float, forward: float) -> float:
        """Returns by how much messages between ranks lengthen a step.

        message: seconds of a message; forward: seconds of a stage's forward pass.

        An interleaved rank has another pass to run while a message is on its way, unless the pipe fills or drains, or
        the message takes longer than that pass. In the other schedules, a rank needs at once what it receives.
        """
        waited = message * _messages_waited_for(self, micro_batches)
        if self.name == "interleaved":
            waited += self.chunks * micro_batches * max(0.0, message - forward)
        return waited

    @lru_cache(maxsize=4096)  # noqa: B019
    def in_flight(self, rank: int, micro_batches: int) -> int:
        """Returns the largest number of forward passes of a rank whose activations are held at once."""
        if not self.splits_backward:
            return min(self.forwards_ahead(rank), self.chunks * micro_batches)
        passes = self.passes(min(micro_batches, self._enough))[rank]
        return max(accumulate((action.kind == "forward") - (action.kind == "weights") for action in passes))

    def forwards_ahead(self, rank: int) -> int:
        """Returns the number of warm-up forward passes of a rank: those before its first backward pass.

        A step with fewer micro-batches has fewer. The zero bubble schedule has another number.
        """
        ahead = self.ranks - rank
        return ahead if self.chunks == 1 else 2 * ahead - 1 + (self.chunks - 1) * self.ranks


def _slots(
    schedule: PipelineSchedule,
    orders: Iterable[Iterable[Pass]],
    lengths: Mapping[PassKind, float],
    message: float = 0.0,
) -> Iterator[Slot]:
    """Yields the passes that each rank runs in an order, with their times; see `PipelineSchedule.slots`."""
    rank_of = [schedule.rank_of(stage) for stage in range(schedule.stages)]
    ends: dict[Pass, float] = {}
    remaining = [((action, schedule.needs(action)) for action in passes) for passes in orders]
    waiting = [next(passes, None) for passes in remaining]
    free = [0.0] * schedule.ranks
    while any(waiting):
        stuck = True
        for rank, passes in enumerate(remaining):
            while (pair := waiting[rank]) and ((needed := pair[1]) is None or needed in ends):
                action, arrived = pair[0], 0.0
                if needed is not None:
                    arrived = ends[needed] + message * (rank_of[needed.stage] != rank)
                start = max(free[rank], arrived)
                ends[action] = free[rank] = start + lengths[action.kind]
                yield Slot(rank, action, start, free[rank])
                waiting[rank], stuck = next(passes, None), False
        assert not stuck, f"{schedule} waits for itself"


def _idle(schedule: PipelineSchedule, orders: Sequence[Sequence[Pass]], pace: Mapping[PassKind, float]) -> float:
    """Returns the share of a step in which a rank waits if it runs its passes in an order."""
    end = max(slot.end for slot in _slots(schedule, orders, pace))
    return 1 - sum(pace[action.kind] for action in orders[0]) / end


@lru_cache(maxsize=256)
def _best_order(schedule: PipelineSchedule, micro_batches: int) -> tuple[int, int]:
    """Returns the index of one of `PACES`, and the reserve, with which a zero bubble schedule is the shortest.

    Some orders are longer than 1F1B unless all passes take equally long. Each is therefore timed with `UNITS` and with
    `UNEVEN`, and the sum of its idle shares counts.
    """
    return min(
        product(range(len(PACES)), (0, 1)),
        key=lambda options: sum(
            _idle(schedule, _zero_bubble(schedule, micro_batches, *options), pace) for pace in (UNITS, UNEVEN)
        ),
    )


@lru_cache(maxsize=64)
def _zero_bubble(
    schedule: PipelineSchedule, micro_batches: int, pace_index: int, reserve: int
) -> tuple[tuple[Pass, ...], ...]:
    """Returns the passes of each rank. pace_index: of one of `PACES`."""
    return _ZeroBubble(schedule, micro_batches, PACES[pace_index], reserve).passes


def _alternating(schedule: PipelineSchedule, rank: int, micro_batches: int) -> Iterator[Pass]:
    """Yields the passes of a rank: forward passes until the pipeline is full, then both kinds in turn.

    With chunks, `ranks` micro-batches at a time go through one stage after the other (arXiv 2104.04473, figure 4).
    """
    stages = schedule.stages_of(rank)
    numbers = range(micro_batches)
    groups = [numbers[first : first + schedule.ranks] for first in range(0, micro_batches, schedule.ranks)]
    forward = [Pass("forward", stage, number) for group in groups for stage in stages for number in group]
    backward = [Pass("backward", stage, number) for group in groups for stage in reversed(stages) for number in group]
    ahead = min(schedule.forwards_ahead(rank), len(forward))
    yield from forward[:ahead]
    for number, action in enumerate(backward):
        yield action
        yield from forward[ahead + number : ahead + number + 1]


class _ZeroBubble:
    """A simulation in which a rank that is free runs the most urgent pass.

    The order of urgency is: backward passes, forward passes (both of later stages first), gradients of weights.
    A rank holds the activations of at most `stages` passes: as much memory as the first rank of 1F1B.
    """

    def __init__(
        self, schedule: PipelineSchedule, micro_batches: int, pace: Mapping[PassKind, float], reserve: int
    ) -> None:
        """pace: integer lengths of passes; reserve: number of passes whose
        memory is kept free for each later stage of the rank."""
        self.schedule, self.micro_batches, self.pace, self.reserve = schedule, micro_batches, pace, reserve
        ranks = range(schedule.ranks)
        self._stages = [schedule.stages_of(rank)[::-1] for rank in ranks]
        self._now = 0.0
        # For each kind and stage, the end times of the passes that have begun, by micro-batch.
        self._ends: dict[PassKind, list[list[float]]] = {kind: [[] for _ in range(schedule.stages)] for kind in KINDS}
        self._delayed: list[deque[Pass]] = [deque() for _ in ranks]
        self._held = [0] * schedule.ranks
        orders: list[list[Pass]] = [[] for _ in ranks]
        left, free = len(KINDS) * schedule.stages * micro_batches, [0.0 for _ in ranks]
        while left:
            # All ranks choose before one begins, so that none sees what another does at the same time.
            chosen = [(rank, action) for rank in ranks if free[rank] <= self._now and (action := self._choose(rank))]
            for rank, action in chosen:
                free[rank] = self._run(rank, action)
                orders[rank].append(action)
            left -= len(chosen)
            future = [time for time in free if time > self._now]
            assert future, f"{schedule} waits for itself"
            self._now = min(future)
        self.passes = tuple(tuple(order) for order in orders)

    def _choose(self, rank: int) -> Pass | None:
        for stage in self._stages[rank]:
            backward = Pass("backward", stage, len(self._ends["backward"][stage]))
            if self._is_ready(backward):
                return backward
        for later_stages, stage in enumerate(self._stages[rank]):
            if self._held[rank] + later_stages * self.reserve >= self.schedule.stages:
                break
            forward = Pass("forward", stage, len(self._ends["forward"][stage]))
            if forward.micro_batch < self.micro_batches and self._is_ready(forward):
                return forward
        return self._delayed[rank][0] if self._delayed[rank] else None

    def _is_ready(self, action: Pass) -> bool:
        """Whether the pass that a pass waits for has ended."""
        needed = self.schedule.needs(action)
        if needed is None:
            return True
        ends = self._ends[needed.kind][needed.stage]
        return needed.micro_batch < len(ends) and ends[needed.micro_batch] <= self._now

    def _run(self, rank: int, action: Pass) -> float:
        """Returns when the pass ends."""
        end = self._now + self.pace[action.kind]
        self._ends[action.kind][action.stage].append(end)
        if action.kind == "forward":
            self._held[rank] += 1
        elif action.kind == "backward":
            self._delayed[rank].append(Pass("weights", action.stage, action.micro_batch))
        else:
            self._delayed[rank].popleft()
            self._held[rank] -= 1
        return end


UNITS: Mapping[PassKind, float] = {"forward": 1.0, "backward": 1.0, "weights": 1.0}
"""Lengths of the passes of a stage: each has as many products as the others."""
UNEVEN: Mapping[PassKind, float] = {"forward": 5.0, "backward": 6.0, "weights": 4.0}
"""Lengths that include attention and norms, which take longer backward and have no gradients of weights."""
PACES: tuple[Mapping[PassKind, float], ...] = (UNITS, {"forward": 5.0, "backward": 6.0, "weights": 5.0}, UNEVEN)
"""Lengths with which orders of the zero bubble schedule are tried."""


def lengths(schedule: PipelineSchedule) -> Mapping[PassKind, float]:
    """Returns the lengths of passes in units of a forward pass; a whole backward pass has both kinds of products."""
    return UNITS if schedule.splits_backward else {**UNITS, "backward": 2.0}


@lru_cache(maxsize=4096)
def _messages_waited_for(schedule: PipelineSchedule, micro_batches: int) -> float:
    """Returns the number of messages on the longest path through a step, if they are shorter than passes."""
    ranks = schedule.ranks
    if ranks == 1:
        return 0.0
    if schedule.name == "interleaved":
        return 2.0 * (schedule.stages - 1)
    if schedule.name == "1f1b":
        return 2.0 * (micro_batches - micro_batches // ranks + ranks - 2)
    shown, message = min(micro_batches, schedule._enough), 0.125

    def waits(count: int) -> float:
        with_messages, without = (
            max(slot.end for slot in schedule.slots(count, UNITS, each)) for each in (message, 0.0)
        )
        return (with_messages - without) / message

    if micro_batches == shown:
        return waits(shown)
    return waits(shown) + (waits(shown + ranks) - waits(shown)) * (micro_batches - shown) / ranks
