"""The rendered configuration of every recipe and variant, in DeepSpeed's own configuration class."""

import json
from pathlib import Path

import pytest

from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.load import PythonRecipe, load_recipe
from llmtrain.plan.predict.flat import bucket_elements
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from llmtrain_lint.schema import schema
from tools.configurations import declared_facts

ROOT = Path(__file__).parents[2]
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


ONE_BUCKET = {
    "model.config.num_hidden_layers": 1,
    "model.config.intermediate_size": 2048,
    "model.config.vocab_size": 256,
    "data.tokenizer": "none",
}


def every_plan() -> dict[str, Plan]:
    plans = {}
    for path in sorted((ROOT / "recipes").glob("*.py")):
        file = PythonRecipe(path)
        for variant in ("", *file.variants()):
            recipe = file.recipe(variant)
            plans[f"{path.stem}:{variant}"] = resolve(recipe, file.cluster(variant), declared_facts(file, recipe))
    return plans


PLANS = every_plan()


def tiny(cluster: Cluster | None = None, **fields) -> dict:
    recipe = load_recipe(str(ROOT / "recipes/tiny.py"), [])[0].with_(**fields)
    return render(resolve(recipe, cluster or Cluster()))


@pytest.mark.parametrize("name", PLANS)
def test_deepspeed_parses_the_rendered_configuration_as_intended(name, monkeypatch):
    import deepspeed.runtime.config as config_module
    from deepspeed.runtime.zero.config import ZeroStageEnum

    plan = PLANS[name]
    ours = render(plan)
    # DeepSpeed asks its process group for the number of ranks; it is the layout's here.
    monkeypatch.setattr(config_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        config_module.dist, "get_world_size", lambda *_: plan.cluster.world_size // plan.parallel.pipeline
    )
    theirs = config_module.DeepSpeedConfig(json.loads(json.dumps(ours)))
    batch, zero = plan.batch, theirs.zero_config
    if "train_batch_size" in ours:
        assert theirs.train_batch_size == batch.global_batch_size
    assert theirs.train_micro_batch_size_per_gpu == batch.micro_batch_size
    assert theirs.gradient_accumulation_steps == batch.gradient_accumulation_steps
    assert theirs.gradient_clipping == plan.recipe.optim.clip_grad_norm
    assert theirs.grad_accum_dtype == plan.recipe.parallel.grad_accum_dtype
    assert str(theirs.communication_data_type) == DTYPES[plan.recipe.parallel.grad_accum_dtype]
    assert theirs.bfloat16_config.enabled == (plan.recipe.parallel.precision == "bf16")
    assert not theirs.float16_config.enabled
    assert not theirs.torch_autocast_enabled
    assert zero.stage == ZeroStageEnum(plan.parallel.zero_stage)
    # Each value of each block is one that DeepSpeed took over as it stands.
    for key, value in ours["zero_optimization"].items():
        taken = getattr(zero, key, None) if hasattr(zero, key) else getattr(zero, key.removeprefix("stage3_"))
        if isinstance(value, dict):
            assert {inner: getattr(taken, inner) for inner in value} == value, key
        else:
            assert taken == value, key
    assert theirs.optimizer_params == ours["optimizer"]["params"]
    assert theirs.steps_per_print is None
    assert not theirs.timers_config.enabled


@pytest.mark.parametrize("name", PLANS)
def test_every_default_is_rendered_explicitly(name):
    config = render(PLANS[name])
    assert set(config) <= set(schema().root.keys or {})
    assert '"auto"' not in json.dumps(config)
    assert {"gradient_clipping", "communication_data_type", "data_types", "bf16", "fp16", "torch_autocast"} <= set(
        config
    )
    if config["zero_optimization"]["stage"]:
        assert {"reduce_bucket_size", "allgather_bucket_size", "overlap_comm"} <= set(config["zero_optimization"])


def test_bucket_sizes_depend_on_the_model():
    assert bucket_elements(PLANS["tiny:zero3"]) <= PLANS["tiny:zero3"].model.parameters + 1
    assert bucket_elements(PLANS["llama3_8b:"]) == 64_000_000
    assert bucket_elements(PLANS["llama3_70b:"]) == 128_000_000
    assert bucket_elements(PLANS["llama3_70b:pipeline"]) == 40_000_000
    for plan in PLANS.values():
        assert bucket_elements(plan) % 2 == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"parallel.zero_stage": 1, "parallel.precision": "autocast_bf16"}, True),
        ({"parallel.zero_stage": 2}, True),
        ({"parallel.zero_stage": 3}, True),
        ({"parallel.zero_stage": 1}, False),  # BF16_Optimizer
        ({"parallel.zero_stage": 1, "parallel.precision": "fp32", "parallel.pipeline": 2}, False),
        ({"parallel.zero_stage": 2, **ONE_BUCKET}, False),
    ],
)
def test_overlap_comm_is_on_with_more_than_one_bucket(fields, expected):
    recipe = load_recipe(str(ROOT / "recipes/llama_1b.py"), [])[0]
    recipe = recipe.with_(**{"model.attention": "auto", "kernels": "auto", "batch.micro_batch_size": 8, **fields})
    config = render(resolve(recipe, Cluster(devices_per_node=8, device="h100")))
    assert config["zero_optimization"]["overlap_comm"] is expected


@pytest.mark.parametrize(
    ("fields", "replicas"),
    [
        ({}, 4),
        ({"parallel.pipeline": 2, "parallel.zero_stage": 1}, 2),
        ({"model.architecture": "mixtral", "parallel.expert": 2}, 4),
    ],
)
def test_tensor_and_expert_parallelism_are_not_configured_in_deepspeed(fields, replicas):
    config = tiny(Cluster(devices_per_node=8), **{"parallel.tensor": 2, **fields})
    assert not {"tensor_parallel", "expert_parallel"} & config.keys()
    micro, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == micro * steps * replicas


def test_optimizers_are_written_for_deepspeed():
    assert tiny(**{"optim.name": "adam"})["optimizer"]["params"]["adam_w_mode"] is False
    assert tiny()["optimizer"]["params"] | {"torch_adam": True, "fused": True} == tiny()["optimizer"]["params"]
    sgd = tiny(**{"optim.name": "sgd", "optim.betas": [0.8, 0.9]})
    assert (sgd["optimizer"]["type"], sgd["optimizer"]["params"]["momentum"]) == ("SGD", 0.8)
    assert sgd["zero_allow_untested_optimizer"] is True
    lion = tiny(**{"optim.name": "lion"})  # an object, which is passed beside the JSON
    assert "optimizer" not in lion
    assert lion["zero_allow_untested_optimizer"] is True


def test_clipping_can_be_off():
    assert tiny(**{"optim.clip_grad_norm": 0})["gradient_clipping"] == 0


def test_offload_pins_memory_only_for_a_gpu():
    fields = {"parallel.zero_stage": 3, "parallel.offload_optimizer": "cpu"}
    assert tiny(**fields)["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    nvme = {**fields, "parallel.offload_param": "nvme", "parallel.nvme_path": "/nvme"}
    config = tiny(Cluster(device="h100"), **nvme)
    assert config["zero_optimization"]["offload_optimizer"]["pin_memory"] is True
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == "/nvme"
    assert config["aio"]["block_size"] == 2**20
    assert "aio" not in tiny(**fields)


def test_autocast_reduces_in_the_accumulation_type():
    block = tiny(**{"parallel.precision": "autocast_bf16"})["torch_autocast"]
    assert block == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
