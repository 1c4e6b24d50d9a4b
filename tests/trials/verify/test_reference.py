"""The reference by itself."""

from __future__ import annotations

import pytest
import torch

from llmtrain.data import prepare
from llmtrain.engines.optim import schedule
from llmtrain.trials.verify import reference, train
from llmtrain.trials.verify.batches import Batches
from llmtrain.trials.verify.compare import FP32, SAFETY, clone, deviation
from llmtrain.trials.verify.job import PROBES, read_references, worst
from llmtrain.trials.verify.reference import ReferenceDocument, ReferenceLoop, learning_rate
from llmtrain.trials.verify.reference_optimizers import PlainMuon
from tests.helpers.own_code import write_folder
from tests.helpers.small_verify import CPU, MOE, small

MAMBA = {
    "model.architecture": "mamba",
    "model.attention": "eager",
    "model.config": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "conv_kernel": 4},
}

CPMANT = {
    "model.architecture": "cpmant",
    "model.attention": "eager",
    "model.config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 32},
}


def _losses(recipe, **fields) -> list[float]:
    batches = Batches(recipe, prepare(recipe), 3)
    loop = train._reference(recipe, CPU, **fields)
    steps = [loop.train_step(sequences) for sequences in batches.whole()]
    numbers = [number for step in steps for number in (step.loss, step.grad_norm)]
    return [*numbers, loop.evaluate(batches.held_out())]


@pytest.mark.parametrize("fields", [{}, MOE, MAMBA], ids=["llama", "experts", "recurrence"])
def test_documents_in_one_batch_equal_documents_alone(fields, verify_corpus):
    recipe = small(verify_corpus, **fields)
    alone, at_once = _losses(recipe), _losses(recipe, together=True)
    assert worst(abs(a - b) / b for a, b in zip(alone, at_once, strict=True)) < FP32


@pytest.mark.parametrize("precision", ["bf16", "autocast_bf16"])
def test_without_rounding_a_pass_computes_in_fp32(precision, verify_corpus):
    """From weights that are rounded in bf16, and whole under autocast."""
    recipe = small(verify_corpus, **{"parallel.precision": precision})
    whole = recipe.with_(**{"parallel.precision": "fp32"})
    weights = train.drawn_weights(recipe, CPU)
    rounded, exact = (ReferenceLoop(recipe, weights, CPU, rounds=rounds) for rounds in (True, False))
    if precision == "bf16":
        weights = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    in_fp32 = ReferenceLoop(whole, weights, CPU)
    documents = [[ReferenceDocument(torch.arange(8), torch.arange(1, 9))]]
    assert exact.evaluate(documents) == pytest.approx(in_fp32.evaluate(documents), rel=FP32)
    assert rounded.evaluate(documents) != pytest.approx(in_fp32.evaluate(documents), rel=FP32)


def test_bounds_in_bf16_include_what_kernels_do_not_round(verify_corpus, tmp_path):
    recipe = small(verify_corpus, **{"parallel.precision": "bf16"})
    batches = Batches(recipe, prepare(recipe), 2)
    train.make_references(recipe, batches, tmp_path, CPU, lambda text: None)
    allowed = read_references(tmp_path)[PROBES[0]].tolerance
    initial = clone(dict(train._reference(recipe, CPU).named_weights()))
    first, exact = (train._trace_reference(recipe, batches, 0, CPU, rounds=rounds) for rounds in (True, False))
    found = deviation(exact, first, initial)
    assert SAFETY * found.loss <= allowed.loss
    assert SAFETY * found.grad_norm <= allowed.grad_norm
    assert SAFETY * found.weights <= allowed.weights


def test_a_document_does_not_depend_on_its_neighbours(verify_corpus):
    recipe = small(verify_corpus)
    documents = [ReferenceDocument(torch.arange(n, 2 * n), torch.arange(n + 1, 2 * n + 1)) for n in (5, 9, 3)]
    loop = train._reference(recipe, CPU)
    apart = sum(loop.evaluate([[one]]) * len(one.inputs) for one in documents) / 17
    assert loop.evaluate([documents]) == pytest.approx(apart, rel=FP32)


def test_documents_of_families_that_mix_them_run_in_one_sequence(verify_corpus):
    """In such a family sequences are run whole, by their positions; in others each document begins anew."""
    for fields, goes_on in ((CPMANT, True), ({}, False)):
        loop = train._reference(small(verify_corpus, **fields), CPU)
        first, second = (ReferenceDocument(torch.arange(n, 2 * n), torch.arange(n + 1, 2 * n + 1)) for n in (9, 5))
        unseen = ReferenceDocument(first.inputs, torch.full_like(first.targets, reference.NO_TARGET))
        assert (loop.evaluate([[unseen, second]]) != loop.evaluate([[second]])) is goes_on


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 1}, {"warmup_steps": 7}, {"warmup_ratio": 0.1}])
def test_learning_rates_are_the_engines(name, warmup, verify_corpus):
    """Two ways to write the same formulas."""
    for steps, least in ((50, 0.1), (97, 0.0)):
        fields = {"optim.schedule": name, "train.max_steps": steps, "optim.warmup_steps": 0}
        fields |= {f"optim.{key}": value for key, value in warmup.items()}
        fields |= {"optim.decay_steps": 9} if name == "wsd" else {}
        fields |= {"optim.min_lr_ratio": least} if name in ("wsd", "cosine") else {}
        recipe = small(verify_corpus).with_(**fields)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=recipe.optim.lr)
        scheduler = schedule(optimizer, recipe)
        if "warmup_ratio" in warmup and name in ("linear", "cosine"):
            assert learning_rate(recipe, {50: 5, 97: 10}[steps]) == recipe.optim.lr  # 9.7 is rounded up
        for step in range(steps):
            assert optimizer.param_groups[0]["lr"] == learning_rate(recipe, step), step
            optimizer.step()
            scheduler.step()


def test_a_weight_without_a_gradient_is_not_updated(verify_corpus, monkeypatch):
    own = reference.reference_model

    def with_unused(*arguments):
        model = own(*arguments)
        model.unused = torch.nn.Parameter(torch.ones(2, 2))
        return model

    monkeypatch.setattr(reference, "reference_model", with_unused)
    loop = ReferenceLoop(small(verify_corpus), {}, CPU)
    for _ in range(2):  # the rate of the first is 0
        loop.train_step([[ReferenceDocument(torch.arange(8), torch.arange(1, 9))]])
    weights = dict(loop.named_weights())
    assert torch.equal(weights["unused"], torch.ones(2, 2))
    assert not torch.equal(weights["model.norm.weight"], torch.ones(32))


def test_parameters_frozen_by_a_models_code_are_not_trained(verify_corpus, tmp_path):
    """`from_pretrained` forgets it."""
    norm = "self.norm = nn.LayerNorm(config.hidden_size)"
    folder = str(write_folder(tmp_path, {norm: f"{norm}.requires_grad_(False)", "own_of_the_tests": "own_with_frozen"}))
    model = {"architecture": None, "config": {}, "pretrained": folder, "trust_remote_code": True}
    loop = ReferenceLoop(small(verify_corpus, model=model), {}, CPU)
    assert "embed.weight" in loop.masters
    assert loop.masters.keys().isdisjoint({"norm.weight", "norm.bias"})


def test_muon_leaves_a_matrix_without_a_gradient_alone():
    matrix = torch.nn.Parameter(torch.ones(2, 3))
    matrix.grad = torch.zeros(2, 3)
    options = {"dtype": torch.float32, "ns_steps": 5, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "original"}
    PlainMuon({id(matrix)}, options, [{"params": [matrix], "weight_decay": 0.0}], lr=1.0).step()
    assert torch.equal(matrix, torch.ones(2, 3))
