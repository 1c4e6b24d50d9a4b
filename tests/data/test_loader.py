"""The samples of a step depend on the seed and the step alone, not on the layout, the batch or the restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from llmtrain import Custom
from llmtrain.data import BatchLoader, Prepared, StepBatch, prepare
from llmtrain.data.items import Items
from llmtrain.data.loader import rows_of
from llmtrain.errors import DataError, Exit
from tests.helpers import own_losses
from tests.helpers.batches import tiny_recipe
from tests.helpers.small_corpora import MakeRecipe, make_texts, whole_batches, write_jsonl


@pytest.fixture
def prepared(make_recipe: MakeRecipe, tmp_path: Path) -> Prepared:
    first = write_jsonl(tmp_path / "first.jsonl", make_texts(200, 1))
    second = write_jsonl(tmp_path / "second.jsonl", make_texts(100, 2))
    return prepare(make_recipe({"name": str(first), "weight": 3.0}, {"name": str(second), "weight": 1.0}))


def loader_of(
    prepared: Prepared, rank: int = 0, size: int = 1, micro: int = 4, steps: int = 2, **more: Any
) -> BatchLoader:
    return BatchLoader(
        prepared,
        **{
            "seed": 7,
            "global_batch_size": micro * steps * size,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": steps,
            "dp_rank": rank,
            "dp_size": size,
            **more,
        },
    )


@pytest.mark.parametrize("limit", [None, 3])
def test_bytes_of_evaluated_targets_are_counted(prepared: Prepared, limit: int | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    batches = loader_of(prepared).eval_batches(limit)
    targets = [label for batch in batches for one in batch.micro_batches for label in one.labels.flatten().tolist()]
    text = tokenizer.convert_ids_to_tokens([label for label in targets if label >= 0], skip_special_tokens=True)
    assert loader_of(prepared).eval_bytes(limit) == sum(map(len, text)) > 0  # a character of a token is a byte


def rows(batches: list[StepBatch], field: str = "input_ids") -> list[torch.Tensor]:
    """All rows of some ranks' parts of a step, in the order of the global batch."""
    steps = len(batches[0].micro_batches)
    return [row for step in range(steps) for batch in batches for row in getattr(batch.micro_batches[step], field)]


LAYOUTS = [(1, 8, 1), (1, 2, 4), (2, 2, 2), (4, 2, 1), (2, 4, 1), (8, 1, 1)]


@pytest.mark.parametrize(("size", "micro", "steps"), LAYOUTS)
def test_the_samples_of_a_step_do_not_depend_on_the_layout(
    prepared: Prepared, size: int, micro: int, steps: int
) -> None:
    reference = loader_of(prepared, micro=8, steps=1).train_batch(16)
    parts = [loader_of(prepared, rank, size, micro, steps).train_batch(16) for rank in range(size)]
    for field in ("input_ids", "position_ids", "labels"):
        assert torch.equal(torch.stack(rows(parts, field)), torch.stack(rows([reference], field)))
    assert {(part.target_tokens, part.samples, part.first_sample) for part in parts} == {
        (reference.target_tokens, 8, 16)
    }
    assert reference.target_tokens == sum(int((row != -100).sum()) for row in rows([reference], "labels"))


@pytest.mark.parametrize("unit", ["token", "document"])
@pytest.mark.parametrize("count", [None, own_losses.count_even, own_losses.count_nothing])
def test_every_rank_counts_the_items_of_the_global_batch(prepared: Prepared, unit: Any, count: Any) -> None:
    items = Items(tiny_recipe(objective=Custom(own_losses.token_sum, unit=unit, count=count)))
    parts = [loader_of(prepared, rank, size=4, items=items).train_batch(16) for rank in range(4)]
    documents = sum(
        int(((one.position_ids == 0) & (one.labels >= 0)).sum()) for part in parts for one in part.micro_batches
    )
    even = sum(own_losses.count_even(one.labels) for part in parts for one in part.micro_batches)
    expected = {own_losses.count_even: even, own_losses.count_nothing: 0}.get(count, documents)
    if unit == "token" and count is None:
        expected = parts[0].target_tokens
    assert {part.num_items for part in parts} == {expected}
    assert {part.divisor for part in parts} == {max(expected, 1)}
    (evaluated, *_) = loader_of(prepared, items=items).eval_batches(3)
    assert (evaluated.num_items == 0) == (count is own_losses.count_nothing)


def test_the_order_does_not_depend_on_the_batch_size(prepared: Prepared) -> None:
    small, large = loader_of(prepared, micro=1, steps=1), loader_of(prepared, micro=8, steps=2)
    one_by_one = [rows([small.train_batch(cursor)])[0] for cursor in range(16)]
    assert torch.equal(torch.stack(one_by_one), torch.stack(rows([large.train_batch(0)])))


def test_an_epoch_reads_each_sequence_once_and_the_next_in_another_order(
    make_recipe: MakeRecipe, corpus_file: Path
) -> None:
    plan = loader_of(prepared := prepare(make_recipe(corpus_file)))
    size = prepared.train_sequences
    _, epochs = plan.sample_ids(0, 2 * size)
    first, second = epochs[:size].tolist(), epochs[size:].tolist()
    assert sorted(first) == sorted(second) == list(range(size))
    assert first != second
    assert first != list(range(size))
    assert loader_of(prepared, seed=8).sample_ids(0, size)[1].tolist() != first


def test_sources_are_mixed_by_weight(prepared: Prepared) -> None:
    sources, _ = loader_of(prepared).sample_ids(0, 400)
    assert [(sources == number).sum() for number in (0, 1)] == [300, 100]


def test_any_position_is_reached_directly(prepared: Prepared) -> None:
    plan = loader_of(prepared)
    started = time.perf_counter()
    far = plan.train_batch(10**12)
    assert time.perf_counter() - started < 1
    assert torch.equal(rows([far])[0], rows([loader_of(prepared, micro=1, steps=1).train_batch(10**12)])[0])


def test_batches_follow_each_other_from_the_cursor(prepared: Prepared) -> None:
    plan = loader_of(prepared)
    batches = plan.train_batches(24)
    for cursor in (24, 32, 40):
        batch = next(batches)
        assert batch.first_sample == cursor
        assert torch.equal(torch.stack(rows([batch])), torch.stack(rows([plan.train_batch(cursor)])))
    batches.close()  # type: ignore[attr-defined]


def test_tensors_have_the_documented_shapes_and_types(prepared: Prepared) -> None:
    batch = loader_of(prepared).train_batch(0)
    assert len(batch.micro_batches) == 2
    for micro in batch.micro_batches:
        for tensor in (micro.input_ids, micro.position_ids, micro.labels):
            assert tensor.shape == (4, 32)
            assert tensor.dtype == torch.int64
        assert int(micro.input_ids.max()) < prepared.vocab_size


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("limit", [None, 1, 5])
def test_evaluation_reads_each_sequence_once_and_pads(prepared: Prepared, size: int, limit: int | None) -> None:
    parts = [list(loader_of(prepared, rank, size, micro=4).eval_batches(limit)) for rank in range(size)]
    total = prepared.eval_sequences() if limit is None else limit
    assert len({len(part) for part in parts}) == 1
    assert sum(batch.samples for batch in parts[0]) == total
    assert any(batch.samples < 4 * size for batch in parts[0])  # so that there is something to pad
    seen: set[tuple[int, ...]] = set()
    for step in zip(*parts, strict=True):
        labels = rows(list(step), "labels")
        count = step[0].samples
        assert all((row != -100).any() for row in labels[:count])
        assert all((row == -100).all() for row in labels[count:])
        assert step[0].target_tokens == sum(int((row != -100).sum()) for row in labels)
        seen |= {tuple(row.tolist()) for row in labels[:count]}
    assert len(seen) == total


def test_a_batch_of_an_evaluation_is_of_one_source(prepared: Prepared) -> None:
    batches = list(loader_of(prepared, micro=4).eval_batches())
    names = [batch.eval_source for batch in batches]
    assert names == sorted(names, key=[source.name for source in prepared.evaluated()].index)
    for source in prepared.evaluated():
        own = {tuple(row.tolist()) for row in torch.from_numpy(source.eval.read(np.arange(len(source.eval))).labels)}
        mine = [batch for batch in batches if batch.eval_source == source.name]
        assert sum(batch.samples for batch in mine) == len(source.eval)
        assert {tuple(row.tolist()) for batch in mine for row in rows([batch], "labels")[: batch.samples]} == own


def test_evaluation_does_not_depend_on_seed_or_layout(prepared: Prepared) -> None:
    one = [row for batch in loader_of(prepared, micro=4).eval_batches() for row in rows([batch])[: batch.samples]]
    parts = [list(loader_of(prepared, rank, 2, micro=2, seed=99).eval_batches()) for rank in range(2)]
    two = [row for step in zip(*parts, strict=True) for row in rows(list(step))[: step[0].samples]]
    assert torch.equal(torch.stack(one), torch.stack(two))


def test_a_short_evaluation_includes_all_sources(prepared: Prepared) -> None:
    order = prepared.eval_order()
    assert set(order.sources[: len(order) // 2].tolist()) == {0, 1}


def test_the_unigram_loss_is_that_of_the_counts(prepared: Prepared) -> None:
    counts = torch.ones(prepared.vocab_size, dtype=torch.float64)
    for source in prepared.sources:
        counts += torch.bincount(
            torch.from_numpy(source.store.streams["train"].tokens.astype("int64")), minlength=prepared.vocab_size
        )
    loss = -(counts / counts.sum()).log()
    for limit in (None, 5):
        labels = torch.cat([row for b in loader_of(prepared).eval_batches(limit) for row in rows([b], "labels")])
        expected = loss[labels[labels >= 0]].mean().item()
        assert prepared.unigram_loss(limit) == pytest.approx(expected, rel=1e-12)


def test_a_corpus_shorter_than_a_batch_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", make_texts(5))
    prepared = prepare(make_recipe(few, eval_fraction=0.0))
    with pytest.raises(DataError, match=rf"{prepared.train_sequences} training sequences .* takes 800") as caught:
        loader_of(prepared, micro=400)
    assert caught.value.exit_code == Exit.DATA == 3
    assert caught.value.problems[0].rule == "data.short"


def test_the_noise_of_a_sample_has_the_same_seed_on_any_rank(prepared: Prepared) -> None:
    sizes = {"seed": 3, "global_batch_size": 8, "neftune_alpha": 5.0}
    alone = BatchLoader(prepared, **sizes, micro_batch_size=8, gradient_accumulation_steps=1, dp_rank=0, dp_size=1)
    [whole] = alone.train_batch(16).micro_batches
    seeds = [0] * 8
    for rank in range(2):
        part = BatchLoader(
            prepared, **sizes, micro_batch_size=2, gradient_accumulation_steps=2, dp_rank=rank, dp_size=2
        ).train_batch(16)
        for step, micro in enumerate(part.micro_batches):
            seeds[rows_of(step, rank, 2, 2)] = micro.noise.seeds
    assert tuple(seeds) == whole.noise.seeds
    assert len({*alone.train_batch(24).micro_batches[0].noise.seeds, *seeds}) == 16
    assert next(iter(alone.eval_batches())).micro_batches[0].noise is None
    assert whole_batches(prepared).train_batch(0).micro_batches[0].noise is None
