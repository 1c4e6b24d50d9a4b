"""Adapters, and weights that a recipe freezes by name, give the run of plain PyTorch and PEFT under every strategy."""

from __future__ import annotations

from typing import Any

from llmtrain.recipe import Recipe
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace

STEPS = 4
ACCELERATE = {"parallel.backend": "accelerate"}
OFFLOAD = {"parallel.offload_optimizer": "cpu"}
FULL = {"parallel.activation_checkpointing": "full"}
PIPELINE = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
TENSOR = {"parallel.tensor": 2}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero{stage}": (2, {"parallel.zero_stage": stage}) for stage in range(4)},
    "zero2 offload": (2, {"parallel.zero_stage": 2, **OFFLOAD}),
    "zero3 offload": (2, {"parallel.zero_stage": 3, **OFFLOAD, "parallel.offload_param": "cpu"}),
    "zero1 checkpointing": (2, {"parallel.zero_stage": 1, **FULL}),
    "ddp": (2, {**ACCELERATE, "parallel.accelerate": "ddp"}),
    "ddp checkpointing": (2, {**ACCELERATE, "parallel.accelerate": "ddp", **FULL}),
    "fsdp2": (2, {**ACCELERATE, "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}),
    "fsdp2 zero2": (2, {**ACCELERATE, "parallel.accelerate": "fsdp2", "parallel.zero_stage": 2}),
    "accelerate zero2": (2, {**ACCELERATE, "parallel.accelerate": "deepspeed", "parallel.zero_stage": 2}),
    "data_parallel": (1, {"parallel.backend": "data_parallel"}),
    "pipeline": (2, PIPELINE),
    "pipeline zero0": (2, {**PIPELINE, "parallel.zero_stage": 0, "optim.clip_grad_norm": 0.0}),
    "pipeline checkpointing": (2, {**PIPELINE, **FULL}),
    "pipeline tensor": (4, {**PIPELINE, **TENSOR}),
    **{f"tensor zero{stage}": (2, {**TENSOR, "parallel.zero_stage": stage}) for stage in range(4)},
    "sequence": (2, {"parallel.sequence": 2, "parallel.zero_stage": 2}),
    "pipeline sequence": (4, {**PIPELINE, "parallel.sequence": 2}),
}
UNTIED = {"model.config.tie_word_embeddings": False}
LORA = {"model.adapter": {"rank": 4, "alpha": 16.0}}
TRAINED: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "scaled by rank": {"model.adapter": {"rank": 4, "alpha": 16.0, "rslora": True, "targets": ["q_proj", "o_proj"]}},
    "head": {"model.adapter": {"rank": 4, "targets": ["mlp.*"], "modules_to_save": ["lm_head"]}, **UNTIED},
    "last layer": {"model.adapter": {"rank": 4, "targets": ["model.layers.1.*_proj"]}},
    "first layer": {"model.adapter": {"rank": 4, "targets": ["model.layers.0.*_proj"]}},
    "norms": {"model.trainable": ["*norm.weight"]},
    "tied table": {"model.trainable": ["lm_head.weight", "model.layers.1.*"]},
    "end": {"model.trainable": ["lm_head.weight"], **UNTIED},
}


def recipe_of(trained: str, strategy: str, **fields: Any) -> Recipe:
    # SGD shows a scaled gradient, which Adam divides away.
    sgd = {"optim.name": "sgd", "optim.lr": 0.3}
    return tiny_recipe(**{**sgd, **TRAINED[trained], **STRATEGIES[strategy][1], **fields})


def run_recipes(rank: int, recipes: list[Recipe], ranks: int) -> list[Trace]:
    found = []
    for recipe in recipes:
        plan = plan_of(recipe, ranks)
        engine = engine_of(plan)
        batch, replicas = plan.batch, plan.data_parallel_size
        shape = batch.micro_batch_size, batch.gradient_accumulation_steps
        found.append(trace(engine, range(STEPS), *shape, engine.data_parallel_rank, replicas))
    return found


def check(ranks: int, cases: list[tuple[str, str]], **fields: Any) -> None:
    recipes = [recipe_of(*case, **fields) for case in cases]
    for runs in run_ranks(ranks, run_recipes, recipes, ranks):
        for case, recipe, run in zip(cases, recipes, runs, strict=True):
            optim = {"optim.clip_grad_norm": recipe.optim.clip_grad_norm}
            expected = plain_run(recipe_of(case[0], "data_parallel", **optim, **fields), STEPS)
            assert_same(run, expected, case)
