"""The predicted time of a step: its sum, its arithmetic, and cases without a prediction."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict.assumptions import FUSED, Assumptions
from llmtrain.plan.predict.flat import bucket_elements
from llmtrain.plan.predict.links import Groups, Links, RankGroup, bytes_sent
from llmtrain.plan.predict.time import describe_time, predict, unknown, waits_of
from llmtrain.plan.predict.traffic import CommunicationGroups, Traffic, Transfer
from llmtrain.plan.predict.work import Work, parameters_of_stages
from llmtrain.plan.rules import resolve
from llmtrain.plan.schedules import PipelineSchedule
from llmtrain.recipe.cluster import DEVICES, Cluster, Device

ROOT = Path(__file__).parents[3]
H100 = Cluster(nodes=4, devices_per_node=8, device="h100")


@pytest.fixture(scope="module")
def llama():
    recipe = load_recipe(str(ROOT / "recipes/llama_1b.py"), [])[0]
    batch = {"batch.global_batch_size": 512, "batch.micro_batch_size": 4}
    return recipe.with_(**batch, **{"model.attention": "auto", "kernels": "auto"})


def time_of(recipe, cluster=H100, **fields):
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return predict(resolve(recipe.with_(**named), cluster))


LAYOUTS = {
    "zero1": {"parallel__zero_stage": 1},
    "zero2": {"parallel__zero_stage": 2},
    "zero3": {"parallel__zero_stage": 3},
    "offload": {"parallel__zero_stage": 3, "parallel__offload_optimizer": "cpu", "parallel__offload_param": "cpu"},
    "pipeline": {"parallel__zero_stage": 1, "parallel__pipeline": 4},
    "3d": {"parallel__zero_stage": 1, "parallel__pipeline": 2, "parallel__tensor": 2, "parallel__sequence": 2},
    "checkpointing": {"parallel__zero_stage": 1, "parallel__activation_checkpointing": "full"},
    "fsdp2": {"parallel__zero_stage": 3, "parallel__backend": "accelerate", "parallel__accelerate": "fsdp2"},
    "ddp": {"parallel__zero_stage": 0, "parallel__backend": "accelerate", "parallel__precision": "autocast_bf16"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_add_up(llama, name):
    time = time_of(llama, **LAYOUTS[name])
    parts = time.compute_s + time.bubble_s + time.update_s + sum(time.communication_s.values())
    assert parts == pytest.approx(time.step_s)
    assert all(seconds > 0 for seconds in time.communication_s.values())
    tokens = 512 * llama.data.sequence_length
    assert time.tokens_per_second == pytest.approx(tokens / time.step_s)
    assert time.tokens_per_second_per_device == pytest.approx(time.tokens_per_second / 32)
    assert 0 < time.mfu < 1


def test_the_divergence_of_kto_takes_one_more_forward_pass(llama):
    """Without recomputation, a backward pass takes as long as two forward passes."""
    packed = {"data__packing": "best_fit", "data__mask_documents": True, "parallel__activation_checkpointing": "none"}
    pairs, labelled = (time_of(llama, objective__name=name, **packed).compute_s for name in ("dpo", "kto"))
    assert 1.25 * pairs < labelled < 1.4 * pairs


def test_masked_attention_scores_count_as_computed(llama):
    """By `sdpa`; kernels that know the boundaries of documents skip at least the tokens after each token."""
    fields = {"parallel__precision": "bf16", "parallel__zero_stage": 1}
    masked, flash, varlen = (
        time_of(llama, **fields, model__attention=one) for one in ("sdpa", "flash_attention_2", "varlen")
    )
    assert varlen.step_s == flash.step_s < masked.step_s


def test_mfu_is_the_flops_of_the_plan_over_the_peak(llama):
    plan = resolve(llama.with_(**{"parallel.zero_stage": 1}), H100)
    time = predict(plan)
    reached = plan.flops_per_token * time.tokens_per_second / 32
    assert time.mfu == pytest.approx(reached / 989e12)


def test_a_pipeline_idles_as_the_formula_says(llama):
    time = time_of(llama, **LAYOUTS["pipeline"])  # 8 replicas of 64 sequences: 16 micro-batches
    assert time.bubble == pytest.approx(3 / 19)
    slots = time.step_s - time.update_s - sum(time.communication_s.values())
    assert time.bubble_s / slots == pytest.approx(3 / 19)


def test_the_predicted_traffic_depends_on_the_zero_stage(llama):
    # ZeRO-1 in bf16 reduces once a step, ZeRO-2 in each of the 4 micro-batches; ZeRO-3 hides most of its messages.
    first, second = (time_of(llama, **LAYOUTS[name]) for name in ("zero1", "zero2"))
    once = first.communication_s
    assert second.communication_s["all_reduce"] + second.overlapped_s == pytest.approx(4 * once["all_reduce"])
    assert second.communication_s["all_gather"] == once["all_gather"]
    sharded = time_of(llama, **LAYOUTS["zero3"])
    assert sharded.overlapped_s > 4 * sum(sharded.communication_s.values())
    assert sharded.overlapped_s > once["all_gather"] * 4
    alone = time_of(llama, Cluster(device="h100"), **LAYOUTS["zero1"])
    assert alone.communication_s == {}


def test_checkpointing_computes_again_and_offload_passes_through_the_host(llama):
    plain, again = time_of(llama, **LAYOUTS["zero1"]), time_of(llama, **LAYOUTS["checkpointing"])
    assert plain.recompute_s == 0
    assert again.compute_s == pytest.approx(plain.compute_s + again.recompute_s)
    assert 0.2 < again.recompute_s / plain.compute_s < 1 / 3
    offloaded = time_of(llama, **LAYOUTS["offload"])
    assert offloaded.communication_s["host"] > 0
    assert offloaded.update_s > 10 * plain.update_s


def test_tensor_groups_across_nodes_are_slow(llama):
    fields = {"parallel__zero_stage": 1, "parallel__tensor": 4}
    within = time_of(llama, Cluster(nodes=1, devices_per_node=8, device="h100"), **fields)
    across = time_of(llama, Cluster(nodes=4, devices_per_node=2, device="h100"), **fields)
    assert across.communication_s["reduce_scatter"] > 3 * within.communication_s["reduce_scatter"]


def test_links_and_custom_devices_change_the_predicted_time(llama):
    base = time_of(llama, parallel__zero_stage=2)
    slow = time_of(llama, H100.model_copy(update={"network_bandwidth": 5e9}), parallel__zero_stage=2)
    assert slow.communication_s["all_reduce"] > 5 * base.communication_s["all_reduce"]
    assert slow.compute_s == base.compute_s
    mine = H100.spec.model_copy(update={"name": "mine", "peak_flops": {"bf16": 2 * 989e12}})
    own = time_of(
        llama, Cluster(nodes=4, devices_per_node=8, device="mine", own_devices=[mine]), parallel__zero_stage=2
    )
    assert own.compute_s < 0.8 * base.compute_s


def test_without_a_datasheet_nothing_is_predicted(llama, tiny):
    plan = resolve(tiny, Cluster(devices_per_node=2))
    assert predict(plan) is None
    assert unknown(plan) == "the datasheet of cpu lacks peak_flops['fp32'], memory_bandwidth, node_bandwidth"
    bare = Device(name="bare", memory_bytes=None, peak_flops={"fp32": 1e12}, memory_bandwidth=1e11)
    alone = resolve(tiny, Cluster(device="bare", own_devices=[bare]))
    assert unknown(alone) is None
    assert predict(alone).communication_s == {}
    one_process = tiny.with_(**{"parallel.backend": "data_parallel"})
    assert "nn.DataParallel" in unknown(resolve(one_process, Cluster(devices_per_node=2, device="h100")))


def test_the_line_about_time_shows_bubble_and_mfu(llama):
    line = describe_time(time_of(llama, **LAYOUTS["pipeline"]), measured=False)
    assert line.startswith("predicted ")
    assert "bubble 1" in line
    assert "MFU" in line


def links(**changes):
    exact = {"node_latency_s": 1e-15, "network_latency_s": 1e-15}
    return Links(per_node=8, node=100.0, network=10.0, host=1.0, assumed=Assumptions(**exact, **changes))


def test_time_of_collectives_depends_on_the_location_of_their_ranks():
    within, across, rails = RankGroup(8, 1), RankGroup(4, 8), RankGroup(16, 1)
    assert links().seconds("all_gather", 800, within) == pytest.approx(800 * 7 / 8 / 100)
    assert links().seconds("all_reduce", 800, within) == pytest.approx(2 * 800 * 7 / 8 / 100)
    assert links().seconds("all_gather", 800, across) == pytest.approx(800 * 3 / 4 / 10)
    assert [bytes_sent(kind, 800, within) for kind in ("all_gather", "all_reduce", "p2p")] == [700, 1400, 800]
    # Two nodes of eight: eight adapters carry the rings.
    assert links().seconds("all_gather", 800, rails) == pytest.approx(800 * 15 / 16 / 80)
    assert links().seconds("all_to_all", 160, rails) == pytest.approx(160 * 8 / 16 / 10)
    assert links().seconds("p2p", 100, RankGroup(2, 4)) == pytest.approx(1)
    assert links().seconds("p2p", 100, RankGroup(2, 8)) == pytest.approx(10)
    assert links().seconds("all_gather", 800, RankGroup(1, 1)) == links().seconds("p2p", 1, RankGroup(1, 1)) == 0


def test_groups_are_numbered_as_the_engines_number_them():
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    recipe = load_recipe(str(ROOT / "recipes/llama_1b.py"), [])[0]
    degrees = {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.sequence": 2, "parallel.zero_stage": 1}
    batch = {"batch.global_batch_size": 3, "batch.micro_batch_size": 1}
    plan = resolve(recipe.with_(**degrees, **batch), Cluster(devices_per_node=24))
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=6)
    groups = Groups.of(plan)
    for axis, group in (("pipe", groups.pipeline), ("model", groups.tensor), ("data", groups.replicas)):
        first = topology.get_axis_comm_lists(axis)[0]
        assert first == [number * group.stride for number in range(group.size)]
    assert groups.heads == RankGroup(2, 2)


def test_absurd_sizes_have_a_predicted_time(llama):
    sizes = {"model.config.hidden_size": 2**20, "model.config.num_hidden_layers": 1_000}
    endless = DEVICES["b200"].model_copy(update={"name": "endless", "memory_bytes": None})
    cluster = Cluster(nodes=10**6, devices_per_node=8, device="endless", own_devices=[endless])
    batch = {"batch__global_batch_size": 8 * 10**6, "batch__micro_batch_size": 1}
    time = time_of(llama.with_(**sizes), cluster, **batch, parallel__zero_stage=3)
    assert math.isfinite(time.step_s)
    assert time.mfu < 1


def test_all_reductions_but_those_of_the_embedding_and_a_bucket_are_hidden(llama):
    """ZeRO-2 reduces in each of two micro-batches, ZeRO-1 in the last one, and its bf16 engine after it."""
    batch = {"batch__global_batch_size": 256, "parallel__precision": "bf16"}
    plan = resolve(llama.with_(**{"parallel.zero_stage": 2}), H100)
    last = (bucket_elements(plan) + plan.model.embedding_parameters) / plan.model.parameters
    second = time_of(llama, parallel__zero_stage=2, **batch)
    assert second.overlapped_s > 0
    waited = second.communication_s["all_reduce"]
    assert waited / (waited + second.overlapped_s) == pytest.approx(last, rel=1e-3)
    first = time_of(llama, parallel__zero_stage=1, **batch | {"parallel__precision": "autocast_bf16"})
    assert 0 < first.overlapped_s < second.overlapped_s
    assert time_of(llama, parallel__zero_stage=1, **batch).overlapped_s == 0


@pytest.mark.parametrize("name", ["zero3", "fsdp2", "ddp"])
def test_a_rank_waits_for_the_first_weights_and_the_last_gradients(llama, name):
    """Those of the embedding, and of the one message beside it: a bucket of ZeRO's or of torch's, or FSDP2's layer."""
    plan = resolve(llama.with_(**{key.replace("__", "."): value for key, value in LAYOUTS[name].items()}), H100)
    facts = plan.model
    message = {"zero3": 40e6, "fsdp2": facts.layer_parameters[0], "ddp": 25 * 2**20 / 4}[name]
    share = pytest.approx((facts.embedding_parameters + message) / facts.parameters)
    traffic = CommunicationGroups(plan).traffic(parameters_of_stages(facts, plan.stages)[0])
    waited = {one.kind: one.times for one in (*traffic.exposed, *traffic.step) if one.times}
    assert waited == ({"all_reduce": share} if name == "ddp" else {"all_gather": share, "reduce_scatter": share})


def test_each_pass_hides_its_concurrent_communication():
    links = Links(1, 1.0, 1.0, 1.0, Assumptions(overlap=1.0, node_latency_s=1e-9, network_latency_s=1e-9))
    schedule = PipelineSchedule("1f1b", 1, 1)
    gathering, reduction = (Transfer(kind, ((8.0, RankGroup(2, 1)),)) for kind in ("all_gather", "reduce_scatter"))
    forward = Traffic([], [], [gathering], [], [], [], [], [Transfer("p2p", ())])
    each, once, hidden = waits_of(forward, links, Work(forward=1.0, recompute=0.0, backward=9.0), 2, schedule)
    assert (each, once, hidden) == ({"all_gather": pytest.approx(3)}, {}, 2)
    both = forward._replace(forward_overlapped=[], backward_overlapped=[reduction], step_forward_overlapped=[gathering])
    each, once, hidden = waits_of(both, links, Work(forward=1.0, recompute=1.0, backward=2.0), 2, schedule)
    assert each == {"reduce_scatter": pytest.approx(1)}
    assert once == {"all_gather": pytest.approx(3)}
    assert hidden == 2 * 3 + 1


def test_hierarchical_partition_gathers_over_the_network_once_per_step(llama):
    def gathers(size: int) -> dict[RankGroup, float]:
        fields = {"parallel.zero_stage": 3, "parallel.hierarchical_partition": size}
        plan = resolve(llama.with_(**fields), H100)
        found: dict[RankGroup, float] = defaultdict(float)
        for one in CommunicationGroups(plan).traffic(parameters_of_stages(plan.model, plan.stages)[0]).per_step(steps):
            for _, where in one.tensors if one.kind == "all_gather" else ():
                found[where] += one.times
        return {where: times for where, times in found.items() if times}

    every, neighbours, steps = RankGroup(32, 1), RankGroup(8, 1), 4
    both = gathers(1)
    assert both.keys() == {every}
    assert gathers(8) == pytest.approx({every: 1, neighbours: both[every] - 1})
    slow = {"cluster": H100.model_copy(update={"network_bandwidth": 1e9}), "parallel__zero_stage": 3}
    assert time_of(llama, **slow, parallel__hierarchical_partition=8).step_s < time_of(llama, **slow).step_s


def test_fused_kernels_reduce_the_memory_traffic(llama):
    fused = [{}, {"kernels__blocks": "compiled"}, {"kernels__blocks": "compiled", "kernels__loss": "compiled"}]
    eager, layers, both = (time_of(llama, **LAYOUTS["zero1"], **fields).compute_s for fields in fused)
    assert eager > layers > both
    named = {"parallel.zero_stage": 1, "kernels.blocks": "compiled", "kernels.loss": "compiled"}
    assert predict(resolve(llama.with_(**named), H100), FUSED).compute_s == both
