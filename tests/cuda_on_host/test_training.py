"""Strategies on the device for tests: each equals the plain loop, and no rank touches the device of another.

What only GPUs run is run here: DeepSpeed's CUDA accelerator, its streams and pinned buffers, NCCL's groups. The server
of the ranks asserts after each test that no other device has a context.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_group

from llmtrain.engines import build_engine
from llmtrain.plan.ds_config import render
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tests.cuda_on_host.conftest import environment
from tests.helpers.batches import tiny_recipe
from tests.helpers.moe import CONFIGS, GPT_OSS, INDEXED, moe_recipe
from tests.helpers.traces import Trace, assert_same, plain_run, trace, worst

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 4
ZERO = [{"parallel.zero_stage": stage} for stage in range(4)]
OFFLOADED = {"parallel.zero_stage": 2, "parallel.offload_optimizer": "cpu"}
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1}

TWO = {
    "ZeRO-0": ZERO[0],
    "ZeRO-1": ZERO[1],
    "ZeRO-2": ZERO[2],
    "ZeRO-3": ZERO[3],
    "offload": OFFLOADED,
    "bf16": {"parallel.zero_stage": 1, "parallel.precision": "bf16"},
    "tensor": {"parallel.tensor": 2},
    "pipeline": STAGES,
    "zero bubble": {
        **STAGES,
        "parallel.pipeline_chunks": 2,
        "parallel.pipeline_schedule": "zero_bubble",
        "model.config.num_hidden_layers": 5,
    },
    "DDP": {"parallel.backend": "accelerate"},
    "FSDP2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}
FOUR = {
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 1},
    "sequence and pipeline": {"parallel.sequence": 2, **STAGES},
    "interleaved": {
        **STAGES,
        "parallel.pipeline": 4,
        "parallel.pipeline_chunks": 2,
        "parallel.pipeline_schedule": "interleaved",
        "model.config.num_hidden_layers": 9,
    },
    "tensor and ZeRO-3": {"parallel.tensor": 2, "parallel.zero_stage": 3},
    "experts": {"parallel.zero_stage": 1, "optim.name": "sgd", "optim.lr": 0.1},
}

_HYBRID = {
    **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 256},
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_MAMBA = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "layers_block_type": ["mamba", "attention"], "n_groups": 2, "ssm_state_size": 8},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "chunk_size": 16, "vocab_size": 256},
    # Else some weights are drawn by the host and some by the device, whose generators differ.
    **{"time_step_min": 0.01, "time_step_max": 0.01, "rescale_prenorm_residual": False},
}
_LORA = {"rank": 4, "alpha": 8.0, "target_parameters": ["experts.*_proj"]}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": ({"model": GPT_OSS, "parallel.expert": 1}, ZERO[3]),
    "Qwen3.5": ({"model": {"architecture": "qwen3_5_text", "config": _HYBRID | {"intermediate_size": 48}}}, ZERO[3]),
    "Qwen3.5 MoE": ({"model": {"architecture": "qwen3_5_moe_text", "config": CONFIGS["qwen3_5_moe_text"]}}, STAGES),
    "Nemotron-H": (
        {"model": {"architecture": "nemotron_h", "config": _MAMBA}},
        ZERO[2] | {"parallel.sequence": 2, "parallel.activation_checkpointing": "selective"},
    ),
    "DeepSeek V3.2": ({"model": {"architecture": "deepseek_v32", "config": INDEXED | {"v_head_dim": 16}}}, ZERO[1]),
    "Qwen3 MoE, LoRA of experts": (
        {
            "model": {
                "architecture": "qwen3_moe",
                "config": CONFIGS["qwen3_moe"] | {"mlp_only_layers": []},
                "adapter": _LORA,
            }
        },
        {"parallel.zero_stage": 3},
    ),
}
"""Name → the fields of a kind of model, and those of a strategy."""


def recipe_of(name: str) -> Recipe:
    make = moe_recipe if name == "experts" else tiny_recipe
    return make(**{"batch.micro_batch_size": 1, **(TWO | FOUR)[name]})


def train(rank: int, recipes: list[Recipe], ranks: int) -> list[Trace]:
    """Several recipes, one after the other, in one process group."""
    runs = []
    for recipe in recipes:
        plan = resolve(recipe, Cluster(devices_per_node=ranks, device="h100"))
        engine = build_engine(plan, render(plan), torch.device("cuda", rank))
        of_rank = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, engine.data_parallel_rank
        runs.append(trace(engine, range(STEPS), *of_rank, plan.data_parallel_size))
        world = _get_default_group()._get_backend(engine.device)
        assert not world.is_eager, "sends between stages would share its communicator"
    return runs


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "offload", "bf16"]),
        (2, ["tensor", "pipeline", "zero bubble", "DDP", "FSDP2"]),
        (4, ["sequence", "sequence and pipeline", "interleaved"]),
        (4, ["tensor and ZeRO-3", "experts"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else str(value),
)
def test_strategies_match_the_plain_loop(gpus, ranks, names):
    by_rank = gpus(ranks, train, [recipe_of(name) for name in names], ranks)
    for name, *runs in zip(names, *by_rank, strict=True):
        fields = (TWO | FOUR)[name]
        is_rounded = "parallel.precision" in fields
        model = {key: value for key, value in fields.items() if key.startswith("model")}
        expected = plain_run(recipe_of(name) if name == "experts" else tiny_recipe(**model), STEPS)
        for run in runs:
            if is_rounded:  # by one unit in the last place of bf16, as `test_parity` derives
                assert worst(run.losses, expected.losses) < 2**-8, name
            else:
                assert_same(run, expected, name)


def test_kinds_of_models_match_the_plain_loop(gpus):
    """Attention sinks, recurrences, an indexer, and adapters of experts; documents are packed."""
    sgd = {"optim.name": "sgd", "optim.lr": 0.1}
    recipes = {name: tiny_recipe(**sgd, **model, **strategy) for name, (model, strategy) in KINDS.items()}
    by_rank = gpus(2, train, list(recipes.values()), 2)
    for (name, recipe), *runs in zip(recipes.items(), *by_rank, strict=True):
        model = KINDS[name][0]
        for run in runs:
            assert_same(run, plain_run(tiny_recipe(**sgd, **model), STEPS), name)
        assert recipe.data.packing == "best_fit"


def test_8_bit_moments_are_the_plain_loop(gpus):
    """Blocks are cut by partitions, and offloaded ones have their largest magnitudes exchanged by the devices."""
    fields = {"optim.name": "adamw_8bit", "optim.options": {"block_size": 48}, "model.config.vocab_size": 257}
    cases = [fields | TWO[name] for name in ("ZeRO-1", "ZeRO-3", "offload", "tensor", "FSDP2")]
    by_rank = gpus(2, train, [tiny_recipe(**case) for case in cases], 2)
    expected = plain_run(tiny_recipe(**fields), STEPS)
    for case, *runs in zip(cases, *by_rank, strict=True):
        for run in runs:
            assert worst([*run.losses, run.evaluation], [*expected.losses, expected.evaluation]) < 1e-5, case
            assert worst(run.grad_norms, expected.grad_norms) < 1e-5, case


def test_nn_data_parallel_matches_the_plain_loop(libraries):
    """Its one process has all devices, and a thread for each."""
    tests = ("-n", "0", "-q", "-rs", "tests/engines/test_data_parallel.py", "-k", "several")
    given = environment(libraries, devices=2)
    run = subprocess.run([sys.executable, "-m", "pytest", *tests], env=given, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout
    assert "skipped" not in run.stdout
