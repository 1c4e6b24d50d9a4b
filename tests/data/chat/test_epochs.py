"""In each epoch, every conversation is read exactly once, whatever the ranks and the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.data import BatchLoader, Prepared, prepare, with_max_steps
from llmtrain.data.samples import NO_TARGET
from llmtrain.errors import RecipeError
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from llmtrain.run_dir import forbidden_changes
from tests.helpers.chat_tokenizers import Case, case
from tests.helpers.small_chats import ROWS, recipe

EPOCHS = 3
BATCH = 8


@pytest.fixture
def made(tmp_path: Path) -> Recipe:
    one: Case = case("chatml", tmp_path / "tokenizer")
    first = recipe(one, ROWS[:37], packing="none")
    (tmp_path / "rows.jsonl").rename(tmp_path / "first.jsonl")
    declared = recipe(one, ROWS[37:], packing="none")
    sources = [{"name": str(tmp_path / name)} for name in ("first.jsonl", "rows.jsonl")]
    return declared.with_(
        **{
            "data.sources": sources,
            "train.epochs": EPOCHS,
            "train.max_steps": None,
            "batch.global_batch_size": BATCH,
            "model.config": {**first.model.config, "hidden_size": 16, "num_attention_heads": 2},
        }
    )


def loader_of(prepared: Prepared, rank: int = 0, ranks: int = 1, micro: int = 2) -> BatchLoader:
    sizes = {"micro_batch_size": micro, "gradient_accumulation_steps": BATCH // micro // ranks}
    end = 60 * EPOCHS
    return BatchLoader(prepared, seed=1, global_batch_size=BATCH, dp_rank=rank, dp_size=ranks, ends_after=end, **sizes)


def read(prepared: Prepared, steps: int, ranks: int) -> list[list[tuple[int, ...]]]:
    """The conversations of each step, over all ranks."""
    found: list[list[tuple[int, ...]]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        batches = loader_of(prepared, rank, ranks).train_batches(0)
        for step, batch in zip(range(steps), batches, strict=False):
            for micro in batch.micro_batches:
                assert len(micro.labels) == 2
                has_targets = (micro.labels != NO_TARGET).any(dim=1)
                found[step] += [tuple(row.tolist()) for row in micro.input_ids[has_targets]]
        batches.close()  # type: ignore[attr-defined]
    return found


def test_any_number_of_ranks_reads_every_conversation_once_per_epoch(made: Recipe) -> None:
    prepared = prepare(made)
    plan = with_max_steps(resolve(made, Cluster()), prepared)
    assert plan.recipe.train.max_steps == -(-60 * EPOCHS // BATCH) == 23
    steps = [read(prepared, 23, ranks) for ranks in (1, 2, 4)]
    assert [sorted(step) for step in steps[0]] == [sorted(step) for step in steps[1]]
    assert [sorted(step) for step in steps[0]] == [sorted(step) for step in steps[2]]
    assert len(steps[0][-1]) == 60 * EPOCHS % BATCH
    flat = [one for step in steps[0] for one in step]
    for epoch in range(EPOCHS):
        assert len(set(flat[60 * epoch : 60 * (epoch + 1)])) == 60
    assert flat[:60] != flat[60:120]


@pytest.mark.parametrize(("epochs", "sequences"), [(2.5, 150), (0.1, 6), (1, 60)])
def test_epochs_may_be_a_fraction(made: Recipe, epochs: float, sequences: int) -> None:
    prepared = prepare(made)
    plan = with_max_steps(resolve(made.with_(**{"train.epochs": epochs}), Cluster()), prepared)
    steps = plan.recipe.train.steps
    assert steps == -(-sequences // BATCH)
    loader = BatchLoader.of(plan, prepared, 0)
    assert sum(loader.train_batch(step * BATCH).samples for step in range(steps)) == sequences


def test_the_last_step_counts_its_own_targets_and_any_step_may_be_the_first(made: Recipe) -> None:
    prepared = prepare(made)
    ahead: Any = loader_of(prepared).train_batches(0)
    batches = [next(ahead) for _ in range(25)]
    ahead.close()
    assert [batch.samples for batch in batches[21:25]] == [BATCH, 4, BATCH, BATCH]
    assert batches[23].first_sample == 60 * EPOCHS
    for batch in batches:
        seen = sum(int((micro.labels != NO_TARGET).sum()) for micro in batch.micro_batches)
        assert batch.target_tokens == seen
        alone = loader_of(prepared).train_batch(batch.first_sample)
        assert (alone.target_tokens, alone.samples) == (seen, batch.samples)


def test_the_proportions_are_those_of_the_sources(made: Recipe) -> None:
    prepared = prepare(made)
    assert [source.weight for source in prepared.sources] == [37, 23]
    assert prepared.key != prepare(made.with_(**{"train.epochs": None, "train.max_steps": 9})).key
    sources, _ = loader_of(prepared).sample_ids(0, 60)
    assert np.bincount(sources).tolist() == [37, 23]


def test_only_one_of_epochs_and_max_steps_may_be_set(tmp_path: Path) -> None:
    own = ["recipes/tiny.py", ["train.epochs=2", "data.sources.0.weight=2.0"]]
    with pytest.raises(RecipeError, match=r"train.max_steps=null(.|\n)*reads every sequence of 'stdlib' once"):
        load_recipe(*own)  # type: ignore[arg-type]
    declared, _ = load_recipe("recipes/tiny.py", ["train.epochs=2", "train.max_steps=null"])
    assert declared.train.epochs == 2
    with pytest.raises(RecipeError, match="give either `max_steps` or `epochs`"):
        load_recipe("recipes/tiny.py", ["train.max_steps=null"])


def test_a_run_of_epochs_keeps_its_batch(made: Recipe) -> None:
    other = made.with_(**{"batch.global_batch_size": 4, "train.epochs": 5})
    assert [one.field for one in forbidden_changes(made, other, "the run")] == ["batch.global_batch_size"]
    steps = {"train.max_steps": 9, "train.epochs": None}
    assert not forbidden_changes(made.with_(**steps), other.with_(**steps), "the run")
