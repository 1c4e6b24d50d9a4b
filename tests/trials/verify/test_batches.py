"""The batches for comparing plans vary in everything that strategies may handle incorrectly."""

from __future__ import annotations

import pytest
import torch

from llmtrain.data import NO_TARGET, prepare
from llmtrain.engines.optim import parameter_groups
from llmtrain.models import build_model
from llmtrain.trials.verify.batches import Batches
from llmtrain.trials.verify.reference import count_targets
from tests.helpers.small_verify import STEPS, job_of, small


@pytest.fixture(scope="module")
def recipe(verify_corpus):
    return small(verify_corpus)


@pytest.fixture(scope="module")
def batches(recipe):
    return Batches(recipe, prepare(recipe), STEPS)


def _rows(sequences, field: str) -> torch.Tensor:
    return torch.stack([torch.cat([getattr(one, field) for one in documents]) for documents in sequences])


def _targets(rows) -> int:
    return int((rows.labels != NO_TARGET).sum())


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
    parts = [list(batches.part(plan, rank)) for rank in range(plan.data_parallel_size)]
    for step, whole in enumerate(batches.whole()):
        accumulated = range(plan.batch.gradient_accumulation_steps)
        micros = [part[step].micro_batches[index] for index in accumulated for part in parts]
        rows = {name: torch.cat([getattr(micro, name) for micro in micros]) for name in ("input_ids", "labels")}
        positions = torch.cat([micro.position_ids for micro in micros])
        assert torch.equal(rows["input_ids"], _rows(whole, "inputs"))
        assert torch.equal(rows["labels"], _rows(whole, "targets"))
        assert positions.tolist() == [[at for one in row for at in range(len(one.inputs))] for row in whole]
        assert {part[step].target_tokens for part in parts} == {count_targets(whole)}


@pytest.mark.parametrize("sources", [0, 1])
def test_a_plan_is_evaluated_on_the_sequences_of_the_reference(sources, recipe, verify_corpus):
    if sources:  # beside which nothing is held out
        named = [{"name": str(verify_corpus)}]
        recipe = recipe.with_(**{"evaluation.sources": named, "evaluation.every_steps": STEPS, "data.eval_fraction": 0})
    prepared = prepare(recipe)
    assert len(prepared.evaluation_sources) == sources
    batches = Batches(recipe, prepared, STEPS)
    plan = job_of(recipe, ["dp1-zero0-acc1"]).plans["dp1-zero0-acc1"]
    micros = [micro for batch in batches.eval_batches(plan, 0) for micro in batch.micro_batches]
    held_out = batches.held_out()
    rows = torch.cat([micro.input_ids for micro in micros])[: len(held_out)]
    assert sorted(rows.tolist()) == sorted(_rows(held_out, "inputs").tolist())
    assert sum(_targets(micro) for micro in micros) == count_targets(held_out)


def test_every_sequence_holds_several_documents(batches):
    for sequences in batches.whole():
        lengths = {tuple(len(one.inputs) for one in documents) for documents in sequences}
        assert len(lengths) == 8
        assert all(len(one) >= 2 for one in lengths)


def test_other_orders_hold_the_same_samples(batches):
    for own, other in zip(batches.whole(), batches.whole(order=1), strict=True):
        rows, shuffled = (_rows(sequences, "inputs").tolist() for sequences in (own, other))
        assert rows != shuffled
        assert sorted(rows) == sorted(shuffled)


def test_the_small_model_is_tied_and_has_weights_that_decay_and_others(recipe):
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    groups = parameter_groups(model, recipe.optim.weight_decay)
    assert recipe.optim.weight_decay > 0
    assert [group["weight_decay"] > 0 for group in groups] == [True, False]
