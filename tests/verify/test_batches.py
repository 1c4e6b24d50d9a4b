"""What the plans are compared on varies in everything that breaks strategies."""

from __future__ import annotations

import pytest
import torch
from small_verify import STEPS, job_of, small

from llmtrain.data import prepare
from llmtrain.engines.optim import parameter_groups
from llmtrain.models import IGNORE, build_model
from llmtrain.verify.batches import Batches


@pytest.fixture(scope="module")
def recipe(verify_corpus):
    return small(verify_corpus)


@pytest.fixture(scope="module")
def batches(recipe):
    return Batches(recipe, prepare(recipe), STEPS)


def _targets(rows) -> int:
    return int((rows.labels != IGNORE).sum())


def test_micro_batches_and_ranks_have_different_numbers_of_targets(recipe, batches):
    plan = job_of(recipe, ["dp2-zero0-acc2"]).plans["dp2-zero0-acc2"]
    ranks = [list(batches.part(plan, rank)) for rank in range(2)]
    for step in range(STEPS):
        counts = [[_targets(micro) for micro in rank[step].micro_batches] for rank in ranks]
        flat = [count for rank in counts for count in rank]
        assert len(set(flat)) == len(flat) == 4
        assert max(flat) > 1.3 * min(flat)
        assert sum(counts[0]) != sum(counts[1])
        assert {sum(flat)} == {rank[step].target_tokens for rank in ranks}


@pytest.mark.parametrize("name", ["dp2-zero0-acc1", "dp2-zero0-acc2", "dp1-pp2-zero1-acc4"])
def test_a_plan_trains_on_the_samples_of_the_reference(name, recipe, batches):
    plan = job_of(recipe, [name]).plans[name]
    parts = [list(batches.part(plan, rank)) for rank in range(plan.layout.dp)]
    for step, whole in enumerate(batches.whole(recipe.batch.global_batch_size)):
        accumulated = range(plan.batch.gradient_accumulation_steps)
        micros = [part[step].micro_batches[index] for index in accumulated for part in parts]
        for field in ("input_ids", "position_ids", "labels"):
            joined = torch.cat([getattr(micro, field) for micro in micros])
            assert torch.equal(joined, getattr(whole.micro_batches[0], field))


def test_every_sequence_holds_several_documents(batches):
    for batch in batches.whole(8):
        starts = (batch.micro_batches[0].position_ids == 0).sum(dim=1)
        assert (starts >= 2).all()
        assert len({tuple(row) for row in batch.micro_batches[0].position_ids.tolist()}) == 8


def test_other_orders_hold_the_same_samples(batches):
    for own, other in zip(batches.whole(8), batches.whole(8, order=1), strict=True):
        rows, shuffled = (batch.micro_batches[0].input_ids.tolist() for batch in (own, other))
        assert rows != shuffled
        assert sorted(rows) == sorted(shuffled)
        assert own.target_tokens == other.target_tokens


def test_the_small_model_is_tied_and_has_weights_that_decay_and_others(recipe):
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    groups = parameter_groups(model, recipe.optim.weight_decay)
    assert recipe.optim.weight_decay > 0
    assert [group["weight_decay"] > 0 for group in groups] == [True, False]
