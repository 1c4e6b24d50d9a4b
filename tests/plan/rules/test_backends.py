"""Backends other than DeepSpeed: their plans, and refusals before a worker starts."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan import installed
from llmtrain.plan.ds_config import render
from llmtrain.plan.installed import check_runnable
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster

RECIPE = load_recipe("recipes/tiny.py", [])[0]
GPUS = Cluster(devices_per_node=4, device="h100")


def _plan(backend: str, cluster: Cluster = GPUS, **fields):
    fields = {name.replace("__", "."): value for name, value in fields.items()}
    return resolve(RECIPE.with_(**{"parallel.backend": backend, **fields}), cluster)


def _refused(*arguments, **fields) -> dict[str, str]:
    """Field → rule."""
    with pytest.raises(RecipeError) as error:
        _plan(*arguments, **fields)
    return {problem.field: problem.rule for problem in error.value.problems}


@pytest.mark.parametrize("backend", ["horovod", "data_parallel"])
def test_backends_with_whole_replicas_refuse_other_axes(backend):
    assert _refused(backend, parallel__tensor=2, parallel__zero_stage=1) == {
        "parallel.tensor": "backend.degrees",
        "parallel.zero_stage": "backend.zero_stage",
    }
    assert _refused(backend, parallel__offload_optimizer="cpu") == {"parallel.offload_optimizer": "backend.offload"}
    for precision in ("fp16", "autocast_fp16"):
        assert _refused(backend, parallel__precision=precision)["parallel.precision"] == "backend.precision"
    assert _refused(backend, parallel__grad_accum_dtype="bf16") == {"parallel.grad_accum_dtype": "backend.grad_accum"}
    assert render(_plan(backend)) == {}


def test_bf16_weights_train_under_horovod_only():
    assert _plan("horovod", parallel__precision="bf16").data_parallel_size == 4
    assert _refused("data_parallel", parallel__precision="bf16") == {"parallel.precision": "backend.precision"}


def test_data_parallel_is_one_process_on_one_machine():
    plan = _plan("data_parallel")
    assert (plan.data_parallel_size, plan.workers, plan.readers) == (4, 1, 1)
    assert [one["rule"] for one in plan.notes] == ["data_parallel.slow"]
    assert plan.read_size == 4 * plan.batch.micro_batch_size
    assert _plan("data_parallel", Cluster()).notes == ()
    nodes = Cluster(nodes=2, devices_per_node=1, device="h100")
    assert _refused("data_parallel", nodes) == {"parallel.backend": "data_parallel.devices"}
    assert _refused("data_parallel", Cluster(devices_per_node=2)) == {"parallel.backend": "data_parallel.devices"}


def test_a_launcher_that_started_a_process_per_gpu_is_refused():
    check_runnable(_plan("data_parallel"))
    check_runnable(_plan("data_parallel"), workers=1)
    with pytest.raises(RecipeError, match=r"launch\.workers"):
        check_runnable(_plan("data_parallel"), workers=4)


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(installed.PACKAGES, "horovod", ("nothing_of_this_name", "scripts/install_horovod.sh"))
    with pytest.raises(RecipeError) as error:
        check_runnable(_plan("horovod"))
    (problem,) = error.value.problems
    assert (problem.rule, problem.field) == ("backend.installed", "parallel.backend")
    assert problem.fix == "scripts/install_horovod.sh"
