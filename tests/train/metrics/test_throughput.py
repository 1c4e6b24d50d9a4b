"""Tokens per second and MFU, from the datasheet's peak of the precision, without pauses."""

from contextlib import suppress

import pytest

from llmtrain.recipe.cluster import Cluster
from llmtrain.train.metrics import Meter, Window
from llmtrain.train.metrics.throughput import rates


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_rates_are_computed_from_the_datasheet(plan):
    cluster = Cluster(nodes=2, devices_per_node=8, device="h100")
    recipe = plan.recipe.with_(**{"parallel.precision": "autocast_bf16"})
    plan = plan.model_copy(update={"cluster": cluster, "recipe": recipe, "flops_per_token": 6e9})
    found = rates(plan, Window(steps=4, seconds=2.0, tokens=3_200_000, data_wait_s=0.0))
    assert found.tokens_per_second == 1_600_000
    assert found.tokens_per_second_per_device == 100_000
    assert found.tflops_per_device == pytest.approx(600)
    assert found.mfu == pytest.approx(600 / 989)


def test_the_peak_is_that_of_the_precision(plan):
    plan = plan.model_copy(update={"cluster": Cluster(device="h100"), "flops_per_token": 6.7e9})
    assert rates(plan, Window(1, 1.0, 1000, 0.0)).mfu == pytest.approx(0.1)  # fp32: 67 TFLOP/s


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_device_without_a_published_peak_has_no_mfu(plan, device):
    plan = plan.model_copy(update={"cluster": Cluster(device=device)})
    assert rates(plan, Window(1, 1.0, 1000, 0.0)).mfu is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "autocast_bf16", "autocast_fp16"])
def test_every_precision_has_a_peak(plan, precision):
    recipe = plan.recipe.with_(**{"parallel.precision": precision})
    plan = plan.model_copy(update={"cluster": Cluster(device="h100"), "recipe": recipe})
    assert rates(plan, Window(1, 1.0, 1000, 0.0)).mfu is not None


def test_a_window_contains_only_its_steps(clock):
    meter = Meter(clock)
    for _ in range(4):
        clock.now += 2.0
        meter.add(tokens=10, data_wait_s=0.5)
    assert meter.close() == Window(steps=4, seconds=8.0, tokens=40, data_wait_s=2.0)
    with meter.paused():
        clock.now += 60.0  # an evaluation
    clock.now += 3.0
    meter.add(tokens=10, data_wait_s=0.0)
    assert meter.close() == Window(steps=1, seconds=3.0, tokens=10, data_wait_s=0.0)


def test_a_pause_ends_if_an_exception_is_raised(clock):
    meter = Meter(clock)
    with suppress(KeyError), meter.paused():
        clock.now += 60.0
        raise KeyError
    clock.now += 1.0
    meter.add(10, 0.0)
    assert meter.close().seconds == 1.0


def test_an_empty_window_raises(clock):
    with pytest.raises(ValueError, match="without a step"):
        Meter(clock).close()
