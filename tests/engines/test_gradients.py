"""A callback changes gradients under every plan that the rule allows as in the reference, and is refused elsewhere."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.errors import OwnCodeError, RecipeError
from llmtrain.plan.draft import Draft
from llmtrain.plan.rules import broken
from llmtrain.recipe.cluster import Cluster
from llmtrain.recipe.recipe import Recipe
from llmtrain.train.callbacks import Callbacks
from llmtrain.train.fingerprint import fingerprint
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace, worst

ROOT = str(Path(__file__).parents[2])
STEPS = 4
SGD = {"optim.name": "sgd", "optim.lr": 0.1, "batch.micro_batch_size": 2}
"""Updates with SGD show the gradients themselves."""
DDP = {"parallel.backend": "accelerate"}
FSDP2 = DDP | {"parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
ALLOWED: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {}),
    "ZeRO 0": (2, {}),
    "slices": (2, {"parallel.sequence": 2}),
    "DDP": (2, DDP),
    "accelerate": (2, DDP | {"parallel.accelerate": "deepspeed"}),
    "nn.DataParallel": (1, {"parallel.backend": "data_parallel"}),
    **({"Horovod": (2, {"parallel.backend": "horovod"})} if importlib.util.find_spec("horovod") else {}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO 1": ("parallel.zero_stage", {"parallel.zero_stage": 1}),
    "ZeRO 2": ("parallel.zero_stage", {"parallel.zero_stage": 2}),
    "ZeRO 3": ("parallel.zero_stage", {"parallel.zero_stage": 3}),
    "FSDP2": ("parallel.accelerate", FSDP2),
    "tensor": ("parallel.tensor", {"parallel.tensor": 2}),
    "pipeline": ("parallel.pipeline", {"parallel.pipeline": 2, "optim.clip_grad_norm": 0.0}),
}


def changing(name: str, **options) -> dict[str, Any]:
    one = {"object": f"tests.helpers.own_gradients:{name}", "options": options, "ranks": "all"}
    return one | {"changes_gradients": True}


NOISE = [changing("Centralised"), changing("Noise"), changing("Noise", scale=0.01, rows=16)]
"""The two with noise draw other numbers."""


@dataclass
class Changing:
    """An engine whose gradients the callbacks of a recipe change."""

    engine: Any
    recipe: Recipe
    step: int = 0

    def __post_init__(self) -> None:
        self.callbacks = Callbacks(self.recipe, model=self.engine.model)
        self.eval_step, self.named_weights = self.engine.eval_step, self.engine.named_weights

    def train_step(self, batch):
        self.step += 1
        result = self.engine.train_step(batch, self.callbacks.gradient_hook(self.step))
        self.callbacks.check_gradients(self.step)
        return result


def _recipe(callbacks=NOISE, **fields) -> Recipe:
    return tiny_recipe(callbacks=callbacks, code_dir=ROOT, **SGD | fields)


def _trained(rank: int, ranks: int, cases: dict[str, dict], callbacks: list) -> dict[str, Trace | str]:
    """The run of each plan, or its error. The plans are legal without callbacks."""
    found: dict[str, Trace | str] = {}
    for name, fields in cases.items():
        plan = plan_of(_recipe([], **fields), ranks)
        batch = plan.batch
        sizes = (batch.micro_batch_size, batch.gradient_accumulation_steps)
        try:
            engine = engine_of(plan)
            run = Changing(engine, plan.recipe.with_(callbacks=callbacks))
            found[name] = trace(run, range(STEPS), *sizes, engine.data_parallel_rank, plan.data_parallel_size)
        except Exception as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_changed_as_in_the_reference(ranks):
    cases = {name: fields for name, (size, fields) in ALLOWED.items() if size == ranks}
    for name, fields in cases.items():
        refused, _ = broken(Draft(_recipe(**fields), Cluster(devices_per_node=ranks), plan_of(_recipe([]), 1).model))
        assert not refused, name
    expected = plain_run(_recipe(), STEPS, 2)
    assert worst(expected.grad_norms, plain_run(_recipe([]), STEPS, 2).grad_norms) > 0.1
    for of_rank in run_ranks(ranks, _trained, ranks, cases, NOISE):
        for name, run in of_rank.items():
            assert isinstance(run, Trace), run
            assert_same(run, expected, name)


@pytest.mark.slow
def test_refused_plans_fail_or_train_something_else():
    for name, (field, fields) in REFUSED.items():
        draft = Draft(_recipe(**fields), Cluster(devices_per_node=2), plan_of(_recipe([]), 1).model)
        assert [one.field for one in broken(draft)[0] if one.rule == "own.gradients"] == [field], name
    noise = [changing("Noise", rows=0)]
    expected = plain_run(_recipe(noise), STEPS, 2)
    for of_rank in run_ranks(2, _trained, 2, {name: fields for name, (_, fields) in REFUSED.items()}, noise):
        for name, run in of_rank.items():
            assert isinstance(run, str) or worst(run.grad_norms, expected.grad_norms) > 0.1, name


@pytest.mark.parametrize("name", ["OfOneRank", "Signs"])
def test_ranks_that_change_gradients_in_other_ways_are_detected(name):
    """Of each step, although the averaged gradients of the next one are alike again."""
    for of_rank in run_ranks(2, _trained, 2, {"ZeRO 0": {}}, [changing(name)]):
        message = of_rank["ZeRO 0"]
        assert "changes gradients in another way on rank 1 than on rank 0, by step" in message
        assert f"{ROOT}/tests/helpers/own_gradients.py, line " in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Fails", "fails in on_gradients of step 2: KeyError: 'lm_head.weight'"),
        ("Replaces", "fails in on_gradients of step 1: TypeError: 'mappingproxy' object does not support item"),
        ("Returns", "fails in on_gradients of step 1: TypeError: it returns"),
    ],
)
def test_an_error_names_the_users_line(name, message):
    (found,) = run_ranks(1, _trained, 1, {"one": {}}, [changing(name)])
    assert message in found["one"]
    assert "own_gradients.py, line " in found["one"] or name == "Returns"


def test_an_error_of_one_rank_reaches_all():
    found = run_ranks(2, _trained, 2, {"one": {}}, [changing("FailsOnOneRank")])
    assert found[0] == found[1]
    assert "ZeroDivisionError" in found[0]["one"]


def test_the_recipe_says_that_a_callback_changes_gradients():
    one = {"object": "tests.helpers.own_gradients:Noise", "ranks": "all"}
    with pytest.raises(OwnCodeError, match=r"must be true: .*Noise defines on_gradients"):
        Callbacks(_recipe([one]))
    with pytest.raises(RecipeError, match="needs ranks='all' and on_error='stop'"):
        _recipe([one | {"changes_gradients": True, "on_error": "count"}])


def test_a_fingerprint_differs_with_each_bit():
    numbers = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    rows = numbers[[1, 0, 2, 3, 4, 5]]
    columns = numbers[:, [1, 0, 2, 3, 4]]
    row = numbers.clone()
    row[2] = numbers[2].flip(0)
    others = [rows, columns, row, -numbers, numbers + 0.0, numbers.nextafter(numbers + 1), numbers.flatten()]
    found = [int(fingerprint([one])) for one in (numbers, *others)]
    assert found.count(found[0]) == 2  # of the same numbers
    assert int(fingerprint([numbers, rows])) != int(fingerprint([rows, numbers]))
    assert int(fingerprint([torch.tensor(1.0), numbers.bfloat16().t(), numbers[:0]])) != 0
