"""An optimizer of one's own is tried before a run: what it keeps, and which plans may give it parts of weights."""

import sys
from pathlib import Path

import pytest

from llmtrain import Cluster
from llmtrain.errors import RecipeError
from llmtrain.plan import rules
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts import own_code, own_optimizer
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.facts.own_optimizer import MAX_DEVIATION, TriedOptimizer, tried_optimizer
from llmtrain.plan.predict.memory import memory_of
from llmtrain.plan.rules import resolve
from tests.helpers.batches import tiny_recipe

MINE = """
import torch
from torch.optim import Optimizer


class Plain(Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.0, power=1.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "power": power})

    def update(self, weight, state):
        return weight.grad

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(group["lr"] * self.update(weight, self.state[weight]))


class Counting(Plain):
    def update(self, weight, state):
        state["count"] = state.get("count", 0) + 1
        state["mean"] = state.get("mean", torch.zeros_like(weight, dtype=torch.float16)) * 0.5 + weight.grad.half()
        return state["mean"].float() / state["count"]


class PerWeight(Plain):
    def update(self, weight, state):
        return weight.grad / weight.numel() * 10


class Norm(Plain):
    def update(self, weight, state):
        state["rows"] = weight.grad.square().flatten(1).sum(1) if weight.ndim > 1 else weight.grad.new_zeros(1)
        return weight.grad / weight.grad.norm()


class Together(Plain):
    def update(self, weight, state):
        whole = sum(other.grad.square().sum() for group in self.param_groups for other in group["params"])
        return weight.grad / whole.sqrt()


class Outside(Plain):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.moments = {}

    def update(self, weight, state):
        self.moments[weight] = self.moments.get(weight, 0) * 0.9 + weight.grad
        return self.moments[weight]


class InGroup(Plain):
    def update(self, weight, state):
        self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
        return weight.grad / self.param_groups[0]["calls"]


class GroupCounts(Plain):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        for group in self.param_groups:
            group |= {"total": 0, "is_first": True, "mean": torch.zeros(())}

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["total"] += group["lr"]
            group["is_first"] = False
            group["mean"].lerp_(torch.tensor(group["lr"]), 0.5)
        super().step()

    def update(self, weight, state):
        group = next(group for group in self.param_groups if any(weight is other for other in group["params"]))
        return weight.grad * float(group["mean"]) / group["total"] / (group["k"] + group["is_first"])


class Estimate(Plain):
    '''Grows its steps with the distance that all weights together have gone, from very short ones.'''

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        for group in self.param_groups:
            group["d"] = 1e-6

    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight in weights:
            self.state[weight].setdefault("first", weight.detach().clone())
        gone = sum((weight.detach() - self.state[weight]["first"]).abs().sum() for weight in weights)
        d = max(self.param_groups[0]["d"], 3 * float(gone) / sum(weight.numel() for weight in weights))
        if d > self.param_groups[0]["d"]:  # not in each step, and not at a low rate
            for group in self.param_groups:
                group["d"] = d
        super().step()

    def update(self, weight, state):
        return self.param_groups[0]["d"] * weight.grad.sign()


class OtherBeginnings(GroupCounts):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.param_groups[0]["total"] = 1


class Shares(GroupCounts):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.param_groups[1]["mean"] = self.param_groups[0]["mean"]


class ForgetsPoint(Plain):
    def update(self, weight, state):
        state["point"] = state.get("point", weight.detach()) + 1
        return weight.grad

    def eval(self):
        for state in self.state.values():
            state["point"] = state["point"] * 2

    def train(self):
        pass


class Integers(Plain):
    def update(self, weight, state):
        state["signs"] = weight.grad.sign().to(torch.int8)
        return weight.grad


class Named(Plain):
    def update(self, weight, state):
        state["weight"] = weight.grad.clone()
        return weight.grad


class Listed(Plain):
    def update(self, weight, state):
        state["history"] = [weight.grad]
        return weight.grad


class Random(Plain):
    def update(self, weight, state):
        return weight.grad * torch.rand(())


class Fails(Plain):
    def update(self, weight, state):
        return weight.grad @ weight.grad


class WithoutRate(Plain):
    def __init__(self, params, lr=1e-3):
        Optimizer.__init__(self, params, {})


class WithoutDecay(Plain):
    def __init__(self, params, lr=1e-3):
        Optimizer.__init__(self, params, {"lr": lr})


class Idle(Plain):
    def step(self, closure=None):
        pass


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def make(groups, lr, power=2.0, kind=GroupCounts):
    return kind(groups, lr=lr, power=power)


def reserved(groups, lr):
    optimizer = Plain(groups, lr=lr)
    optimizer.updates = 0
    return optimizer


def wraps(groups, lr):
    return Wrapper(Plain(groups, lr=lr))


def regroups(groups, lr):
    return Plain([weight for group in groups for weight in group["params"]], lr=lr)


def drops(groups, lr):
    return Plain(groups[:1], lr=lr)


def sets_rate(groups, lr):
    return Plain([{**group, "lr": lr / 10} for group in groups], lr=lr)


def sets_decay(groups, lr):
    return Plain([{**group, "weight_decay": 0.01} for group in groups], lr=lr)
"""


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    """A folder with a module. Tests share it, so that each class is tried once."""
    path = tmp_path_factory.mktemp("mine")
    (path / "mine.py").write_text(MINE)
    return path


@pytest.fixture
def folder(shared_folder, monkeypatch):
    """The folder, with its cache."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(shared_folder / "cache"))
    return shared_folder


@pytest.fixture(autouse=True)
def _tried_here(monkeypatch):
    """Runs trial and import in this process, which has imported torch."""
    for module in (own_code, own_optimizer):
        monkeypatch.setattr(module, "run_helper", lambda _, request, what, module=module: module.answer(request))
    monkeypatch.setattr("sys.path", [*sys.path])
    yield
    sys.modules.pop("mine", None)


def recipe_of(folder: Path, name: str, **fields):
    path = name if ":" in name else f"mine:{name}"
    return tiny_recipe(**{"optim.name": path, "code_dir": str(folder), **fields})


def tried(folder: Path, name: str, **options) -> TriedOptimizer:
    found = tried_optimizer(recipe_of(folder, name, **{"optim.options": options}))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "options", "states", "scalars"),
    [
        ("torch.optim:RAdam", {}, {"exp_avg": 4, "exp_avg_sq": 4}, ("step",)),
        ("torch.optim:NAdam", {"betas": [0.8, 0.9]}, {"exp_avg": 4, "exp_avg_sq": 4}, ("step", "mu_product")),
        ("torch.optim:SGD", {}, {}, ()),
        ("Counting", {}, {"mean": 2}, ("count",)),
    ],
)
def test_an_elementwise_class_may_have_parts_of_weights(folder, name, options, states, scalars):
    found = tried(folder, name, **options)
    assert (found.unit, found.states, found.scalars, found.others) == ("element", states, scalars, ())
    assert found.deviation < MAX_DEVIATION / 100  # nothing but rounding


@pytest.mark.parametrize("name", ["GroupCounts", "make"])
def test_numbers_of_groups_are_found(folder, name):
    found = tried(folder, name)
    numbers = {"k": "int", "total": "float", "is_first": "bool", "mean": "float32"}
    assert (found.unit, found.group_numbers) == ("element", numbers)


@pytest.mark.parametrize(
    ("name", "unit", "others"),
    [
        ("PerWeight", "weight", ()),
        ("Norm", "weight", ("rows",)),
        ("Together", "model", ()),
        ("InGroup", "model", ()),
        ("Estimate", "model", ()),  # in the few steps of the trial, its numbers alone show it
        ("torch.optim:Adafactor", "weight", ("row_var", "col_var")),
        ("torch.optim:Adagrad", "weight", ()),  # its states are those of the weights it was built with
    ],
)
def test_other_classes_need_whole_weights(folder, name, unit, others):
    found = tried(folder, name)
    assert (found.unit, found.others) == (unit, others)
    assert found.deviation > 100 * MAX_DEVIATION


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Outside", "keeps something outside `state[parameter]`"),
        ("OtherBeginnings", "changes 'total' of `param_groups`, which begins with other values"),
        ("Listed", "'history', a value of type list, which is neither a tensor nor a number"),
        ("Shares", "or shares a tensor between its groups"),
        ("ForgetsPoint", "has other states after eval() and train() than before"),
        ("Integers", "keeps 'signs' as torch.int8"),
        ("Named", "keeps a state under the name 'weight'"),
        ("Random", "trains other weights when it is run again"),
        ("Fails", "mine:Fails fails in a step: RuntimeError"),
        ("WithoutRate", "has no `lr` in its defaults"),
        ("Idle", "changed no weight"),
        ("Wrapper", "not a subclass of torch.optim.Optimizer"),
        ("wraps", "one that wraps an optimizer is not supported"),
        ("reserved", "has an attribute updates, which llmtrain uses otherwise"),
        ("regroups", "has other parameter groups than it got: 4 weights instead of 2 + 2"),
        ("drops", "has other parameter groups than it got: 2 weights instead of 2 + 2"),
        ("sets_rate", "sets `lr` of its groups to other values than it got"),
        ("sets_decay", "sets `weight_decay` of its groups to other values than it got"),
        ("torch.optim:LBFGS", "doesn't support per-parameter options"),
    ],
)
def test_what_could_not_be_trained_with_is_refused(folder, name, message):
    with pytest.raises(RecipeError) as error:
        tried(folder, name)
    assert message in str(error.value)


def test_a_failure_names_the_line_of_the_class(folder):
    line = 1 + MINE.splitlines().index("        return weight.grad @ weight.grad")
    with pytest.raises(RecipeError, match=f"{folder / 'mine.py'}, line {line}: "):
        tried(folder, "Fails")


def test_an_argument_that_the_class_does_not_have_is_refused(folder):
    assert tried(folder, "Plain", power=2.0).unit == "element"
    with pytest.raises(RecipeError, match="unexpected keyword argument 'powr'"):
        tried(folder, "Plain", powr=2.0)


@pytest.mark.parametrize(
    ("name", "fields", "broken"),
    [
        ("Norm", {"parallel.zero_stage": 1}, ["parallel.zero_stage"]),
        ("Norm", {"parallel.precision": "bf16"}, ["parallel.precision"]),
        ("Norm", {"parallel.tensor": 2}, ["parallel.tensor"]),
        ("Norm", {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2"}, ["parallel.accelerate"]),
        ("Norm", {"parallel.pipeline": 2, "optim.clip_grad_norm": 0.0}, []),
        ("Together", {"parallel.pipeline": 2, "optim.clip_grad_norm": 0.0}, ["parallel.pipeline"]),
        ("Norm", {}, []),
        ("Norm", {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"}, []),
        ("Together", {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"}, []),
        ("Counting", {"parallel.zero_stage": 3}, []),
        ("Counting", {"optim.betas": (0.8, 0.9), "optim.eps": 1e-6}, ["optim.betas", "optim.eps"]),
        ("WithoutDecay", {}, ["optim.weight_decay"]),
        ("WithoutDecay", {"optim.weight_decay": 0.0}, []),
        (
            "Counting",
            {
                "parallel.zero_stage": 3,
                "parallel.offload_optimizer": "nvme",
                "parallel.offload_param": "nvme",
                "parallel.nvme_path": "/tmp",
            },
            ["parallel.offload_optimizer"],
        ),
        ("Counting", {"parallel.backend": "horovod"}, ["parallel.backend"]),
    ],
)
def test_rules_refuse_what_the_trial_found_wrong(folder, name, fields, broken):
    recipe = recipe_of(folder, name, **{"optim.weight_decay": 1.0, **fields})
    problems, _ = rules.broken(Draft(recipe, Cluster(devices_per_node=2), model_facts(recipe.model, recipe.vocab_size)))
    assert [problem.field for problem in problems if problem.rule.startswith("optim.own")] == broken
    if not broken:
        assert resolve(recipe, Cluster(devices_per_node=2)).optimizer == tried_optimizer(recipe)


def test_memory_counts_the_bytes_of_the_states(folder):
    """Those of `Counting` are in fp16: half a number of fp32, rounded up to one."""
    plans = {name: resolve(recipe_of(folder, name), Cluster()) for name in ("Plain", "Counting", "torch.optim:RAdam")}
    bytes_of = {name: memory_of(plan).stages[0].peak.optimizer for name, plan in plans.items()}
    assert bytes_of == {
        "Plain": 0,
        "Counting": bytes_of["torch.optim:RAdam"] // 2,
        "torch.optim:RAdam": 8 * plans["Plain"].model.parameters,
    }


def test_the_result_is_kept_until_the_code_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path
    (folder / "mine.py").write_text(MINE)
    assert tried(folder, "Counting").unit == "element"
    monkeypatch.setattr(own_optimizer, "run_helper", None)
    assert tried(folder, "Counting").unit == "element"
    (folder / "mine.py").write_text(MINE.replace("count", "number"))
    with pytest.raises(TypeError, match="not callable"):
        tried(folder, "Counting")


def test_an_optimizer_of_llmtrain_is_not_tried():
    assert tried_optimizer(tiny_recipe()) is None
