"""The batches as a model of `transformers` reads them: targets, and attention between documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.data import MicroBatch, prepare
from tests.helpers.small_corpora import MakeRecipe, whole_batches


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attn_implementation=request.param,
    )
    return LlamaForCausalLM(config).eval()


def first_batch(make_recipe: MakeRecipe, corpus_file: Path, **data: object) -> MicroBatch:
    prepared = prepare(make_recipe(corpus_file, sequence_length=64, **data))
    loader = whole_batches(prepared)
    return loader.train_batch(0).micro_batches[0]


def logits(model: LlamaForCausalLM, batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=inputs, position_ids=batch.position_ids, use_cache=False).logits


def boundary(batch: MicroBatch) -> tuple[int, int]:
    """A row and a place in it where a second document begins."""
    places = (batch.position_ids[:, 1:] == 0).nonzero()
    assert len(places)
    return int(places[0, 0]), int(places[0, 1]) + 1


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_no_document_is_influenced_by_another(
    model: LlamaForCausalLM, make_recipe: MakeRecipe, corpus_file: Path, packing: str
) -> None:
    batch = first_batch(make_recipe, corpus_file, packing=packing)
    row, place = boundary(batch)
    changed = batch.input_ids.clone()
    changed[row, :place] = (changed[row, :place] + 17) % 300
    before, after = logits(model, batch, batch.input_ids), logits(model, batch, changed)
    assert torch.equal(before[row, place:], after[row, place:])
    assert not torch.equal(before[row, :place], after[row, :place])


def test_a_packed_document_is_computed_as_if_alone(
    model: LlamaForCausalLM, make_recipe: MakeRecipe, corpus_file: Path
) -> None:
    batch = first_batch(make_recipe, corpus_file)
    row, place = boundary(batch)
    packed = logits(model, batch, batch.input_ids)[row, :place]
    with torch.no_grad():
        alone = model(input_ids=batch.input_ids[row : row + 1, :place], use_cache=False).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_without_the_mask_documents_do_influence_each_other(
    model: LlamaForCausalLM, make_recipe: MakeRecipe, corpus_file: Path
) -> None:
    row, place = boundary(first_batch(make_recipe, corpus_file))
    batch = first_batch(make_recipe, corpus_file, mask_documents=False)
    assert torch.equal(batch.position_ids, torch.arange(64).expand(8, 64))
    changed = batch.input_ids.clone()
    changed[row, :place] = (changed[row, :place] + 17) % 300
    assert not torch.equal(
        logits(model, batch, batch.input_ids)[row, place:], logits(model, batch, changed)[row, place:]
    )


def test_labels_are_the_shifted_inputs_that_transformers_would_make(
    model: LlamaForCausalLM, make_recipe: MakeRecipe, corpus_file: Path
) -> None:
    batch = first_batch(make_recipe, corpus_file, packing="concat", mask_documents=False)
    ours = cross_entropy(
        logits(model, batch, batch.input_ids)[:, :-1].reshape(-1, 300), batch.labels[:, :-1].reshape(-1)
    )
    with torch.no_grad():
        theirs = model(input_ids=batch.input_ids, labels=batch.input_ids, use_cache=False).loss
    torch.testing.assert_close(ours, theirs)
