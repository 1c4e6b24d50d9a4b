"""Packed documents do not influence each other under any attention: no bit of the logits, and no gradient."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention
from transformers import AutoConfig, masking_utils
from transformers.integrations import flex_attention as integration

from llmtrain.data import Documents, MicroBatch
from llmtrain.engines.forward import forward, varlen_arguments
from llmtrain.models.documents import document_masks, keep_apart
from llmtrain.models.recompute.checkpoints import use_recomputation
from llmtrain.models.tiny.compare import SUM_TOLERANCE, Outcome, deviation, logits_outcome
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.documents_check import mixing_parts_of
from llmtrain.models.tiny.model import build_tiny_model
from llmtrain.recipe import ParallelConfig
from tests.helpers import flash_stand_in
from tools.families import tiny_config

RECURRENT = (
    *("qwen3_next", "mamba2", "jamba", "recurrent_gemma"),
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("kimi_linear", "lfm2_moe")),
)
CPU = torch.device("cpu")
LENGTHS = ((7, 1, 12, 4), (24,), (13, 11))
"""Of the documents in each row."""
FAMILIES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "gpt2": ("gpt2", {}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 1, "num_experts_per_tok": 1}),  # else rows are grouped otherwise
    "bloom": ("bloom", {}),
}


ATTENTIONS = ("eager", "sdpa", "varlen", "flash_attention_2", "flex_attention")
LACKING = {
    "gpt2": ("flex_attention",),
    "gpt_oss": ("sdpa", "flash_attention_2", "flex_attention"),
    "bloom": ("sdpa", "varlen", "flash_attention_2", "flex_attention"),
}
"""What families have not, or not on a CPU."""
CASES = [pair for pair in product(FAMILIES, ATTENTIONS) if pair[1] not in LACKING.get(pair[0], ())]
CASES.append(("llama", "flash_attention_3"))  # which takes other arguments


def _make_runnable(attention: str, patch: pytest.MonkeyPatch) -> list[list[int]]:
    """What is not at hand without a GPU, by definition: FlexAttention as torch writes it down, without its compiler and
    its refusal of gradients; a stand-in for flash-attn, of which the bounds are returned that it gets."""
    block_mask, flex = masking_utils.create_block_mask, flex_attention.flex_attention
    patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    patch.setattr(flex_attention, "_validate_device", lambda *_: None)
    patch.setattr(masking_utils, "create_block_mask", lambda **named: block_mask(**named | {"_compile": False}))
    patch.setattr(integration, "compile_friendly_flex_attention", lambda *q, training, **named: flex(*q, **named))
    return flash_stand_in.install(patch, attention) if attention.startswith("flash") else []


def _positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


def _batch(positions: torch.Tensor | None = None) -> MicroBatch:
    positions = _positions() if positions is None else positions
    return MicroBatch(positions, positions, positions)


def _documents() -> list[tuple[int, slice]]:
    """Row and place of each."""
    ends = [np.cumsum((0, *row)).tolist() for row in LENGTHS]
    return [(row, slice(*bounds)) for row, of_row in enumerate(ends) for bounds in pairwise(of_row)]


def _model(family: str, attention: str):
    architecture, fields = FAMILIES[family]
    config = shrink_configuration(AutoConfig.for_model(architecture), 2, **fields)
    model = build_tiny_model(copy.deepcopy(config), attention).train()
    # A flash kernel is for numbers of 16 bits, which its callers ask for.
    return model.bfloat16() if attention.startswith("flash") else model


def _computed(model, tokens: torch.Tensor, document: tuple[int, slice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and of the loss of one document the gradient of the embeddings."""
    row, place = document
    labels = torch.full_like(tokens, -100)
    labels[row, place] = (tokens[row, place] * 7) % 90
    seen = {}

    def spy(**inputs):
        output = model(**inputs)
        seen["logits"] = output.logits.detach()
        return output

    handle = model.get_input_embeddings().register_forward_hook(lambda *called: seen.update(embedded=called[2]))
    loss, _ = forward(spy, model, MicroBatch(tokens, _positions(), labels), CPU)
    handle.remove()
    return seen["logits"], torch.autograd.grad(loss, seen["embedded"])[0]


def _influence(family: str, attention: str) -> tuple[float, float]:
    """Of any document on any other: the largest change of a logit or of a gradient, and the largest gradient."""
    model = _model(family, attention)
    tokens = torch.randint(3, 90, (len(LENGTHS), sum(LENGTHS[0])), generator=torch.Generator().manual_seed(3))
    changed = changed_by = 0.0
    for row, place in _documents():
        outside = torch.ones_like(tokens, dtype=torch.bool)
        outside[row, place] = False
        others = torch.where(outside, (tokens + 41) % 90, tokens)
        before, gradient = _computed(model, tokens, (row, place))
        after, again = _computed(model, others, (row, place))
        assert gradient[row, place].any(), "a document does not influence itself"
        changed_by = max(changed_by, float(gradient[outside].abs().max()))
        for one, other in ((before, after), (gradient, again)):
            changed = max(changed, float((one - other)[row, place].abs().max()))
    return changed, changed_by


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_document_has_no_influence_on_another(family, attention, monkeypatch):
    told = _make_runnable(attention, monkeypatch)
    assert _influence(family, attention) == (0, 0)
    assert bool(told) == attention.startswith("flash")
    assert all(bounds == Documents.of(_positions()).bounds.tolist() for bounds in told)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_without_boundaries_a_document_influences_another(attention, monkeypatch):
    """The test above would see it: here the bounds are those of the rows."""
    _make_runnable(attention, monkeypatch)
    own, rows = Documents.of, torch.arange(sum(LENGTHS[0])).expand(len(LENGTHS), -1)
    monkeypatch.setattr(Documents, "of", lambda positions: own(rows))
    changed, changed_by = _influence("llama", attention)
    assert changed > 0
    assert changed_by > 0


def test_on_a_cpu_flex_attention_does_not_train():
    """The rule `model.attention_device`; flash-attn is not to be had for one."""
    state = torch.zeros(1, 1, 8, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention.flex_attention(state, state, state)


def test_boundaries_are_those_of_all_rows():
    documents = Documents.of(_positions())
    assert documents.bounds.tolist() == [0, 7, 8, 20, 24, 48, 61, 72]
    assert documents.bounds.dtype == torch.int32
    assert (documents.longest, documents.has_shared_rows) == (24, True)
    assert not Documents.of(torch.arange(5).expand(3, -1)).has_shared_rows


def test_slices_have_the_boundaries_of_the_whole_sequence():
    batch, seen = _batch(), {}

    def call(**inputs):
        seen.update(inputs)
        return SimpleNamespace(logits=torch.zeros(*inputs["input_ids"].shape, 90))

    part = MicroBatch(*(one[:, 12:].contiguous() for one in (batch.input_ids, batch.position_ids, batch.labels)))
    forward(call, _model("llama", "varlen"), part, CPU, whole=batch)
    assert seen["cu_seq_lens_q"].tolist() == batch.documents.bounds.tolist()


def test_other_positions_have_other_documents():
    """What was found of a micro-batch does not go along to one that is made from it."""
    batch = _batch()
    assert batch.documents.bounds.tolist() != [0, 24, 48, 72]
    alone = torch.arange(sum(LENGTHS[0])).expand(len(LENGTHS), -1)
    assert replace(batch, position_ids=alone).documents.bounds.tolist() == [0, 24, 48, 72]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_with_a_mask_gets_no_boundaries(attention):
    assert varlen_arguments(_model("llama", attention), _batch(), CPU) == {}


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrence_computes_each_document_as_alone(family):
    config = tiny_config(family)
    expected = _outcome(build_tiny_model(config, "eager"), is_packed=False)
    model = build_tiny_model(config, "eager")
    mixed = deviation(_outcome(model, is_packed=True), expected)
    assert min(mixed.output, mixed.gradient) > 100 * SUM_TOLERANCE  # a state that is not reset
    keep_apart(model, mixing_parts_of(config))
    apart = deviation(_outcome(model, is_packed=True), expected)
    assert max(apart.output, apart.gradient) <= SUM_TOLERANCE


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_chunks_of_attention_begin_with_their_document(attention):
    """As of each document alone; documents of up to 24 tokens are in chunks of 5."""
    config = tiny_config("llama4_text")
    config.attention_chunk_size, config.floor_scale = 5, 64  # the latter counts tokens of a row in `transformers`
    expected = _outcome(build_tiny_model(config, "eager"), is_packed=False)
    model = build_tiny_model(config, attention)
    result = _outcome(model, is_packed=True) if attention == "sdpa" else _by_boundaries(model)
    found = deviation(result, expected)
    assert max(found.output, found.gradient) <= SUM_TOLERANCE


def _by_boundaries(model) -> Outcome:
    tokens = torch.randint(3, 90, (len(LENGTHS), sum(LENGTHS[0])), generator=torch.Generator().manual_seed(3))
    batch = MicroBatch(tokens, _positions(), tokens)
    inputs = {"position_ids": batch.position_ids, **varlen_arguments(model, batch, CPU)}
    logits = model(input_ids=tokens, use_cache=False, **inputs).logits.flatten(0, 1)
    return logits_outcome(model, logits, None, zeros=True)


def _outcome(model, is_packed: bool) -> Outcome:
    """Logits, [tokens, vocab], and gradients. Recomputed in the backward pass, outside of the batch's context."""
    tokens = torch.randint(3, 90, (len(LENGTHS), sum(LENGTHS[0])), generator=torch.Generator().manual_seed(3))
    batch = MicroBatch(tokens, _positions(), tokens)
    model = copy.deepcopy(model).train()
    use_recomputation(model, ParallelConfig(activation_checkpointing="full"))
    if is_packed:
        with document_masks(batch):
            logits = model(input_ids=tokens, position_ids=batch.position_ids, use_cache=False).logits.flatten(0, 1)
    else:
        rows = [(tokens[row, place][None], torch.arange(place.stop - place.start)[None]) for row, place in _documents()]
        parts = [model(input_ids=one, position_ids=positions, use_cache=False).logits[0] for one, positions in rows]
        logits = torch.cat(parts)
    return logits_outcome(model, logits, None, zeros=True)
