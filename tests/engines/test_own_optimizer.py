"""An optimizer of one's own in an engine: its states before the first step, its failures, torch's hooks."""

import sys

import pytest
import torch
from torch import nn

from llmtrain.engines.guard import check_fused, skip_if
from llmtrain.engines.optim import averaged_weights, torch_optimizer
from llmtrain.engines.optimizers.own import OwnOptimizer
from llmtrain.engines.state.optimizer_shards import optimizer_shards
from llmtrain.errors import CheckpointError, RecipeError
from llmtrain.plan.facts.own_optimizer import RESERVED, TriedOptimizer, answer
from llmtrain.recipe import OptimConfig
from tests.helpers.own_optimizer import AVERAGING

STEPS = 3


def built(name: str, code_dir: str | None = None, tried: TriedOptimizer | None = None, **options):
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
    optim = OptimConfig(name=name, lr=0.1, options=options)
    groups = [{"params": [weight], "weight_decay": decay} for weight, decay in zip(weights, (0.1, 0.0), strict=True)]
    optimizer = torch_optimizer(groups, optim, code_dir=code_dir, tried=tried)
    check_fused(optimizer)
    return weights, optimizer


def take(weights, optimizer, step: int, skip: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    skip_if(torch.tensor(skip), optimizer)
    optimizer.step()


@pytest.mark.parametrize("name", ["torch.optim:NAdam", "torch.optim:RAdam", "torch.optim:SGD"])
def test_a_checkpoint_before_the_first_step_changes_nothing(name):
    options = {"momentum": 0.9} if name.endswith("SGD") else {}
    plain, saved = built(name, **options), built(name, **options)
    (shards,) = optimizer_shards(saved[1])
    assert all(shard.steps.item() == 0 for shard in shards)
    for step in range(STEPS):
        take(*plain, step)
        take(*saved, step)
        list(optimizer_shards(saved[1]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(saved[0], plain[0], strict=True))
    (shards,) = optimizer_shards(saved[1])
    assert all(shard.steps.item() == STEPS for shard in shards)


def test_methods_that_an_object_gets_are_reserved():
    assert {*RESERVED, "step"} == {name for name in vars(OwnOptimizer) if not name.startswith("_")}


def test_states_are_listed_by_their_shapes():
    weights, optimizer = built("torch.optim:NAdam")
    take(weights, optimizer, 0)
    (shards,) = optimizer_shards(optimizer)
    assert all(shard.tensors.keys() == {"weight", "exp_avg", "exp_avg_sq"} for shard in shards)
    assert all(shard.factors.keys() == {"step", "mu_product"} for shard in shards)
    assert all(factor.values.shape == (1,) for shard in shards for factor in shard.factors.values())


def test_the_class_has_no_found_inf_when_it_takes_a_step_and_hooks_run_once():
    """torch's own Adam, if it is not fused, refuses to run with it."""
    torch.optim.AdamW([torch.zeros(1)]).step()  # wraps the step of the class
    weights, optimizer = built("torch.optim:AdamW")
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    take(weights, optimizer, 0)
    assert calls == ["before"]


def test_a_failure_in_a_step_names_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine_of_engine.py").write_text(
        "from torch.optim import SGD\n\n\nclass Fails(SGD):\n    def step(self, closure=None):\n        return 1 / 0\n"
    )
    with pytest.raises(RecipeError, match=r"mine_of_engine.py, line 6: mine_of_engine:Fails fails in a step: ZeroDiv"):
        take(*built("mine_of_engine:Fails", str(tmp_path)), 0)


MINE = """
import torch
from torch.optim import Optimizer


class Estimate(Optimizer):
    '''Steps as long as the sums over all gradients so far say, as Prodigy's are; the groups hold what is known.'''

    def __init__(self, params, lr, weight_decay=0.0, late=False):
        defaults = {"lr": lr, "weight_decay": weight_decay, "k": 0, "d": 0, "bonus": 0.0}
        super().__init__(params, defaults)
        self.late = late
        for group in self.param_groups:
            group["sum"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        norm = sum(float(weight.grad.abs().sum()) for group in self.param_groups for weight in group["params"])
        for group in self.param_groups:
            group["k"] += 1
            group["d"] = max(group["d"], norm / group["k"]) + 0.1
            group["sum"].mul_(0.9).add_(norm)
            if group["k"] > 1:
                group["hat"] = group.get("hat", 0.3) / group["k"] + norm
            if self.late and group["k"] > 20:
                group["bonus"] = 1.0
            for weight in group["params"]:
                length = group["d"] * group.get("hat", 1.0) / float(group["sum"])
                weight.sub_(weight.grad, alpha=group["lr"] * length)


def make(groups, lr, late=False):
    return Estimate(groups, lr, late=late)
"""


@pytest.fixture
def estimate(tmp_path, monkeypatch):
    """The folder of a class that keeps numbers in its groups, and what a trial finds out about it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "estimate_of_engine.py").write_text(MINE)
    yield str(tmp_path)
    sys.modules.pop("estimate_of_engine", None)


def estimating(folder: str, **options):
    name = "estimate_of_engine:make"
    tried = answer({"optimizer": name, "options": options, "folder": folder})["tried"]
    assert tried["group_numbers"] == {"k": "int", "d": "float", "sum": "float32", "hat": "float"}
    return built(name, folder, TriedOptimizer(**tried), **options)


def averaging():
    name, folder = AVERAGING["optim.name"], AVERAGING["code_dir"]
    tried = answer({"optimizer": name, "options": {}, "folder": folder})["tried"]
    assert (tried["averages"], tried["unit"], tried["group_numbers"]) == (True, "element", {"k": "int"})
    return built(name, folder, TriedOptimizer(**tried))


def load(source, target) -> None:
    """Copies all values, as a checkpoint does."""
    for lists in zip(optimizer_shards(source), optimizer_shards(target), strict=True):
        for saved, shard in zip(*lists, strict=True):
            shard.steps.copy_(saved.steps)
            for kind, tensor in shard.tensors.items():
                tensor.copy_(saved.tensors[kind])
            assert shard.factors.keys() == saved.factors.keys()
            for kind, factor in shard.factors.items():
                factor.values.copy_(saved.factors[kind].values)


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_numbers_of_groups_continue_bit_for_bit(estimate, stop):
    """After one update, `hat` is not there yet."""
    whole, first, second, rolled_back = (estimating(estimate) for _ in range(4))
    whole[1].__class__ = whole[1].__class__.__bases__[1]  # the user's alone
    for step in range(7):
        take(*whole, step)
        take(*rolled_back, step + 1)
    for step in range(stop):
        take(*first, step)
    take(*first, 99, skip=1.0)  # changes nothing
    for target in (second, rolled_back):
        load(first[1], target[1])
        for step in range(stop, 7):
            take(*target, step)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(target[0], whole[0], strict=True))
        for ours, theirs in zip(target[1].param_groups, whole[1].param_groups, strict=True):
            names = ("k", "d", "sum", "hat")
            assert [(ours[name], type(ours[name])) for name in names] == [
                (theirs[name], type(theirs[name])) for name in names
            ]


def test_weights_of_a_group_cannot_have_other_numbers(estimate):
    weights, optimizer = estimating(estimate)
    groups = optimizer.param_groups
    groups[0]["params"] += groups.pop()["params"]
    (shards,) = optimizer_shards(optimizer)
    shards[0].factors["group_k"].values.fill_(3)
    with pytest.raises(CheckpointError, match="other numbers of estimate_of_engine:make for some weights of a group"):
        take(weights, optimizer, 0)


def test_a_number_that_the_trial_has_not_seen_changing_is_not_dropped_in_silence(estimate):
    weights, optimizer = estimating(estimate, late=True)
    for step in range(21):
        take(weights, optimizer, step)
    with pytest.raises(RecipeError, match="has changed 'bonus' of `param_groups`, but did not do so in the trial"):
        list(optimizer_shards(optimizer))


def test_evaluations_read_the_averages_and_leave_no_trace():
    """Also before the first step, and between the loading of a checkpoint and the next step."""
    whole, first, second = averaging(), averaging(), averaging()
    plain = averaging()
    plain[1].__class__ = plain[1].__class__.__bases__[1]
    for step in range(6):
        for one in (plain, whole):
            take(*one, step)
        plain[1].eval()
        means = [weight.clone() for weight in plain[0]]
        plain[1].train()
        for weight, ours in zip(plain[0], whole[0], strict=True):
            weight.data.copy_(ours)  # without the rounding of the way there and back
        weights, optimizer = first if step < 3 else second
        list(optimizer_shards(optimizer))  # makes a state before the first step
        with averaged_weights(optimizer, optimizer, lambda: None):
            before = [weight.clone() for weight in weights]
        take(weights, optimizer, step)
        with averaged_weights(optimizer, optimizer, lambda: None):
            assert all(torch.equal(ours, mean) for ours, mean in zip(weights, means, strict=True))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, whole[0], strict=True))
        if step == 2:
            load(optimizer, second[1])
            with averaged_weights(second[1], second[1], lambda: None):
                assert all(torch.equal(ours, mean) for ours, mean in zip(second[0], means, strict=True))
        assert step == 0 or not torch.equal(before[0], weights[0])
