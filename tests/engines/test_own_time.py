"""A rank's own time excludes exactly the time for which it waits for others."""

import threading
import time

import pytest
import torch
from torch import distributed as dist
from torch import nn

from llmtrain.engines.own_time import PASSES, Forwards, Waits, _modules_of
from llmtrain.system.heartbeat import Heartbeat
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

SLOW_S = 0.5


def _steps(rank, collective):
    """Rank 1 is late for a collective; (own seconds, whether it was seen to wait)."""
    heartbeat = Heartbeat()
    waits = Waits(heartbeat)
    waits.attach()
    seen = []
    stop = threading.Event()

    def look():
        while not stop.wait(0.01):
            seen.append(heartbeat.page.waiting)

    observer = threading.Thread(target=look)
    dist.barrier()
    observer.start()
    waits.begin()
    if rank == 1:
        time.sleep(SLOW_S)
    value = torch.ones(4)
    if collective == "async":
        dist.all_reduce(value, async_op=True).wait()
    else:
        dist.all_reduce(value)
    own = waits.end(0.0)
    stop.set()
    observer.join()
    return own, any(seen), float(value[0])


@pytest.mark.parametrize("collective", ["sync", "async"])
def test_a_waiting_rank_has_less_working_time_than_a_late_one(collective):
    (quick, waited, total), (slow, _, _) = run_ranks(2, _steps, collective)
    assert slow >= SLOW_S
    assert quick < slow
    assert waited
    assert total == 2


def _in_the_background(rank):
    heartbeat = Heartbeat()
    waits = Waits(heartbeat)
    waits.attach()
    waits.begin()
    seen = []

    def save():
        if rank == 1:
            time.sleep(SLOW_S)
        dist.barrier()

    thread = threading.Thread(target=save)
    thread.start()
    while thread.is_alive():
        seen.append(heartbeat.page.waiting)
        thread.join(0.01)
    return waits.end(0.0), any(seen)


def test_waits_in_other_threads_are_not_counted():
    for own, waited in run_ranks(2, _in_the_background):
        assert own > 0
        assert not waited


def _passes(rank: int) -> list[float]:
    """Seconds that are measured of a step of engines that hold their model in different ways."""
    fields = {"parallel.zero_stage": 1, "parallel.accelerate": "ddp"}
    accelerate = {"parallel.backend": "accelerate", "parallel.zero_stage": 0}
    found = []
    for other in ({}, {"parallel.pipeline": 2}, accelerate):
        plan = plan_of(tiny_recipe(**{**fields, **other}), 2)
        engine = engine_of(plan)
        forwards = Forwards(_modules_of(engine))
        batch = plan.batch
        shape = (batch.micro_batch_size, batch.gradient_accumulation_steps)
        forwards.begin()
        engine.train_step(step_batch(0, *shape, engine.data_parallel_rank, plan.data_parallel_size))
        found.append(forwards.end(0.0))
    return found


def test_the_passes_of_every_kind_of_engine_are_measured():
    assert all(seconds > 0 for found in run_ranks(2, _passes) for seconds in found)


def test_forward_passes_with_gradients_count():
    class Slow(nn.Linear):
        def forward(self, inputs):
            time.sleep(0.05)
            return super().forward(inputs)

    module = Slow(2, 2)
    forwards = Forwards([module])
    forwards.begin()
    with torch.no_grad():
        module(torch.ones(1, 2))
    assert forwards.end(0.25) == 0.25
    module(torch.ones(1, 2))
    module(torch.ones(1, 2))
    assert forwards.end(0.25) >= 0.25 + PASSES * 0.1
    forwards.begin()
    assert forwards.end(0.0) == 0.0
