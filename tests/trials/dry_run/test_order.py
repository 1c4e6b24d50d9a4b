"""The order that a dry run reports is the one that ranks read, and its random documents are packed as documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llmtrain.data import BatchLoader, find_prepared, prepare
from llmtrain.data.synthetic import synthetic
from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict.links import Groups
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from llmtrain.trials.dry_run.order import MICRO_BATCHES, REPLICAS, ROWS, first_batches

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Two corpora, three to one."""
    folder = tmp_path_factory.mktemp("order")
    sources = []
    for number, weight in enumerate((3.0, 1.0)):
        path = folder / f"{number}.jsonl"
        texts = (f"document {number} {place} " + "word " * (place % 40) for place in range(600))
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"name": str(path), "weight": weight})
    fields = {"data.sources": sources, "data.cache_dir": str(folder / "cache"), "data.sequence_length": 64}
    fields |= {"data.tokenizer": {"vocab_size": 300}, "batch.global_batch_size": 24, "batch.micro_batch_size": 2}
    return load_recipe(str(ROOT / "recipes/tiny.py"), [])[0].with_(**fields)


def test_the_reported_order_is_that_of_the_ranks(recipe):
    assert find_prepared(recipe) is None
    prepared = prepare(recipe)
    found = find_prepared(recipe)
    assert found is not None
    assert not found.made
    plan = resolve(recipe.with_(**{"parallel.tensor": 2}), Cluster(devices_per_node=6))
    order = first_batches(plan, found)
    assert order.is_prepared
    assert order.ranks == ((0, 1), (2, 3), (4, 5))
    for read in order.reads:
        loader = BatchLoader.of(plan, prepared, read.data_rank)
        rows = loader.train_batch((read.step - 1) * 24).micro_batches[read.micro_batch]
        for row, (source, sequence) in enumerate(zip(read.sources, read.sequences, strict=True)):
            expected = prepared.sources[source].train.read(torch.tensor([sequence]).numpy())
            assert rows.input_ids[row].tolist() == expected.input_ids[0].tolist()
    # Without the data: the same samples of the same sources.
    unknown = first_batches(plan, None)
    assert not unknown.is_prepared
    assert [(one.first, one.sources) for one in unknown.reads] == [(one.first, one.sources) for one in order.reads]
    assert {sequence for one in unknown.reads for sequence in one.sequences} == set()


def test_the_report_of_large_plans_is_short(recipe):
    batch = {"batch.global_batch_size": 10**11, "batch.micro_batch_size": 10**6}
    plan = resolve(recipe.with_(**batch), Cluster(nodes=125, devices_per_node=8))
    order = first_batches(plan, None)
    assert len(order.ranks) == REPLICAS
    assert len(order.reads) == 2 * REPLICAS * MICRO_BATCHES
    assert {len(read.sources) for read in order.reads} == {ROWS}
    assert order.reads[MICRO_BATCHES].first == 10**6


def test_reported_ranks_are_those_of_the_groups(recipe):
    fields = {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.sequence": 2, "parallel.zero_stage": 1}
    plan = resolve(recipe.with_(**fields), Cluster(devices_per_node=24))
    groups, order = Groups.of(plan), first_batches(plan, None)
    assert sorted(rank for ranks in order.ranks for rank in ranks) == list(range(24))
    for ranks in order.ranks:
        # Whole tensor and sequence groups, and every stage of their pipelines.
        assert ranks[: groups.tensor.size * groups.heads.size * groups.ring.size] == tuple(
            range(ranks[0], ranks[0] + 4)
        )
        assert ranks[4] == ranks[0] + groups.pipeline.stride


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_random_documents_are_packed_as_the_recipe_says(recipe, packing, tmp_path):
    small = recipe.with_(**{"data.packing": packing, "data.tokenizer": {"vocab_size": 99}})
    prepared = synthetic(small, tmp_path)
    assert [source.weight for source in prepared.sources] == [3.0, 1.0]
    assert synthetic(small, tmp_path).key == prepared.key
    train = prepared.sources[0].train
    rows = train.read(torch.arange(len(train)).numpy())
    assert rows.input_ids.max() < 99
    starts = (rows.position_ids == 0).sum(axis=1)
    assert starts.max() > 1
    targets = (rows.labels >= 0).sum(axis=1)
    assert (len(set(targets.tolist())) > 1) == (packing == "best_fit")
    assert prepared.eval_sequences() > 8
