"""The reference's log-probabilities: those of the initial weights, computed once, kept, and read again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from llmtrain.data import BatchLoader, Prepared, prepare
from llmtrain.data.cache import Cache
from llmtrain.data.progress import Progress
from llmtrain.engines import build_engine, reference_model
from llmtrain.engines.reference_model import with_references
from llmtrain.models import build_model
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from tests.helpers.harness import run_ranks
from tests.helpers.small_pairs import LENGTH, VOCAB, small_pairs, write_pairs
from tests.helpers.small_verify import CPU, job_of

EXACT = 1e-6
"""Relative: each token's log-probability is off by some units of 2⁻²⁴, and their sum is in fp64."""


def _alone(plan: Plan, prepared: Prepared) -> dict[str, list[float]]:
    """The log-probability of each completion, by a plain forward pass over its conversation alone."""
    model = build_model(plan.recipe, torch.float32, CPU).eval()
    found: dict[str, list[float]] = {"train": [], "eval": []}
    for split, values in found.items():
        view: Any = getattr(prepared.sources[0], split)
        for start, length in zip(view.starts.tolist(), view.lengths.tolist(), strict=True):
            tokens = torch.from_numpy(view.stream.tokens[start : start + length + 1].astype(np.int64))
            trained = torch.from_numpy(view.stream.loss_mask[start + 1 : start + length + 1].copy())
            with torch.no_grad():
                logits = model(tokens[None, :-1]).logits[0]
            taken = log_softmax(logits.double(), -1).gather(1, tokens[1:, None])[:, 0]
            values.append(float(taken[trained].sum()))
    return found


def _references(prepared: Prepared) -> dict[str, list[float]]:
    views: Any = prepared.sources[0]
    return {split: getattr(views, split).references.tolist() for split in ("train", "eval")}


def _work(rank: int, plan: Plan) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float], list[float]]:
    """Log-probabilities as found and as expected; the rewards of a step, and of an evaluation, before any update."""
    prepared = prepare(plan.recipe)
    engine = build_engine(plan, render(plan), CPU)
    known = with_references(engine, plan, prepared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_model, "log_probs", None)  # nothing is computed again
        assert _references(with_references(engine, plan, prepared)) == _references(known)
    batch = BatchLoader.of(plan, known, engine.data_parallel_rank).train_batch(0)
    engine.eval_step(batch)
    evaluated = engine.metric_sums()
    engine.train_step(batch)
    trained = engine.metric_sums()
    assert evaluated is not None
    assert trained is not None
    return _references(known), _alone(plan, prepared), trained.tolist(), evaluated.tolist()


GPT2 = {
    "model.architecture": "gpt2",
    "model.config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCAB},
}
"""With dropout, as it is by default; `small_pairs` turns it off."""


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("dp1-zero2-acc1", 1),
        ("gpt2 dp1-zero2-acc1", 1),
        pytest.param("dp2-zero3-acc2", 2, marks=pytest.mark.breadth),
        pytest.param("dp1-pp2-zero1-acc4", 2, marks=pytest.mark.slow),
        pytest.param("dp1-sp2-zero1-acc4", 2, marks=pytest.mark.breadth),
        pytest.param("dp1-tp2-zero1-acc4", 2, marks=pytest.mark.breadth),
        pytest.param("dp2-fsdp2-acc2", 2, marks=pytest.mark.breadth),
    ],
)
def test_reference_log_probabilities_are_those_of_the_initial_weights(name: str, world: int, tmp_path: Any) -> None:
    recipe = small_pairs(write_pairs(tmp_path, 40))
    if name.startswith("gpt2"):
        recipe = recipe.with_(**GPT2)
    plan = job_of(recipe, [name.split()[-1]]).plans[name.split()[-1]]
    for found, expected, *rewards in run_ranks(world, _work, plan):
        for split, values in expected.items():
            assert found[split] == pytest.approx(values, rel=EXACT)
        for chosen, rejected, right, pairs, _ in rewards:
            # The model is its own reference, so that every log-ratio is rounding.
            assert max(abs(chosen), abs(rejected)) < 1e-4 * pairs
            assert 0 <= right <= pairs


def test_other_weights_have_other_reference_log_probabilities(tmp_path: Any) -> None:
    recipe, cache = small_pairs(write_pairs(tmp_path, 1)), Cache(tmp_path / "cache", Progress())
    identity = reference_model._identity(recipe, cache)
    assert reference_model._identity(recipe.with_(**{"optim.lr": 1.0, "parallel.zero_stage": 3}), cache) == identity
    for field, value in {"train.seed": 2, "parallel.precision": "bf16", "model.config.num_hidden_layers": 3}.items():
        assert reference_model._identity(recipe.with_(**{field: value}), cache) != identity
