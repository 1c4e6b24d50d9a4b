"""Metrics of one's own are those of all target tokens of the global batch, on every rank, under every layout."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from llmtrain import Custom, EvalConfig
from llmtrain.engines import forward
from llmtrain.models import build_model, own_metrics
from llmtrain.recipe import Recipe
from tests.helpers.batches import CLASSIFIER, MIXTRAL, global_batch, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.own_losses import hidden_tokens
from tests.helpers.own_metrics import accuracy, entropy_of_even, probability
from tests.helpers.traces import engine_of, plan_of

METRICS = {"hits": accuracy, "probability": probability, "even": entropy_of_even}
CHUNK = 24
"""Tokens of a chunk, which does not divide those of a micro-batch."""
CHUNKED = {"kernels.loss": "chunked", "batch.micro_batch_size": 2}
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2}
FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
HIDDEN = {"objective": Custom(hidden_tokens, hidden_states=True)}
OF_CLASSES = {**CLASSIFIER, "evaluation": EvalConfig(every_steps=5, metrics={"hits": accuracy})}
Z_LOSS = {"objective": Custom("llmtrain.objectives:z_loss", weight=0.01)}
LAYOUTS = {
    "stages": STAGES,
    "stages, chunks": {**STAGES, **CHUNKED},
    "data": {"parallel.zero_stage": 2},
    "slices": {"parallel.sequence": 2, "parallel.zero_stage": 2},
    "tensor, chunks": {"parallel.tensor": 2, **CHUNKED},
    "zero3, chunks": {"parallel.zero_stage": 3, **CHUNKED},
    "zero3, own loss, chunks": {"parallel.zero_stage": 3, **Z_LOSS, **CHUNKED},
    "zero3, hidden states": {"parallel.zero_stage": 3, **HIDDEN},
    "stages, hidden states": {**STAGES, **HIDDEN},
    "classes": OF_CLASSES,
    "experts": {**MIXTRAL, "parallel.expert": 2, "parallel.zero_stage": 2},
    "DDP": {"parallel.backend": "accelerate"},
    "FSDP2": FSDP2,
    "FSDP2, hidden states": {**FSDP2, **HIDDEN},
}
ALONE = {"data_parallel": {"parallel.backend": "data_parallel"}, "compiled": {**CHUNKED, "kernels.loss": "compiled"}}


def _recipe(fields: dict) -> Recipe:
    return tiny_recipe(**{"evaluation": EvalConfig(every_steps=5, metrics=METRICS), **fields})


@torch.no_grad()
def _expected(recipe: Recipe) -> dict[str, float]:
    """Calls the metrics once, with the logits of all target tokens, each document computed alone."""
    model = build_model(recipe, torch.float32, torch.device("cpu")).eval()
    logits, labels = [], []
    for sample in global_batch(1):
        bounds = [*torch.nonzero(sample.position_ids[0] == 0).flatten().tolist(), sample.input_ids.shape[1]]
        for begin, end in pairwise(bounds):
            kept = sample.labels[0, begin:end] >= 0
            logits.append(model(sample.input_ids[:, begin:end], use_cache=False).logits[0, kept])
            labels.append(sample.labels[0, begin:end][kept])
    functions = {name: METRICS[name] for name in recipe.evaluation.metrics}
    pairs = {name: function(torch.cat(logits), torch.cat(labels)) for name, function in functions.items()}
    return {name: float(total / count) for name, (total, count) in pairs.items()}


def _evaluated(rank: int, ranks: int, layouts: dict) -> dict[str, dict[str, float]]:
    """The metrics of the second of two batches, before any update."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "CHUNK_TOKENS", CHUNK)
        patch.setattr(own_metrics, "CHUNK_TOKENS", CHUNK - 1)
        for name, fields in layouts.items():
            plan = plan_of(_recipe(fields), ranks)
            engine, sizes = engine_of(plan), (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
            for step in (2, 1):
                engine.eval_step(step_batch(step, *sizes, engine.data_parallel_rank, plan.data_parallel_size))
            found[name] = engine.own_metrics.means(engine.own_metric_sums().tolist())
    return found


def _check(found: list[dict], layouts: dict) -> None:
    for of_rank in found:
        for name, fields in layouts.items():
            assert of_rank[name] == pytest.approx(_expected(_recipe(fields)), rel=1e-5), name


@pytest.mark.parametrize(
    "names", [tuple(LAYOUTS)[:2], pytest.param(tuple(LAYOUTS)[2:], marks=pytest.mark.breadth)], ids=["stages", "others"]
)
def test_metrics_are_those_of_whole_documents_under_every_layout(names):
    layouts = {name: LAYOUTS[name] for name in names}
    _check(run_ranks(2, _evaluated, 2, layouts, timeout=300), layouts)


def test_metrics_are_those_of_whole_documents_in_one_process():
    _check(run_ranks(1, _evaluated, 1, ALONE), ALONE)


def _losses(rank: int, metrics: dict) -> list[float]:
    plan = plan_of(tiny_recipe(evaluation=EvalConfig(every_steps=5, metrics=metrics), **CHUNKED), 1)
    engine, losses = engine_of(plan), []
    for step in range(3):
        losses.append(engine.train_step(step_batch(step, 2, 4)).loss.item())
        losses.append(engine.eval_step(step_batch(9, 2, 4)).item())
    return losses


def test_training_and_the_loss_of_evaluations_do_not_change_by_a_bit():
    with_metrics, without = (run_ranks(1, _losses, metrics)[0] for metrics in (METRICS, {}))
    assert with_metrics == without
