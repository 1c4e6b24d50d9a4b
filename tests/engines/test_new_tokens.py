"""A grown vocabulary starts from the same rows under every strategy, and matches the plain loop."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.checkpoint.base import base_of
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.merge import merge_checkpoint
from llmtrain.checkpoint.save import Saver
from llmtrain.data import prepare
from llmtrain.errors import RecipeError
from llmtrain.models import build_model
from llmtrain.plan.facts.vocabulary import shipped_templates, with_resized_vocabulary
from tests.helpers.batches import GLOBAL_BATCH, step_batch, tiny_recipe
from tests.helpers.chat_tokenizers import base_tokenizer
from tests.helpers.harness import run_ranks
from tests.helpers.traces import assert_same, engine_of, plain_run, plan_of, reference_of, trace

CPU = torch.device("cpu")
RANKS = 4
STEPS = 4
ROWS, KEPT, GROWN = 240, 200, 256
"""Rows of the folder, those that are kept, and those of the grown vocabulary, whose new tokens are in the batches."""
UNTIED = {"model.config.tie_word_embeddings": False}
PHI = {"model.architecture": "phi", "model.config.tie_word_embeddings": False}
"""Its head has a bias."""
LAYOUTS = {
    "zero2": {"parallel.zero_stage": 2},
    "zero3": {"parallel.zero_stage": 3},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "pipeline-tensor": {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.zero_stage": 1},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1},
    "tensor-zero3": {"parallel.tensor": 2, "parallel.zero_stage": 3},
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 3},
    "ddp": {"parallel.backend": "accelerate"},
    "fsdp2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}


def _saved(folder, **fields):
    model = build_model(tiny_recipe(**{"model.config.vocab_size": ROWS, "train.seed": 3}, **fields), torch.float32, CPU)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for weight in module.parameters():
            weight.data[KEPT:] = 99  # rows of no token, which must not count
    model.save_pretrained(folder)
    return folder


def _from(folder, **fields):
    degrees = [fields.get(f"parallel.{name}", 1) for name in ("pipeline", "tensor", "sequence")]
    replicas = RANKS // (degrees[0] * degrees[1] * degrees[2])
    return tiny_recipe(
        **{"model.architecture": None, "model.config": {"vocab_size": GROWN}, "model.pretrained": str(folder)},
        **{"model.new_tokens": ["<new>"], "model.kept_rows": KEPT, **fields},
        **{"batch.micro_batch_size": GLOBAL_BATCH // (2 * replicas)},
    )


def _runs(rank: int, recipes: list) -> list:
    plans = [plan_of(recipe, RANKS) for recipe in recipes]
    return [_steps(engine_of(plan), plan, range(STEPS)) for plan in plans]


def _steps(engine, plan, steps):
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    return trace(engine, steps, *shape, engine.data_parallel_rank, plan.data_parallel_size)


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (["zero3", "pipeline-tensor"], {}),
        pytest.param(["pipeline", "tensor-zero3"], UNTIED, marks=pytest.mark.slow),
        pytest.param(list(LAYOUTS), {}, marks=pytest.mark.breadth),
        pytest.param(list(LAYOUTS), UNTIED, marks=pytest.mark.breadth),
        pytest.param(["zero2", "zero3", "pipeline"], PHI, marks=pytest.mark.breadth),
    ],
    ids=["tied", "untied", "all, tied", "all, untied", "bias"],
)
def test_every_strategy_matches_the_plain_loop(names, model, tmp_path):
    folder = _saved(tmp_path, **model)
    expected = plain_run(_from(folder), STEPS)
    by_rank = run_ranks(RANKS, _runs, [_from(folder, **LAYOUTS[name]) for name in names])
    for runs in by_rank:
        for name, run in zip(names, runs, strict=True):
            assert_same(run, expected, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [{}, UNTIED, PHI], ids=["tied", "untied", "bias"])
def test_new_rows_are_the_mean_of_the_rows_kept(model, dtype, tmp_path):
    folder = _saved(tmp_path, **model)
    files = load_file(folder / "model.safetensors")
    tables = [name for name, one in files.items() if one.shape[0] == ROWS]
    assert len(tables) == {str({}): 1, str(UNTIED): 2, str(PHI): 3}[str(model)]
    weights = build_model(_from(folder), dtype, CPU).state_dict()
    for name in tables:
        before = files[name][:KEPT].to(dtype)
        assert torch.equal(weights[name][:KEPT], before)
        mean = before.double().mean(0).to(dtype)
        assert torch.equal(weights[name][KEPT:], mean.expand_as(weights[name][KEPT:]))
        assert weights[name].shape[0] == GROWN
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    reference = dict(reference_of(_from(folder, **{"parallel.precision": precision})).named_weights())
    for name, value in reference.items():
        assert torch.equal(value, weights[name]), name


def _resumed(rank: int, first, then, folder):
    """Four steps, saved after two and continued under another plan."""
    plan = plan_of(first, 2)
    before = engine_of(plan)
    _steps(before, plan, range(2))
    Saver(folder, plan, before).save(TrainerState(step=2))
    del before
    plan = plan_of(then, 2)
    after = engine_of(plan)
    after.load(newest(folder))
    return _steps(after, plan, range(2, STEPS))


@pytest.mark.breadth
def test_a_run_with_new_tokens_continues_under_another_layout(tmp_path):
    folder = _saved(tmp_path / "base")
    first = _from(folder, **LAYOUTS["zero3"])
    then = _from(folder, **LAYOUTS["pipeline"])
    expected = plain_run(_from(folder), STEPS)
    for run in run_ranks(2, _resumed, first, then, tmp_path / "run"):
        assert run.evaluation == pytest.approx(expected.evaluation, rel=1e-5)
        assert run.losses == pytest.approx(expected.losses[2:], rel=1e-5)


def test_a_folder_of_another_width_or_with_too_many_rows_is_refused(tmp_path):
    folder = _saved(tmp_path)
    with pytest.raises(RecipeError, match="weights whose shape differs"):
        build_model(_from(folder).with_(**{"model.config.vocab_size": 200}), torch.float32, CPU)
    with pytest.raises(RecipeError, match="weights whose shape differs"):
        build_model(_from(folder).with_(**{"model.new_tokens": [], "model.kept_rows": None}), torch.float32, CPU)


def _saved_run(rank: int, recipe, folder) -> None:
    plan = plan_of(recipe, 1)
    engine = engine_of(plan)
    _steps(engine, plan, range(1))
    Saver(folder, plan, engine).save(TrainerState(step=1))


def test_the_exported_folder_answers_with_its_template(tmp_path):
    inner = Tokenizer.from_str(base_tokenizer())
    inner.add_special_tokens(["<|endoftext|>"])
    tokenizer, size = tmp_path / "tokenizer", inner.get_vocab_size()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(tokenizer)
    base = build_model(tiny_recipe(**{"model.config.vocab_size": size}), torch.float32, CPU)
    base.save_pretrained(tmp_path / "base")
    corpus = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Bye."}]
    corpus.write_text(8 * (json.dumps({"messages": turns}) + "\n"))
    data = {"name": str(corpus)}
    recipe = tiny_recipe(
        **{"model.architecture": None, "model.config": {}, "model.pretrained": str(tmp_path / "base")},
        **{"model.new_tokens": "template", "data.chat_template": "chatml", "data.sources": [data]},
        **{"data.tokenizer": str(tokenizer), "data.cache_dir": str(tmp_path / "cache"), "data.eval_fraction": 0.0},
    )
    prepared = prepare(with_resized_vocabulary(recipe))
    run_ranks(1, _saved_run, recipe, tmp_path / "run")
    export(newest(tmp_path / "run"), prepared.tokenizer_dir, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    text = AutoTokenizer.from_pretrained(tmp_path / "out")
    text.chat_template = shipped_templates()["chatml"]
    asked = text.apply_chat_template(turns[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert {size, size + 1} <= set(asked["input_ids"][0].tolist())
    model.get_input_embeddings().weight.data[size + 2 :] *= 1e3  # tied rows that would win
    answer = model.generate(**asked, max_new_tokens=20, do_sample=True)[0]
    assert model.config.vocab_size == 384
    assert answer.max() < size + 2


def _trained(rank: int, recipe, folder):
    plan = plan_of(recipe, 1)
    engine = engine_of(plan)
    _steps(engine, plan, range(2))
    Saver(folder, plan, engine).save(TrainerState(step=2, base=base_of(plan)))
    return _logits(engine.model)


@torch.no_grad()
def _logits(model):
    return model.eval()(input_ids=step_batch(0, 1, GLOBAL_BATCH).micro_batches[0].input_ids).logits.numpy()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.breadth, id="plain"),
        pytest.param({"model.quantize": "nf4"}, marks=pytest.mark.slow, id="nf4"),
    ],
)
def test_an_adapter_with_new_tokens_is_exported_with_its_base(fields, tmp_path):
    """The base with the new rows exists nowhere else; it has the values that the adapter was trained beside."""
    tokenizer = tmp_path / "tokenizer"
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(tokenizer)
    lora = {"rank": 4, "alpha": 8.0, "modules_to_save": ["lm_head", "embed_tokens"]}
    plain = {"parallel.backend": "data_parallel", "batch.micro_batch_size": 1, "optim.lr": 1e-2}
    recipe = _from(_saved(tmp_path / "origin", **UNTIED)).with_(**{"model.adapter": lora}, **plain, **fields)
    expected = run_ranks(1, _trained, recipe, tmp_path / "run")[0]
    export(newest(tmp_path / "run"), tokenizer, tmp_path / "out")
    np.testing.assert_array_equal(_logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")), expected)
    merge_checkpoint(newest(tmp_path / "run"), tokenizer, tmp_path / "merged")
    found = _logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
