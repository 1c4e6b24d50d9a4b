"""A rank is named slow only if it is slow twice in a row, compared with ranks that do the same work."""

import pytest

from llmtrain.train.watchdog.stragglers import QUIET_S, WINDOW_S, WINDOW_STEPS, Slowest, Stragglers


class Job:
    """Ranks that take so many seconds for a step of their own work."""

    def __init__(self, ratio=1.5, stages=None, ranks=4):
        self.now = 0.0
        self.totals = dict.fromkeys(range(ranks), (0.0, 0))
        self.stragglers = Stragglers(ratio, stages or dict.fromkeys(range(ranks), 0), lambda: self.now)
        self.stragglers.update(self.totals)

    def window(self, own, steps=WINDOW_STEPS, seconds=WINDOW_S):
        self.now += seconds
        self.totals = {rank: (total + own[rank] * steps, count + steps) for rank, (total, count) in self.totals.items()}
        return self.stragglers.update(self.totals)


def test_a_rank_is_named_once_it_was_slow_twice():
    job = Job()
    assert job.window([1, 1, 2, 1]) == Slowest(2, 2.0, is_named=False)
    assert job.window([1, 1, 2, 1]) == Slowest(2, 2.0, is_named=True)
    assert job.window([1, 1, 2, 1]) == Slowest(2, 2.0, is_named=False)
    job.now += QUIET_S
    assert job.window([1, 1, 2, 1]) == Slowest(2, 2.0, is_named=True)


def test_a_rank_is_named_only_if_it_is_slow_twice_in_a_row():
    job = Job()
    for slow in ([1, 1, 2, 1], [1, 1, 1, 1], [1, 1, 2, 1], [1, 2, 1, 1], [1, 1, 1, 2]):
        assert not job.window(slow).is_named


@pytest.mark.parametrize("ratio", [1.5, 0.0])
def test_no_rank_is_named_below_the_ratio(ratio):
    job = Job(ratio)
    own = [1, 1, 1.4, 1] if ratio else [1, 1, 9, 1]
    assert not any(job.window(own).is_named for _ in range(4))


def test_the_median_of_two_ranks_is_the_faster_one():
    job = Job(ranks=2)
    job.window([1, 1.6])
    assert job.window([1, 1.6]) == Slowest(1, 1.6, is_named=True)


def test_stages_are_not_compared_with_each_other():
    job = Job(stages={0: 0, 1: 0, 2: 1, 3: 1})
    assert job.window([1, 1, 5, 5]).ratio == 1
    assert job.window([1, 1, 10, 5]) == Slowest(2, 2.0, is_named=False)


def test_a_window_has_steps_and_seconds():
    job = Job()
    assert job.window([1, 1, 2, 1], steps=WINDOW_STEPS - 1) is None
    assert job.window([1, 1, 2, 1], steps=1, seconds=0.1) == Slowest(2, 2.0, is_named=False)
    assert job.window([1, 1, 2, 1], seconds=WINDOW_S / 2) is None
