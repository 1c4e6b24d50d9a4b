"""The guard's verdicts, which all optimizers follow; in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.engines.guard import Guard, LossAndNorm, check_fused, finite_or_infinite, skip_if
from llmtrain.engines.optim import locate_shards, torch_optimizer
from llmtrain.engines.state.optimizer_shards import optimizer_shards
from llmtrain.engines.state.shards import ReplicaIndex, ShardLocation, WeightSlice
from llmtrain.recipe import GuardConfig, OptimConfig
from tests.helpers.batches import tiny_recipe

CPU = torch.device("cpu")
WINDOW = 8
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "muon", "schedule_free_adamw", "adafactor", "adamw_8bit")
OWN = ("torch.optim:NAdam", "torch.optim:AdamW")
"""Classes without `found_inf`, for whose updates the host waits for the verdict."""


class Steps:
    """A weight that is trained by numbers of a test's choice."""

    def __init__(self, name: str = "adamw", **fields) -> None:
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(5))
        optim = OptimConfig(name=name, lr=0.1)
        self.optimizer = torch_optimizer([{"params": [self.weight], "weight_decay": 0.1}], optim)
        location = ShardLocation("weight", WeightSlice.whole(self.weight.shape), ReplicaIndex())
        shards = optimizer_shards(self.optimizer)
        locate_shards(self.optimizer, self.optimizer, shards, lambda _: location, tiny_recipe(), CPU)
        self.guard = Guard(GuardConfig(**{"window_steps": WINDOW, **fields}), CPU)
        self.optimizer.register_step_pre_hook(self._judge_scaled)
        check_fused(self.optimizer)

    def _judge_scaled(self, optimizer, *_) -> None:
        """As under DeepSpeed: what torch's scaler has found is known when the optimizer begins."""
        if hasattr(optimizer, "grad_scale"):
            skip_if(self.guard.should_skip(self.measured, optimizer.found_inf), optimizer)

    def take(self, loss: float = 2.0, grad_norm: float = 1.0, gradient: float = 1.0) -> bool:
        """A step; whether it changed anything at all."""
        before = self.everything()
        self.weight.grad = torch.full_like(self.weight, gradient)
        skip_if(self.guard.should_skip(LossAndNorm(torch.tensor(loss), torch.tensor(grad_norm))), self.optimizer)
        self.optimizer.step()
        after = self.everything()
        return before.keys() != after.keys() or any(not torch.equal(before[key], after[key]) for key in before)

    def everything(self) -> dict[str, torch.Tensor]:
        """Weight, moments and count of updates."""
        state = {key: value.clone() for key, value in self.optimizer.state[self.weight].items()}
        return {"weight": self.weight.detach().clone(), **state}

    def settle(self) -> None:
        """Fills the window: losses of 1.9 and 2.1, norms of 0.9 and 1.1."""
        for index in range(WINDOW):
            sign = (-1) ** index
            assert self.take(2.0 + 0.1 * sign, 1.0 + 0.1 * sign)

    @property
    def total(self) -> int:
        return self.guard.read().total


@pytest.mark.parametrize("name", OPTIMIZERS + OWN)
@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (2.0, math.inf), (math.inf, math.nan)])
def test_an_update_with_non_finite_numbers_is_skipped(name, loss, grad_norm):
    steps = Steps(name)
    steps.take()
    assert not steps.take(loss, grad_norm, gradient=math.nan)
    assert steps.take()
    assert all(bool(torch.isfinite(value).all()) for value in steps.everything().values())
    assert steps.total == 1


@pytest.mark.parametrize("name", OPTIMIZERS + OWN)
def test_a_skipped_update_changes_nothing(name):
    """Also the first one of all, for which an optimizer has no moments yet."""
    plain, disturbed = Steps(name), Steps(name)
    disturbed.take(math.nan, gradient=math.nan)
    for index in range(3):
        plain.take(gradient=index)
        disturbed.take(gradient=index)
        disturbed.take(grad_norm=math.inf, gradient=math.inf)
    expected = plain.everything()
    assert all(torch.equal(value, expected[key]) for key, value in disturbed.everything().items())


@pytest.mark.parametrize("name", OPTIMIZERS + OWN)
def test_the_limit_of_a_spike_is_in_deviations_of_logarithms(name):
    steps = Steps(name, spike_norm_ratio=1.0)
    steps.settle()
    loss = math.sqrt(1.9 * 2.1) * (2.1 / 1.9) ** (6 / 2)  # two values: half of their distance is a deviation
    norm = math.sqrt(0.9 * 1.1) * (1.1 / 0.9) ** (6 / 2)
    assert not steps.take(loss=1.001 * loss)
    assert not steps.take(grad_norm=1.001 * norm)
    assert steps.take(loss=0.999 * loss, grad_norm=0.999 * norm)
    assert steps.take(loss=0.1, grad_norm=0.1)
    skipped = steps.guard.read().recent
    assert [one.steps_ago for one in skipped] == [3, 2]
    assert [one.why() for one in skipped] == ["loss 2.7 above 2.697", "gradient norm 1.818 above 1.817"]


def test_a_norm_below_the_ratio_is_not_a_spike():
    """Its limit: eight times the geometric mean, unless the deviations are so large that six of them are more."""
    steps = Steps()
    steps.settle()
    usual = math.sqrt(0.9 * 1.1)
    assert not steps.take(grad_norm=8.01 * usual)
    assert steps.take(grad_norm=7.99 * usual)
    heavy = Steps()
    for index in range(WINDOW):
        assert heavy.take(grad_norm=1.5 ** (-1) ** index)  # a deviation of ln 1.5, and 1.5^6 is 11.4
    assert not heavy.take(grad_norm=11.5)
    assert heavy.take(grad_norm=11.3)


def test_a_zero_is_applied_but_excluded_from_the_statistics():
    """A gradient of zeros neither skips an update nor stops the guard for a window."""
    steps = Steps()
    steps.settle()
    assert steps.take(grad_norm=0.0)
    assert not steps.take(grad_norm=9.0)


def test_nothing_is_a_spike_before_the_window_is_full():
    steps = Steps()
    for _ in range(WINDOW - 1):
        steps.take()
    assert steps.take(loss=100.0)
    assert steps.total == 0


def test_skipped_updates_do_not_change_the_statistics():
    steps = Steps()
    steps.settle()
    assert not any([steps.take(loss=50.0), steps.take(loss=math.nan), steps.take(loss=3.0)])
    assert steps.take(loss=2.6)


def test_rounding_of_constant_numbers_is_not_a_spike():
    steps = Steps()
    for _ in range(WINDOW):
        steps.take()
    assert steps.take(loss=2.01)  # a deviation of 0, which counts as 0.001: up to 2.012
    assert not steps.take(loss=2.2)


def test_sigma_0_accepts_spikes_but_no_non_finite_numbers():
    steps = Steps(spike_sigma=0.0, spike_norm_ratio=1.0)
    steps.settle()
    assert steps.take(loss=1e6)
    assert not steps.take(loss=math.nan)


def test_only_skipped_updates_of_the_window_count_as_recent():
    steps = Steps()
    steps.take(math.nan)
    steps.settle()
    assert steps.guard.read().recent == ()
    assert steps.total == 1


def test_a_step_that_a_loss_scaler_dropped_is_not_counted():
    """DeepSpeed's fp16 then never calls the optimizer; unless the loss itself is wrong, which nothing scales."""
    guard = Steps().guard
    for loss, expected in ((2.0, 0), (math.nan, 1)):
        guard.should_skip(LossAndNorm(torch.tensor(loss), torch.tensor(math.inf)), overflowed=torch.ones(()))
        assert guard.read().total == expected


def test_the_scaler_of_torch_keeps_its_own_verdict():
    steps = Steps()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # torch makes its scale with the first loss
    for gradient, norm, changed, total in (
        (4.0, 1.0, True, 0),
        (math.inf, math.inf, False, 0),
        (4.0, math.nan, False, 1),
    ):
        before = steps.everything()
        steps.weight.grad = torch.full_like(steps.weight, gradient)
        steps.measured = LossAndNorm(torch.tensor(2.0), torch.tensor(norm))
        scaler.step(steps.optimizer)
        scaler.update()
        assert torch.equal(before["weight"], steps.everything()["weight"]) != changed
        assert steps.total == total
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("window", [WINDOW, 3, 12])
def test_a_run_continues_from_the_statistics_of_a_checkpoint(window):
    first = Steps()
    first.settle()
    first.take(math.nan)
    second = Steps(window_steps=window)
    second.guard.load(first.guard.state())
    assert str(second.guard.read()) == str(first.guard.read())  # NaN is no other NaN
    second.take(loss=2.9)
    assert second.total == 1 + (window <= WINDOW)  # a longer window has to fill up


def test_saved_statistics_are_not_overwritten_later():
    steps = Steps()
    steps.settle()
    state = steps.guard.state()
    copies = {name: value.clone() for name, value in state.items()}
    steps.take(math.nan)
    assert all(torch.equal(state[name].nan_to_num(), copies[name].nan_to_num()) for name in state)


def test_the_overflow_mark_of_deepspeed_is_not_a_norm():
    assert finite_or_infinite(torch.tensor(-1.0)) == math.inf
    assert finite_or_infinite(torch.tensor(2.0)) == 2.0


def test_an_optimizer_that_cannot_skip_updates_is_refused():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with pytest.raises(TypeError, match="AdamW is not fused"):
        check_fused(optimizer)


class NoReading(TorchDispatchMode):
    """Fails where the host reads a number from the device."""

    def __torch_dispatch__(self, function, types, arguments=(), fields=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host waited for a number"
        return function(*arguments, **(fields or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_reads_nothing_in_a_step(name):
    steps = Steps(name)
    steps.settle()
    steps.weight.grad = torch.ones_like(steps.weight)
    measured = LossAndNorm(torch.tensor(math.nan), torch.tensor(1.0))
    with NoReading():
        steps.guard.should_skip(measured)
        steps.optimizer.step()
    assert steps.total == 1
