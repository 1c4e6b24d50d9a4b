"""The router's loss of a mixture of experts is logged apart from the loss, and is the same under every strategy."""

from __future__ import annotations

import pytest
import torch

from llmtrain.engines.runtime.agree import all_reduce_sum
from llmtrain.models import build_model
from llmtrain.models.documents import document_masks
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from llmtrain.train.metrics.expert_load import expert_load_of
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

FP32 = 1e-5  # as in test_parity.py
RANKS = 2
CASES = (
    {"parallel.zero_stage": 2},
    {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    {"parallel.sequence": 2, "parallel.zero_stage": 1},
    {"parallel.backend": "accelerate"},
)


def _logged(rank: int) -> list[list[float]]:
    found = []
    for fields in CASES:
        plan = plan_of(tiny_recipe(**{"batch.micro_batch_size": 2, **MIXTRAL, **fields}), RANKS)
        engine = engine_of(plan)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        result = engine.train_step(step_batch(0, *shape, engine.data_parallel_rank, plan.data_parallel_size))
        found.append(all_reduce_sum(result.router_loss).tolist())
    return found


def test_the_router_loss_is_the_same_under_every_strategy():
    recipe = tiny_recipe(**MIXTRAL)
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    expected = []
    for batch in step_batch(0, 2, GLOBAL_BATCH // 2).micro_batches:
        with torch.no_grad(), document_masks(batch):
            output = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False)
            expected.append(output.aux_loss.item())
    mean = recipe.model.config["router_aux_loss_coef"] * sum(expected) / len(expected)
    for found in run_ranks(RANKS, _logged):
        assert [part / number for part, number in found] == [pytest.approx(mean, rel=FP32)] * len(CASES)


LOADED = (*CASES, {"parallel.expert": 2, "parallel.zero_stage": 3, "parallel.activation_checkpointing": "full"})


def _loads(rank: int) -> list[float]:
    found = []
    for fields in LOADED:
        plan = plan_of(tiny_recipe(**{"batch.micro_batch_size": 2, **MIXTRAL, **fields}), RANKS)
        engine = engine_of(plan)
        load = expert_load_of(engine, plan)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        engine.train_step(step_batch(0, *shape, engine.data_parallel_rank, plan.data_parallel_size))
        found.append(load.take().item())
    return found


@pytest.mark.slow
def test_the_load_of_the_busiest_expert_is_the_same_under_every_strategy():
    recipe = tiny_recipe(**MIXTRAL)
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    chosen: dict[int, list[torch.Tensor]] = {}
    for batch in step_batch(0, 2, GLOBAL_BATCH // 2).micro_batches:
        with torch.no_grad(), document_masks(batch):
            routers = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).router_logits
        for layer, logits in enumerate(routers):
            chosen.setdefault(layer, []).append(logits.topk(model.num_experts_per_tok).indices.flatten())
    counts = [torch.cat(parts).bincount(minlength=model.num_experts).double() for parts in chosen.values()]
    expected = max((count.max() / count.mean()).item() for count in counts)
    for found in run_ranks(RANKS, _loads):
        assert found == [pytest.approx(expected)] * len(LOADED)


def test_a_router_loss_that_the_configuration_leaves_off_is_noted():
    silent = {name: value for name, value in MIXTRAL.items() if name != "model.config.output_router_logits"}
    for fields, noted in (
        (silent, True),
        (MIXTRAL, False),
        (MIXTRAL | {"model.config.output_router_logits": False}, False),
    ):
        notes = resolve(tiny_recipe(**fields), Cluster()).notes
        assert any(note["rule"] == "model.router_loss" for note in notes) == noted
