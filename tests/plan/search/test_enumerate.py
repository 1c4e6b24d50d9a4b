"""The plans to verify on a few devices."""

from __future__ import annotations

import importlib.util

from transformers import AutoConfig

from llmtrain.plan.axes import model_parallel_size
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import load_recipe
from llmtrain.plan.search.enumerate import candidates, enumerate_plans
from llmtrain.plan.search.variants import has_mean_loss
from llmtrain.recipe import ModelConfig
from llmtrain.trials.verify.job import choose_plans, comparable

RECIPE = load_recipe("recipes/tiny.py:verify", [])[0]


def test_every_legal_data_parallel_plan_is_there_once():
    plans, _ = enumerate_plans(RECIPE, 4)
    names = [one.name for one in plans]
    assert len(set(names)) == len(names)
    plans = [one for one in plans if one.plan.recipe.parallel.backend == "deepspeed"]
    # Per world size: ZeRO-0; 1 and 2 with and without offload; 3 with four kinds; each with two accumulations. Four
    # devices are also two groups of two that keep parameters.
    own = [one for one in plans if one.plan.recipe.parallel.backend == "deepspeed"]
    assert sum(model_parallel_size(one.plan.parallel) == 1 for one in own) == 3 * 2 * 9 + 2
    for one in own:
        plan, batch, parallel = one.plan, one.plan.batch, one.plan.parallel
        suffix = {("none", "none"): "", ("cpu", "none"): "-offload", ("cpu", "cpu"): "-offload_param"}.get(
            (parallel.offload_optimizer, parallel.offload_param), "-offload_param_only"
        )
        if plan.data_parallel_size == plan.cluster.world_size:
            accumulation = batch.gradient_accumulation_steps
            stage = f"{parallel.zero_stage}-hpz2" if parallel.hierarchical_partition > 1 else parallel.zero_stage
            assert one.name == f"dp{plan.data_parallel_size}-zero{stage}-acc{accumulation}{suffix}"


def test_accelerate_runs_data_parallelism_on_every_number_of_devices():
    names = {one.name for one in enumerate_plans(RECIPE, 2)[0] if one.plan.recipe.parallel.backend == "accelerate"}
    parts = ["ddp", "fsdp2", "fsdp2-zero2", *(f"accelerate-zero{stage}" for stage in range(4))]
    assert names == {f"dp{dp}-{part}-acc{n}" for dp, most in ((1, 4), (2, 2)) for part in parts for n in (1, most)}


def test_a_recipe_for_accelerate_is_verified_under_deepspeed_too():
    recipe = RECIPE.with_(
        **{"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
    )
    assert [one.name for one in enumerate_plans(recipe, 2)[0]] == [one.name for one in enumerate_plans(RECIPE, 2)[0]]


def test_other_backends_are_plain_data_parallelism():
    names = {one.name for one in enumerate_plans(RECIPE, 2)[0]}
    # On CPUs nn.DataParallel has one device.
    assert {name for name in names if "data_parallel" in name} == {"dp1-data_parallel-acc1", "dp1-data_parallel-acc4"}
    installed = importlib.util.find_spec("horovod") is not None
    assert ("dp2-horovod-acc2" in names) == installed
    gpus = {one.name: one.plan for one in enumerate_plans(RECIPE, 2, "h100")[0]}
    plan = gpus["dp2-data_parallel-acc2"]
    assert (plan.data_parallel_size, plan.workers, plan.readers) == (2, 1, 1)
    assert plan.read_size * plan.batch.gradient_accumulation_steps == plan.batch.global_batch_size


def test_world_sizes_divide_the_devices():
    assert {cluster.world_size for _, _, cluster in candidates(RECIPE, 4)} == {1, 2, 4}
    assert {cluster.world_size for _, _, cluster in candidates(RECIPE.with_(**{"batch.global_batch_size": 6}), 3)} == {
        1,
        3,
    }


def test_refused_plans_name_their_rule():
    _, refused = enumerate_plans(RECIPE, 2)
    rules = {one.name: one.problem.rule for one in refused}
    assert rules["dp1-zero0-acc1-offload"] == "zero.offload_optimizer_stage"
    assert rules["dp2-zero2-acc1-offload_param"] == "zero.offload_param_stage"
    assert rules["dp1-pp2-zero3-acc1"] == "pipeline.zero_stage"
    assert rules["dp2-ep2-zero1-acc1"] == "layout.expert"


def test_plans_with_a_router_keep_the_micro_batch():
    sizes = {candidate.batch.micro_batch_size for _, candidate, _ in candidates(RECIPE, 2, is_mean=True)}
    assert sizes == {RECIPE.batch.micro_batch_size}


def test_a_router_loss_is_also_that_of_pretrained_weights(tmp_path):
    config = AutoConfig.for_model("mixtral", output_router_logits=True, **RECIPE.model.config)
    config.save_pretrained(tmp_path)
    given = ModelConfig(pretrained=str(tmp_path))
    assert has_mean_loss(model_facts(given, None))
    assert not has_mean_loss(model_facts(given.model_copy(update={"config": {"output_router_logits": False}}), None))


def test_plans_are_chosen_by_name_and_pattern():
    plans, refused = enumerate_plans(RECIPE, 2)
    assert choose_plans(plans, refused, "all") == plans
    chosen = [one.name for one in choose_plans(plans, refused, "dp1-zero0-acc1,dp2-zero1-*")]
    of_two = [f"dp2-zero1-{name}" for name in ("acc1", "acc2", "acc1-offload", "acc2-offload")]
    assert chosen == ["dp1-zero0-acc1", *of_two]


def test_the_schedule_is_compressed_into_the_steps_and_dropout_is_off():
    recipe, _ = load_recipe("recipes/gpt2_124m.py", ["parallel.precision=fp32"])
    compared = comparable(recipe, 8)
    assert compared.train.max_steps == 8
    assert compared.optim.warmup_steps <= 2
    assert [compared.model.config[key] for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.0, 0.0, 0.0]
