"""Memory of a plan: parts, moments, stages, refusals and plans that fit."""

import json

import pytest
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.errors import RecipeError
from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict import memory_of
from llmtrain.plan.predict.activations import activations_of
from llmtrain.plan.rules import resolve
from llmtrain.plan.search.nearest import nearest_plans
from llmtrain.recipe import parse_assignments
from llmtrain.recipe.cluster import Cluster

LLAMA = load_recipe("recipes/llama3_8b.py", [])[0].with_(
    **{"model.attention": "auto", "kernels": "auto", "parallel.activation_checkpointing": "full"}
)
PARAMETERS = 8_030_261_248
CLUSTER = Cluster(nodes=8, devices_per_node=8, device="gpu")
NODE = Cluster(devices_per_node=8, device="h100")


def memory(recipe=LLAMA, cluster=CLUSTER, **fields):
    return memory_of(resolve(recipe.with_(**fields), cluster))


def test_parts_add_up_and_the_peak_is_the_fullest_moment():
    (stage,) = memory().stages
    totals = {name: getattr(stage, name).total for name in ("forward", "backward", "update")}
    assert stage.peak.total == totals[stage.moment] == max(totals.values())
    assert stage.forward.total == sum(stage.forward.by_part().values())
    assert (stage.backward.activations, stage.backward.logits) == (0, 0)


def test_sharding_lowers_the_memory_of_the_sharded_parts():
    parts = [memory(**{"parallel.zero_stage": stage}).stages[0].backward for stage in (1, 2, 3)]
    assert [part.parameters >= 2 * PARAMETERS for part in parts] == [True, True, False]
    assert parts[0].gradients >= 6 * PARAMETERS
    assert parts[1].gradients == pytest.approx(4 * PARAMETERS / 64, rel=1e-3)
    assert all(part.optimizer == pytest.approx(8 * PARAMETERS / 64, rel=1e-3) for part in parts)


def test_offload_moves_states_to_the_host():
    on_device, offloaded = (
        memory(**{"parallel.offload_optimizer": where}).stages[0].update for where in ("none", "cpu")
    )
    assert (offloaded.masters, offloaded.optimizer) == (0, 0)
    host = memory(**{"parallel.offload_optimizer": "cpu"}).stages[0].host
    assert host > on_device.masters + on_device.optimizer


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"batch.micro_batch_size": 2}, 2),
        ({"parallel.sequence": 2}, 0.5),
        ({"data.sequence_length": 4096}, 0.5),
    ],
    ids=str,
)
def test_activations_of_checkpoints_grow_with_the_tokens(fields, factor):
    base = {"model.attention": "flash_attention_2", "data.mask_documents": False, "kernels.loss": "whole"}
    one, other = memory(**base).stages[0].forward, memory(**base, **fields).stages[0].forward
    assert other.activations == pytest.approx(factor * one.activations, rel=0.01)
    assert other.logits == factor * one.logits


def test_saved_activations_depend_on_the_attention():
    none = {"parallel.activation_checkpointing": "none"}
    eager, masked, causal, flash, varlen = (
        memory(**none, **fields).stages[0].forward.activations
        for fields in (
            {"model.attention": "eager"},
            {"model.attention": "sdpa"},
            {"model.attention": "sdpa", "data.mask_documents": False},
            {"model.attention": "flash_attention_2"},
            {"model.attention": "varlen"},
        )
    )
    assert causal == flash == varlen
    # Probabilities of 32 heads in fp32 and bf16; a mask in bf16; in each of 32 layers.
    assert eager - causal > 32 * 32 * 6 * 8192**2
    assert masked - causal > 32 * 2 * 8192**2
    full = memory(**{"parallel.activation_checkpointing": "full"}).stages[0].forward.activations
    assert full < masked / 5


def test_earlier_stages_hold_more_micro_batches():
    fields = {"parallel.pipeline": 4, "parallel.zero_stage": 1}
    found = memory(**fields)
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]
    assert [stage.forward.logits > 0 for stage in found.stages] == [False, False, False, True]
    few = memory(**fields, **{"batch.global_batch_size": 32, "batch.micro_batch_size": 1})
    assert [stage.in_flight for stage in few.stages] == [2, 2, 2, 1]


def test_a_plan_that_does_not_fit_is_refused_with_plans_that_do():
    large = LLAMA.with_(**{"parallel.zero_stage": 1, "parallel.activation_checkpointing": "none"})
    with pytest.raises(RecipeError) as error:
        resolve(large, NODE)
    (problem,) = error.value.problems
    assert problem.rule == "memory.fits"
    assert "of 79.1 GiB on a h100" in problem.message
    assert "activations" in problem.message
    ways = nearest_plans(large, NODE)
    assert len(ways) == 3
    for way in ways:
        changed = large.with_(**parse_assignments(way.replace("--set ", "").split()))
        found = memory_of(resolve(changed, NODE))
        assert found.needed <= found.capacity


def test_a_trillion_parameters_on_one_device_is_refused():
    sizes = {"hidden_size": 25_600, "num_hidden_layers": 128, "num_attention_heads": 160, "intermediate_size": 81_920}
    huge = LLAMA.with_(**{f"model.config.{name}": value for name, value in sizes.items()})
    with pytest.raises(RecipeError, match=r"memory\.fits"):
        resolve(huge, Cluster(device="h100"))
    nearest_plans(huge, Cluster(device="h100"))


def test_an_unknown_capacity_refuses_nothing():
    assert memory(cluster=Cluster(device="gpu")).fits
    assert memory(cluster=Cluster()).stages[0].peak.framework == 0


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_accelerate_is_counted(backend):
    fields = {"parallel.backend": "accelerate", "parallel.accelerate": backend, "parallel.precision": "autocast_bf16"}
    stage = {"ddp": 0, "fsdp2": 3}[backend]
    if backend == "fsdp2":
        fields["parallel.precision"] = "bf16"
    parts = memory(**fields, **{"parallel.zero_stage": stage}).stages[0].backward
    share = 1 if backend == "ddp" else 64
    assert parts.optimizer == pytest.approx(8 * PARAMETERS / share, rel=1e-3)
    assert parts.gradients == pytest.approx(4 * PARAMETERS / share, rel=1e-3)


def test_the_command_prints_and_writes_the_memory():
    shown = CliRunner().invoke(app, ["plan", "recipes/llama3_70b.py:pipeline"])
    assert "GiB of 79.1 GiB on the fullest rank on stage 0" in shown.output
    document = json.loads(CliRunner().invoke(app, ["plan", "recipes/llama3_70b.py:pipeline", "--json"]).output)
    found = document["memory"]
    assert found["fits"] is True
    assert found["needed_bytes"] == sum(found["parts"].values()) == max(s["needed_bytes"] for s in found["stages"])
    assert len(found["stages"]) == 16
    assert "weights" not in document["model"]


@pytest.mark.parametrize(("precision", "of_logit"), [("fp32", 4), ("bf16", 8)])
def test_the_kernel_for_cpus_overwrites_the_logits(precision, of_logit):
    fields = {"parallel.precision": precision, "parallel.zero_stage": 1, "data.sequence_length": 1024}
    whole, compiled, on_gpus = (
        resolve(LLAMA.with_(**fields, **{"batch.micro_batch_size": 1, "kernels.loss": loss}), cluster)
        for loss, cluster in (("whole", Cluster()), ("compiled", Cluster()), ("compiled", CLUSTER))
    )
    logits = 1024 * 128_256
    assert activations_of(whole, whole.model.weights, 0).logits == 12 * logits
    assert activations_of(on_gpus, on_gpus.model.weights, 0).logits == 12 * logits
    of_head = (4 if precision == "fp32" else 2) * 128_256 * 4096  # the gradient of the weights, from one micro-batch
    assert activations_of(compiled, compiled.model.weights, 0).logits == of_logit * logits + of_head
