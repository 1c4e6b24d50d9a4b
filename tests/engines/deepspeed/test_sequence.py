"""Sequence parallelism: slices of sequences match the plain loop over whole sequences."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.deepspeed.handover import Neighbors
from llmtrain.engines.deepspeed.sequence_check import check_sequence
from llmtrain.errors import FamilyError, RecipeError
from llmtrain.models import model_configuration
from llmtrain.models.tiny import documents_check
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import assemble
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, T, global_batch, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import INDEXED
from tests.helpers.traces import Trace, engine_of, plain_run, plan_of, trace, worst

STEPS = 6
FP32 = 1e-5
"""As for data parallelism: the same sums in another order."""

SGD = {"optim.name": "sgd", "optim.lr": 0.1}
"""Adam forgets the scale of a gradient; only here does a wrong clipping show in the weights."""
THREE_KEY_HEADS = {
    "model.config.hidden_size": 96,
    "model.config.num_attention_heads": 6,
    "model.config.num_key_value_heads": 3,
}
"""Key heads that two ranks can neither share nor copy once each."""
GPT2 = {
    "model.architecture": "gpt2",
    "model.config": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": T}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}

GPT_NEO = {
    "model.architecture": "gpt_neo",
    "model.attention": "eager",
    "model.config": {"vocab_size": 256, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "window_size": 5}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}
    | {"attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0},
}
"""It computes attention itself, so its ranks exchange what the projections return."""
INDEXED_ROWS = {"model.architecture": "deepseek_v32", "model.config": INDEXED | {"index_n_heads": 32}}
"""With many heads, no scores of the indexer are equal."""


def _recipe(ranks: int, sp: int, stage: int, accumulation: int = 1, **fields):
    micro_batch = GLOBAL_BATCH // (ranks // sp * accumulation)
    layout = {"parallel.sequence": sp, "parallel.zero_stage": stage, "batch.micro_batch_size": micro_batch}
    return tiny_recipe(**{**layout, **fields})


def _run(plan, steps: range) -> Trace:
    engine = engine_of(plan)
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    return trace(engine, steps, *shape, engine.data_parallel_rank, plan.data_parallel_size)


def _train(rank: int, recipes: list, ranks: int) -> list[Trace]:
    return [_run(plan_of(recipe, ranks), range(STEPS)) for recipe in recipes]


def _reference(micro_batch: int = 1, **fields) -> Trace:
    return plain_run(tiny_recipe(**fields), STEPS, micro_batch)


def _without_layout(fields: dict) -> dict:
    return {name: value for name, value in fields.items() if not name.startswith("parallel.")}


def _assert_equal(run: Trace, expected: Trace, name: object) -> None:
    assert worst(run.losses, expected.losses) < FP32, name
    assert worst(run.grad_norms, expected.grad_norms) < FP32, name
    assert run.rates == expected.rates, name
    assert run.evaluation == pytest.approx(expected.evaluation, rel=FP32), name
    assert run.weights.keys() == expected.weights.keys(), name
    for weight, value in run.weights.items():
        np.testing.assert_allclose(value, expected.weights[weight], rtol=0, atol=1e-5, err_msg=f"{name} {weight}")


PAIR = [
    *((stage, accumulation, {}) for stage in range(4) for accumulation in (1, 4)),
    *((stage, 4, SGD) for stage in (0, 1, 2, 3)),
    (1, 1, {"model.config.tie_word_embeddings": False}),
    (1, 1, {"model.config.num_key_value_heads": 1}),  # fewer than ranks: copied
    (1, 1, THREE_KEY_HEADS),
    (2, 1, {"parallel.activation_checkpointing": "full"}),
    (3, 4, {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"}),
    (1, 1, {"model.attention": "eager"}),
    (0, 1, {"data.mask_documents": False}),
    (1, 1, {"model.architecture": "mistral", "model.config.sliding_window": 5}),
    (1, 1, GPT2),
    (1, 1, MIXTRAL),
    (3, 1, MIXTRAL),
    (3, 1, INDEXED_ROWS),
    (3, 1, GPT_NEO),
]
_HYBRID = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "vocab_size": 256,
}
DELTA_RULE = {
    "model.architecture": "qwen3_5_text",
    "model.config": _HYBRID
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 2},
}
MAMBA2 = {
    "model.architecture": "nemotron_h",
    "model.config": _HYBRID
    | {"layers_block_type": ["mamba", "attention"], "n_groups": 2, "ssm_state_size": 8, "chunk_size": 4}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16},
}
CONVOLUTION = {
    "model.architecture": "lfm2",
    "model.config": _HYBRID | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
FULL, SELECTIVE = ({"parallel.activation_checkpointing": kind} for kind in ("full", "selective"))
WHOLE_ROWS = {"data.mask_documents": False}
"""A document as long as the sequence, which passes through all slices."""
RECURRENT = [
    (0, 4, DELTA_RULE | SGD | SELECTIVE),
    (3, 1, DELTA_RULE | SGD | FULL),
    (1, 1, MAMBA2 | SGD | FULL | WHOLE_ROWS),
    (3, 4, MAMBA2 | SGD),
    (2, 1, CONVOLUTION | SELECTIVE),
]
"""With SGD: the gradient of a decay may be near its rounding errors, which Adam would make as large as a step."""
RING = {"parallel.sequence_ring": 2, "model.attention": "varlen"}
RINGS = [
    (3, 1, RING | {"model.architecture": "mistral", "model.config.sliding_window": 11}),
    (2, 1, RING | SGD | {"model.adapter": {"rank": 4, "alpha": 16.0}}),
    (1, 4, RING | {"parallel.activation_checkpointing": "full"}),
    (2, 1, RING | SGD | {"parallel.activation_checkpointing": "selective"}),
    (0, 1, RING | {"data.mask_documents": False}),
    (1, 1, RING | GPT2),
    (1, 1, RING | MIXTRAL),
]
"""Documents within one of the four blocks of a row, and in two or three; without a mask, one is in all four."""


@pytest.mark.parametrize(
    "cases",
    [
        PAIR[::3],
        RINGS[:2],
        pytest.param(RECURRENT, marks=pytest.mark.slow),
        pytest.param([*(one for one in PAIR if one not in PAIR[::3]), *RINGS[2:]], marks=pytest.mark.breadth),
    ],
    ids=["some", "ring", "recurrent", "others"],
)
def test_two_slices_match_the_plain_loop(cases):
    runs = run_ranks(2, _train, [_recipe(2, 2, stage, acc, **fields) for stage, acc, fields in cases], 2)
    expected: dict[str, Trace] = {}
    for index, case in enumerate(cases):
        fields = _without_layout(case[2])
        # A router's loss is a mean within a micro-batch, so that its size is part of the run.
        size = GLOBAL_BATCH if fields.items() >= MIXTRAL.items() else 1
        theirs = expected.setdefault(str(fields), _reference(size, **fields))
        for rank in range(2):
            _assert_equal(runs[rank][index], theirs, (*case, rank))


def test_the_router_loss_changes_the_reference():
    silent = _reference(GLOBAL_BATCH, **{**MIXTRAL, "model.config.router_aux_loss_coef": 0.0})
    assert worst(silent.grad_norms, _reference(GLOBAL_BATCH, **MIXTRAL).grad_norms) > 10 * FP32


QUADS = [(2, 1, 1, {}), (2, 3, 2, {}), (2, 1, 2, SGD), (2, 3, 1, SGD), (2, 0, 2, SGD), (4, 2, 2, {}), (4, 3, 1, SGD)]
TWO_HEADS = {"model.config.num_attention_heads": 2, "model.attention": "varlen"}
"""Two of four ranks divide them, and pairs of ranks form a ring."""
QUADS += [
    (4, 0, 1, TWO_HEADS),
    (4, 3, 1, TWO_HEADS),
    (4, 1, 1, {"parallel.sequence_ring": 4, "model.attention": "varlen"}),
    (4, 3, 1, MAMBA2 | SGD | FULL | WHOLE_ROWS),
    (4, 0, 1, DELTA_RULE | SGD),
]


@pytest.mark.slow
def test_four_ranks_share_sequences_and_samples():
    runs = run_ranks(4, _train, [_recipe(4, sp, stage, acc, **fields) for sp, stage, acc, fields in QUADS], 4)
    for index, case in enumerate(QUADS):
        fields = {} if "parallel.sequence_ring" in case[3] else _without_layout(case[3])
        for rank in range(4):
            _assert_equal(runs[rank][index], _reference(**fields), (*case, rank))


@pytest.mark.breadth
def test_bf16_stays_near_the_fp32_loop():
    # The bounds of the data parallel test: a unit in the last place of the loss, four of a norm.
    fields = {"parallel.precision": "bf16"}
    for run in run_ranks(2, _train, [_recipe(2, 2, stage, 2, **fields) for stage in (1, 2, 3)], 2)[0]:
        expected = _reference()
        assert worst(run.losses, expected.losses) < 2**-8
        assert worst(run.grad_norms, expected.grad_norms) < 2**-6


def _influence(rank: int, recipes: list) -> list[tuple[float, float, float]]:
    return [_losses(recipe) for recipe in recipes]


def _losses(recipe) -> tuple[float, float, float]:
    """Evaluation losses of the second document: as it is, with another first one, and with another token of its own."""
    engine = engine_of(plan_of(recipe, 2))
    sample = global_batch(0)[0]
    start = int((sample.position_ids[0] == 0).nonzero()[1])
    assert 0 < start < T // 2  # the second document lies on both slices
    labels = sample.labels.clone()
    labels[:, :start] = -100

    def loss(changed: slice) -> float:
        tokens = sample.input_ids.clone()
        tokens[:, changed] = (tokens[:, changed] + 7) % 256
        batch = replace(sample, input_ids=tokens, labels=labels)
        return engine.eval_step(StepBatch([batch], int((labels != -100).sum()), 1, 0)).item()

    return loss(slice(0, 0)), loss(slice(0, start)), loss(slice(start, start + 1))


def test_a_document_has_no_influence_on_its_neighbour():
    recipes = [_recipe(2, 2, 1, **{"model.attention": attention}) for attention in ("sdpa", "eager")]
    for plain, other, own in run_ranks(2, _influence, recipes)[0]:
        assert other == plain
        assert own != plain


def _received(rank: int, recipe):
    """What the attention function of the model gets."""
    seen = []
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module, query, key, value, mask, **kwargs):
        seen.append((query.shape, key.shape, mask.shape, kwargs["position_ids"].tolist(), module.num_key_value_groups))
        return original(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("sdpa", spy)
    engine_of(plan_of(recipe, 2)).eval_step(step_batch(0, GLOBAL_BATCH, 1))
    return seen[-1]


def test_attention_gets_whole_sequences_and_a_share_of_the_heads():
    """Positions too, by which kernels without masks tell documents apart."""
    whole = step_batch(0, GLOBAL_BATCH, 1).micro_batches[0].position_ids.tolist()
    for query, key, mask, positions, groups in run_ranks(2, _received, _recipe(2, 2, 0)):
        assert (query, key, mask) == ((8, 2, T, 16), (8, 1, T, 16), (8, 1, T, T))
        assert positions == whole
        assert groups == 2


RESUMED = [(0, "fp32"), (1, "bf16"), (3, "fp32")]


def _interrupted(rank: int, folder: Path, sp: int, ranks: int):
    from llmtrain.checkpoint.contents import TrainerState
    from llmtrain.checkpoint.folder import newest
    from llmtrain.checkpoint.save import Saver
    from llmtrain.checkpoint.state import load

    found = []
    for index, (stage, precision) in enumerate(RESUMED):
        # Dropout, so that a generator that is not restored shows.
        fields = {"parallel.precision": precision, "model.config.attention_dropout": 0.1}
        plan = plan_of(_recipe(ranks, sp, stage, **fields), ranks)
        torch.manual_seed(rank)
        whole = _run(plan, range(STEPS))
        torch.manual_seed(rank)
        first = engine_of(plan)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        for step in range(3):
            first.train_step(step_batch(step, *shape, first.data_parallel_rank, plan.data_parallel_size))
        Saver(folder / str(index), plan, first).save(TrainerState(step=3, samples=3 * GLOBAL_BATCH, data="key"))
        torch.manual_seed(999)
        second = engine_of(plan)
        load(newest(folder / str(index)), second, plan, "key")
        continued = trace(second, range(3, STEPS), *shape, second.data_parallel_rank, plan.data_parallel_size)
        found.append((whole, continued))
    return found


@pytest.mark.breadth
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    for results in run_ranks(2, _interrupted, tmp_path, 2, 2):
        for case, (whole, continued) in zip(RESUMED, results, strict=True):
            assert continued.losses == whole.losses[3:], case
            assert continued.grad_norms == whole.grad_norms[3:], case
            assert all(np.array_equal(continued.weights[name], whole.weights[name]) for name in whole.weights), case


def _engine_takes(rank: int, recipes: list, ranks: int) -> list[bool]:
    return [_takes(recipe, ranks) for recipe in recipes]


def _takes(recipe, ranks: int) -> bool:
    """Whether the engine itself trains a layout, whatever the rules say of it."""
    draft = Draft(recipe, Cluster(devices_per_node=ranks), model_facts(recipe.model, recipe.vocab_size))
    plan = assemble(draft)
    tokens = torch.randint(0, 256, (plan.batch.micro_batch_size, recipe.data.sequence_length))
    positions = torch.arange(recipe.data.sequence_length).expand_as(tokens)
    batch = StepBatch(
        [MicroBatch(tokens, positions, tokens)], tokens.numel() * plan.data_parallel_size, GLOBAL_BATCH, 0
    )
    try:
        return bool(engine_of(plan).train_step(batch).loss.isfinite())
    except RuntimeError:
        return False


ODD_LENGTH = {"data.sequence_length": T - 1}
ODD_HEADS = {
    "model.config.hidden_size": 48,
    "model.config.num_attention_heads": 3,
    "model.config.num_key_value_heads": 3,
}


@pytest.mark.breadth
def test_rules_refuse_what_the_engine_does_not_support():
    recipes = [_recipe(2, 2, 1, **fields) for fields in ({}, THREE_KEY_HEADS)]
    assert [_breaks(recipe) for recipe in recipes] == [set(), set()]
    assert run_ranks(2, _engine_takes, recipes, 2) == [[True, True]] * 2
    for fields in (ODD_LENGTH, ODD_HEADS | {"parallel.sequence_ring": 1}):
        recipe = _recipe(2, 2, 1, **fields)
        assert _breaks(recipe) == {"layout.sequence_divides"}
        assert run_ranks(2, _engine_takes, [recipe], 2) == [[False]] * 2


def _breaks(recipe) -> set[str]:
    try:
        plan_of(recipe, 2)
    except RecipeError as error:
        return {problem.rule for problem in error.problems}
    return set()


MAMBA = {
    "model.attention": "eager",
    "model.architecture": "mamba",
    "model.config": {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}


QWEN = {"model.architecture": "qwen3_5_text", "model.config": {"num_hidden_layers": 4}}
NEMOTRON = {"model.architecture": "nemotron_h", "model.config": {"layers_block_type": ["linear_attention", "mlp"] * 2}}


SINKS = {"model.architecture": "gpt_oss", "model.config": {}, "model.attention": "varlen"}
"""A family without `sdpa`, with which a kernel of documents is represented in the check of other families."""


def _refusal(rank: int, recipes: list) -> list[str]:
    reasons = []
    for recipe in recipes:
        try:
            check_sequence(model_configuration(recipe), recipe.model.attention_kernel)
            reasons.append("")
        except FamilyError as refusal:
            reasons.append(refusal.reason)
    return reasons


def _refusal_of_states_that_begin_with_a_slice(rank: int, recipes: list) -> list[str]:
    documents_check.keep_apart = lambda *_: None
    return _refusal(rank, recipes)


def _refusal_of_messages(rank: int, recipes: list, step: int) -> list[str]:
    """With zeros for the states of the rank before (-1), or for the gradients of those of the rank after (1)."""
    receive = Neighbors.receive

    def zeros(self: Neighbors, of: int, *args) -> tuple[torch.Tensor, ...]:
        return tuple(state.zero_() if of == step else state for state in receive(self, of, *args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Neighbors, "receive", zeros)
        return _refusal(rank, recipes)


def _refusal_of_a_ring(rank: int, recipes: list) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "check_sequence", partial(check_sequence, head_ranks=1, ring=2))
        return _refusal(rank, recipes)


def test_models_that_need_slices_in_order_form_no_rings():
    cases = [GPT_NEO, INDEXED_ROWS, {}, SINKS]
    for *ordered, plain, sinks in run_ranks(2, _refusal_of_a_ring, [tiny_recipe(**fields) for fields in cases]):
        assert all("in the order of the tokens" in reason for reason in ordered)
        assert plain == sinks == ""


def test_models_that_slices_would_change_are_refused_on_every_rank():
    cases = [{"model.architecture": "bloom", "model.config": {}, "model.attention": "eager"}, {}, SINKS]
    for bloom, plain, sinks in run_ranks(3, _refusal, [tiny_recipe(**fields) for fields in cases]):
        assert "fails on a slice" in bloom
        assert plain == sinks == ""


@pytest.mark.slow
def test_recurrences_do_not_begin_anew_in_a_slice():
    recurrent = [tiny_recipe(**fields) for fields in (MAMBA, QWEN, NEMOTRON)]
    assert run_ranks(2, _refusal, recurrent) == [[""] * 3] * 2
    for reasons in run_ranks(2, _refusal_of_states_that_begin_with_a_slice, recurrent):
        assert reasons == ["the logits of a slice deviate from those of the whole sequence"] * 3
    handed_on = recurrent[1:]
    for reasons in run_ranks(2, _refusal_of_messages, handed_on, -1):
        assert reasons == ["the logits of a slice deviate from those of the whole sequence"] * 2
    for reasons in run_ranks(2, _refusal_of_messages, handed_on, 1):
        assert all(reason.startswith("gradients of ") for reason in reasons)


def _left_behind(rank: int, recipe) -> list[object]:
    """What transformers calls after a step, and after one that fails."""
    engine = engine_of(plan_of(recipe, 2))
    tables = (ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)
    found: list[object] = []
    for labels in (torch.zeros(8, T, dtype=torch.int64), torch.full((8, T), 10_000)):
        tokens = torch.zeros(8, T, dtype=torch.int64)
        batch = StepBatch([MicroBatch(tokens, torch.arange(T).expand(8, T), labels)], 8 * T, 8, 0)
        try:
            engine.train_step(batch)
            found.append("trained")
        except IndexError:
            found.append("failed")
        found.append(not any(table._local_mapping for table in tables))
    return found


def test_other_models_of_the_process_are_not_changed():
    assert run_ranks(2, _left_behind, _recipe(2, 2, 0)) == [["trained", True, "failed", True]] * 2
