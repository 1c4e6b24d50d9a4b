"""Schedules of pipelines: every pass runs once and after its inputs, and the time for which devices wait."""

from __future__ import annotations

import itertools

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from llmtrain.plan.schedules import KINDS, Pass, PipelineSchedule, lengths

SIZES = [(2, 1), (2, 8), (3, 6), (4, 2), (4, 16), (5, 7)]


def drawn() -> list[tuple[PipelineSchedule, int]]:
    found = [(PipelineSchedule("1f1b", ranks, 1), number) for ranks, number in SIZES]
    for ranks, chunks, number in itertools.product((2, 3, 4), (2, 3, 4), (1, 2, 3, 4, 6, 8, 12)):
        if number % ranks == 0:
            found.append((PipelineSchedule("interleaved", ranks, chunks), number))
        if chunks % 2 == 0:
            found.append((PipelineSchedule("zero_bubble", ranks, chunks), number))
    return found


@pytest.mark.parametrize(("schedule", "micro_batches"), drawn(), ids=str)
def test_every_pass_runs_once_on_its_rank_and_after_what_it_needs(schedule, micro_batches):
    orders = schedule.passes(micro_batches)
    kinds = KINDS if schedule.splits_backward else KINDS[:2]
    expected = {
        Pass(kind, stage, one) for kind in kinds for stage in range(schedule.stages) for one in range(micro_batches)
    }
    assert sum(map(len, orders)) == len(expected)
    assert set(itertools.chain(*orders)) == expected
    for rank, order in enumerate(orders):
        assert {one.stage for one in order} == {*schedule.stages_of(rank)}
    ends = {slot.action: slot.end for slot in schedule.slots(micro_batches, lengths(schedule))}
    for slot in schedule.slots(micro_batches, lengths(schedule)):
        needed = schedule.needs(slot.action)
        assert needed is None or ends[needed] <= slot.start


@pytest.mark.parametrize(("schedule", "micro_batches"), drawn(), ids=str)
def test_ranks_that_keep_the_order_of_messages_do_not_wait_for_each_other(schedule, micro_batches):
    """What a pass waits for, and all that is sent or received before, depends on earlier passes of its rank only."""
    messages = schedule.messages(micro_batches)
    place = {one: number for number, one in enumerate(messages)}
    assert len(place) == len(messages)
    for rank, passes in enumerate(schedule.passes(micro_batches)):
        for number, one in enumerate(passes):
            needed = schedule.needs(one)
            if needed in place and schedule.receiver(needed) == rank:
                assert all(place[needed] < place[sent] for sent in passes[number:] if sent in place)
            assert all(place[sent] < place[one] for sent in passes[:number] if sent in place and one in place)


@pytest.mark.parametrize(("schedule", "micro_batches"), drawn(), ids=str)
def test_bubble_and_passes_in_flight_are_those_of_the_order(schedule, micro_batches):
    end = max(slot.end for slot in schedule.slots(micro_batches, lengths(schedule)))
    assert schedule.bubble(micro_batches) == pytest.approx(1 - 3 * schedule.chunks * micro_batches / end)
    assert end / 3 - schedule.chunks * micro_batches >= (1 - 1e-9) * schedule.chunks * schedule.least_idle
    last = "weights" if schedule.splits_backward else "backward"
    for rank, order in enumerate(schedule.passes(micro_batches)):
        held = itertools.accumulate((one.kind == "forward") - (one.kind == last) for one in order)
        assert schedule.in_flight(rank, micro_batches) == max(held)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_1f1b_waits_as_the_formula_says(stages, micro_batches):
    schedule = PipelineSchedule("1f1b", stages, 1)
    assert schedule.bubble(micro_batches) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    end = max(slot.end for slot in schedule.slots(micro_batches, {"forward": 1.0, "backward": 2.5, "weights": 0.0}))
    assert end == pytest.approx((micro_batches + stages - 1) * 3.5)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_1f1b_has_the_order_of_deepspeed(stages, micro_batches):
    for stage, own in enumerate(PipelineSchedule("1f1b", stages, 1).passes(micro_batches)):
        theirs = [
            "forward" if isinstance(command, ForwardPass) else "backward"
            for commands in TrainSchedule(micro_batches, stages, stage).steps()
            for command in commands
            if isinstance(command, ForwardPass | BackwardPass)
        ]
        assert [one.kind for one in own] == theirs


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 4, 8), (8, 2, 64)])
def test_interleaved_stages_wait_as_the_formula_says(ranks, chunks, micro_batches):
    """arXiv 2104.04473, section 2.2.2: (p − 1) / v of a micro-batch's time."""
    bubble = PipelineSchedule("interleaved", ranks, chunks).bubble(micro_batches)
    assert bubble / (1 - bubble) == pytest.approx((ranks - 1) / (chunks * micro_batches))


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 4), (2, 2, 8), (4, 4, 8)])
def test_zero_bubble_waits_only_until_the_last_rank_has_something_to_do(ranks, chunks, micro_batches):
    """Every rank has 3 passes of each stage and micro-batch; the last one starts after a pass of each other rank."""
    bubble = PipelineSchedule("zero_bubble", ranks, chunks).bubble(micro_batches)
    assert bubble / (1 - bubble) == pytest.approx((ranks - 1) / (3 * chunks * micro_batches))


@pytest.mark.parametrize("pace", [(1.0, 1.0), (1.1, 0.9), (1.2, 0.8), (1.2, 1.0)], ids=str)
@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches"), [(2, 2, 4), (2, 2, 8), (4, 2, 8), (4, 4, 8), (4, 2, 32), (8, 2, 16)]
)
def test_zero_bubble_waits_less_than_half_as_long_as_1f1b_though_passes_differ(ranks, chunks, micro_batches, pace):
    """Attention and norms take longer backward, and have no part in the gradients of weights."""
    lengths_of_passes = dict(zip(("forward", "backward", "weights"), (1.0, *pace), strict=True))
    slots = PipelineSchedule("zero_bubble", ranks, chunks).slots(micro_batches, lengths_of_passes)
    busy, end = chunks * micro_batches * sum(lengths_of_passes.values()), max(slot.end for slot in slots)
    assert 1 - busy / end < PipelineSchedule("1f1b", ranks, 1).bubble(micro_batches) / 2


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 8), (4, 2, 16), (4, 4, 8)])
def test_zero_bubble_holds_no_more_than_the_first_rank_of_1f1b(ranks, chunks, micro_batches):
    schedule = PipelineSchedule("zero_bubble", ranks, chunks)
    assert all(schedule.in_flight(rank, micro_batches) <= ranks * chunks for rank in range(ranks))
    assert PipelineSchedule("1f1b", ranks, 1).in_flight(0, micro_batches) == ranks


@pytest.mark.parametrize(("schedule", "micro_batches"), drawn(), ids=str)
def test_messages_lengthen_a_step_by_those_on_its_longest_path(schedule, micro_batches):
    def end(message: float) -> float:
        return max(slot.end for slot in schedule.slots(micro_batches, lengths(schedule), message))

    shortest = end(0.0)
    for message in (0.1, 1.0):
        longer, waited = end(message) - shortest, schedule.message_waits(micro_batches, message, 1.0)
        if schedule.name == "interleaved":
            assert longer == pytest.approx(waited)
        elif schedule.name == "1f1b":  # exact for whole groups of micro-batches
            exact = micro_batches % schedule.ranks == 0
            assert longer == pytest.approx(waited, abs=1e-9 if exact else 2.001 * message)
        elif message == 0.1:  # other messages are not simulated
            assert longer == pytest.approx(waited, rel=0.02)


@pytest.mark.parametrize("message", [1.5, 4.0])
def test_a_message_longer_than_a_pass_is_waited_for_by_interleaved_stages_too(message):
    """The prediction is an upper bound then, since it counts the waits of all ranks."""
    schedule, m = PipelineSchedule("interleaved", 4, 2), 16
    plain, longer = (max(slot.end for slot in schedule.slots(m, lengths(schedule), sent)) for sent in (0.0, message))
    waited = schedule.message_waits(m, message, 1.0)
    assert schedule.message_waits(m, 1.0, 1.0) < longer - plain <= waited < 1.5 * (longer - plain)


def test_more_micro_batches_than_are_simulated_add_only_their_own_passes():
    for name, chunks in (("interleaved", 2), ("zero_bubble", 2), ("zero_bubble", 4)):
        schedule = PipelineSchedule(name, 4, chunks)
        end = max(slot.end for slot in schedule.slots(64, lengths(schedule)))
        assert schedule.bubble(64) == pytest.approx(1 - 3 * chunks * 64 / end)
