"""An optimizer of one's own class in an engine: its states before the first step, its failures, torch's hooks."""

import sys

import pytest
import torch
from torch import nn

from llmtrain.engines.guard import check_fused, skip_if
from llmtrain.engines.optim import torch_optimizer
from llmtrain.engines.state.optimizer_shards import optimizer_shards
from llmtrain.errors import RecipeError
from llmtrain.recipe import OptimConfig

STEPS = 3


def built(name: str, code_dir: str | None = None, **options):
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
    optim = OptimConfig(name=name, lr=0.1, options=options)
    optimizer = torch_optimizer([{"params": weights, "weight_decay": 0.1}], optim, code_dir=code_dir)
    check_fused(optimizer)
    return weights, optimizer


def take(weights, optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    skip_if(torch.zeros(()), optimizer)
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
