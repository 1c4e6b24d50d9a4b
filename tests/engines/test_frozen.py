"""Parameters without a gradient do not change under any strategy, and are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import TrainerState, load
from llmtrain.models import build_model
from llmtrain.plan.facts import built_model as frozen
from llmtrain.recipe import Recipe
from tests.helpers.batches import GLOBAL_BATCH, WRAPPER, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS as EXPERTS
from tests.helpers.moe import INDEXED, moe_recipe
from tests.helpers.traces import Trace, engine_of, plan_of, trace, worst

STEPS = 3
FP32 = 1e-5  # as in test_parity.py
BIASED = {
    **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "num_hidden_layers": 2, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
    **{"moe_intermediate_size": 24, "output_router_logits": True, "router_aux_loss_coef": 0.02},
    **{"max_position_embeddings": 32},
}
"""Ernie 4.5: a correction of its router is declared to be frozen, and the auxiliary loss is on."""
CONFIGS = {"deepseek_v32": INDEXED, "ernie4_5_moe": BIASED, "gemma3": WRAPPER}
ACCELERATE = {"parallel.backend": "accelerate"}
STRATEGIES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"parallel.zero_stage": stage} for stage in range(4)},
    "zero1 offload": {"parallel.zero_stage": 1, "parallel.offload_optimizer": "cpu"},
    "zero3 offload": {
        **{"parallel.zero_stage": 3, "parallel.offload_optimizer": "cpu"},
        "parallel.offload_param": "cpu",
    },
    "ddp": {**ACCELERATE, "parallel.accelerate": "ddp", "parallel.zero_stage": 0},
    "fsdp2": {**ACCELERATE, "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "pipeline zero0": {"parallel.pipeline": 2, "parallel.zero_stage": 0, "optim.clip_grad_norm": 0.0},
}
WITHOUT_GRADIENT = ("indexer", "e_score_correction_bias", "vision_tower", "multi_modal_projector")


def _recipe(family: str, **fields: Any) -> Recipe:
    model = {"architecture": family, "config": CONFIGS[family]}
    return tiny_recipe(**{"model": model, "optim.name": "sgd", "optim.lr": 0.1, **fields})


def _plain(recipe: Recipe, keeps_frozen: bool = False) -> tuple[list[float], dict[str, np.ndarray[Any, Any]]]:
    """Losses of a loop that knows nothing but torch, and its weights: what has no gradient is left out by torch itself.

    keeps_frozen: leaves frozen what llmtrain froze.
    """
    model = build_model(recipe, torch.float32, torch.device("cpu")).train()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad or not keeps_frozen)
    optim = recipe.optim
    decayed = [one for one in model.parameters() if one.dim() >= 2]
    others = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.betas[0])
    from llmtrain.engines.optim import schedule

    scheduler = schedule(optimizer, recipe)
    losses = []
    for step in range(STEPS):
        batch = step_batch(step, 1, GLOBAL_BATCH)
        optimizer.zero_grad()
        losses.append(0.0)
        for one in batch.micro_batches:
            output = model(input_ids=one.input_ids, position_ids=one.position_ids, use_cache=False)
            loss = torch.nn.functional.cross_entropy(output.logits[0], one.labels[0], reduction="sum")
            loss = loss / batch.target_tokens
            losses[-1] += loss.item()
            if getattr(output, "aux_loss", None) is not None:
                loss = loss + model.config.router_aux_loss_coef * output.aux_loss / len(batch.micro_batches)
            loss.backward()
        if optim.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad_norm)
        optimizer.step()
        scheduler.step()
    return losses, {name: weight.detach().numpy() for name, weight in model.named_parameters()}


def _run(rank: int, recipes: list[Recipe], folder: Path) -> list[tuple[Trace, dict[str, Any]]]:
    """Of each recipe a run, and the weights of an engine of another seed that has loaded its checkpoint."""
    found = []
    for index, recipe in enumerate(recipes):
        plan = plan_of(recipe, 2)
        engine = engine_of(plan)
        shape = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps
        run = trace(engine, range(STEPS), *shape, engine.data_parallel_rank, plan.data_parallel_size)
        Saver(folder / str(index), plan, engine).save(TrainerState(step=STEPS, data="key"))
        other = engine_of(plan_of(recipe.with_(**{"train.seed": 99}), 2))
        load(newest(folder / str(index)), other, plan, "key")
        found.append((run, {name: weight.float().numpy().copy() for name, weight in other.named_weights()}))
    return found


def _assert_same(name: str, run: Trace, loaded: dict[str, Any], losses: list[float], weights: dict[str, Any]) -> None:
    """A run and what was loaded of its checkpoint are a plain run."""
    assert worst(run.losses, losses) < FP32, name
    assert run.weights.keys() == loaded.keys() == weights.keys(), name
    for weight, value in weights.items():
        np.testing.assert_allclose(run.weights[weight], value, rtol=0, atol=1e-5, err_msg=f"{name} {weight}")
        assert np.array_equal(loaded[weight], run.weights[weight]), (name, weight)


FEW = ("zero0", "zero1", "fsdp2")


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (next(iter(CONFIGS)), FEW),
        *(pytest.param(family, tuple(STRATEGIES), marks=pytest.mark.breadth) for family in CONFIGS),
    ],
)
def test_no_strategy_changes_a_parameter_without_gradient(family, names, tmp_path):
    recipes = [_recipe(family, **STRATEGIES[name]) for name in names]
    start = dict(build_model(recipes[0], torch.float32, torch.device("cpu")).named_parameters())
    idle = [name for name in start if any(part in name for part in WITHOUT_GRADIENT)]
    assert idle
    expected = {clip: _plain(_recipe(family, **{"optim.clip_grad_norm": clip})) for clip in (0.0, 0.5)}
    for runs in run_ranks(2, _run, recipes, tmp_path):
        for name, recipe, (run, loaded) in zip(names, recipes, runs, strict=True):
            _assert_same(name, run, loaded, *expected[recipe.optim.clip_grad_norm])
            for weight in idle:
                assert np.array_equal(run.weights[weight], start[weight].detach().numpy()), (name, weight)


def _freeze_slices(rank: int, folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The weights of an engine, and of one of another seed that has loaded its checkpoint, at ZeRO-0 and ZeRO-1."""
    frozen.INDEXERS["llama"] = "self_attn.q_proj"
    found = []
    for stage in (0, 1):
        split = {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.zero_stage": stage}
        recipe = tiny_recipe(**split, **{"optim.clip_grad_norm": 0.0})
        plan = plan_of(recipe, 4)
        engine = engine_of(plan)
        trace(engine, range(1), plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        Saver(folder / str(stage), plan, engine).save(TrainerState(step=1, data="key"))
        other = engine_of(plan_of(recipe.with_(**{"train.seed": 99}), 4))
        load(newest(folder / str(stage)), other, plan, "key")
        found.append(
            tuple({name: one.numpy().copy() for name, one in each.named_weights()} for each in (engine, other))
        )
    return found


@pytest.mark.breadth
def test_frozen_slices_of_a_stage_are_saved_and_loaded(tmp_path):
    for saved, loaded in (pair for pairs in run_ranks(4, _freeze_slices, tmp_path) for pair in pairs):
        assert saved.keys() == loaded.keys()
        for name, weight in saved.items():
            assert np.array_equal(loaded[name], weight), name


def _run_frozen(rank: int, family: str, recipes: list[Recipe], folder: Path) -> list[tuple[Trace, dict[str, Any]]]:
    frozen.INDEXERS[family] = "self_attn.q_proj"
    return _run(rank, recipes, folder)


@pytest.mark.parametrize(
    ("family", "split"),
    [
        pytest.param("llama", "parallel.tensor", marks=pytest.mark.slow),
        pytest.param("mixtral", "parallel.expert", marks=pytest.mark.breadth),
    ],
)
def test_frozen_weights_stay_the_same_if_ranks_split_the_model(family, split, tmp_path, monkeypatch):
    """No family of `transformers` is frozen in part and split so today; a model's own code may be."""
    recipe = moe_recipe(family) if family in EXPERTS else tiny_recipe()
    recipe = recipe.with_(**{"parallel.expert": 1, "optim.name": "sgd", "optim.lr": 0.1})
    recipes = [recipe.with_(**{split: 2, "parallel.zero_stage": stage}) for stage in range(4)]
    monkeypatch.setitem(frozen.INDEXERS, family, "self_attn.q_proj")
    expected = _plain(recipe, keeps_frozen=True)
    for runs in run_ranks(2, _run_frozen, family, recipes, tmp_path):
        for stage, (run, loaded) in enumerate(runs):
            _assert_same(f"{split} zero{stage}", run, loaded, *expected)
