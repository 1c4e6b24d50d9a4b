"""A classifier under every strategy: its first weights, a resumption under another layout, and its export."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.models import build_model
from llmtrain.models.classifier import decoder_of
from tests.helpers.batches import CLASSIFIER, GLOBAL_BATCH, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

CPU = torch.device("cpu")
RANKS = 2
LAYOUTS = {
    "stages": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "zero3": {"parallel.zero_stage": 3},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1},
    "tensor-zero3": {"parallel.tensor": 2, "parallel.zero_stage": 3},
    "slices": {"parallel.sequence": 2, "parallel.zero_stage": 2},
    "ddp": {"parallel.backend": "accelerate"},
    "fsdp2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
    "recomputed": {"parallel.activation_checkpointing": "full", "parallel.zero_stage": 2},
}


def _plan(folder, name):
    fields = LAYOUTS[name]
    degree = max(fields.get(f"parallel.{axis}", 1) for axis in ("pipeline", "tensor", "sequence"))
    start = {"model.architecture": None, "model.config": {}, "model.pretrained": str(folder)}
    batch = {"batch.micro_batch_size": GLOBAL_BATCH // (2 * RANKS // degree)}
    return plan_of(tiny_recipe(**CLASSIFIER, **start, **batch, **fields), RANKS)


def _weights(engine) -> dict:
    return {name: weight.detach().float().numpy().copy() for name, weight in engine.named_weights()}


def _step(engine, plan, step: int) -> float:
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    return engine.train_step(step_batch(step, *shape, engine.data_parallel_rank, plan.data_parallel_size)).loss.item()


def _trained(rank: int, folder, names: list[str], out) -> dict[str, tuple]:
    """The first and the last weights of each layout, which continues from a checkpoint of the one before."""
    found, before = {}, None
    for step, name in enumerate(names):
        plan = _plan(folder, name)
        engine = engine_of(plan)
        first = _weights(engine)
        if before is not None:
            load(newest(out / before), engine, plan, "key")
        loss = _step(engine, plan, step)
        Saver(out / name, plan, engine).save(TrainerState(step=step + 1, data="key"))
        found[name], before = (first, loss, _weights(engine)), name
    return found


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    build_model(tiny_recipe(**{"train.seed": 3}), torch.float32, CPU).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Without a token for padding."""
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "names",
    [["stages", "zero3", "tensor"], pytest.param(list(LAYOUTS), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_layouts_start_equally_continue_each_other_and_are_exported(names, causal, tokenizer, tmp_path):
    found = run_ranks(RANKS, _trained, causal, names, tmp_path, timeout=300)
    plan = _plan(causal, names[0])
    expected = dict(build_model(plan.recipe, torch.float32, CPU).named_parameters())
    for of_rank in found:
        for name, (first, _, _) in of_rank.items():
            assert first.keys() == expected.keys(), name
            for weight, value in first.items():
                assert torch.equal(torch.from_numpy(value), expected[weight]), (name, weight)
    losses = [loss for _, loss, _ in found[0].values()]
    alone = {"batch.micro_batch_size": 2, "parallel.zero_stage": 0}
    assert losses == pytest.approx(run_ranks(1, _losses, plan.recipe, alone, len(names))[0], rel=1e-4)
    export(newest(tmp_path / names[-1]), tokenizer, tmp_path / "out")
    model, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    last = found[0][names[-1]][2]
    assert last.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, torch.from_numpy(last[name])), name
    _check_scores(model, tmp_path / "out")


def _losses(rank: int, recipe, fields: dict, steps: int) -> list[float]:
    plan = plan_of(recipe.with_(**{"parallel": {}, **fields}), 1)
    engine = engine_of(plan)
    return [_step(engine, plan, step) for step in range(steps)]


def _check_scores(model, folder) -> None:
    """Texts of several lengths, padded by the exported tokenizer, have the outputs of their last token."""
    texts, tokenizer = ["a b a", "b", "a a a a b"], AutoTokenizer.from_pretrained(folder)
    declared = (model.config.architectures, model.config.num_labels, model.config.pad_token_id)
    assert declared == (["LlamaForSequenceClassification"], 3, tokenizer.pad_token_id)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    model.eval()
    with torch.no_grad():
        scores, ours = model(**batch).logits, decoder_of(model.config).eval()
        ours.load_state_dict(model.state_dict())
        for text, score in zip(texts, scores, strict=True):
            alone = tokenizer(text, return_tensors="pt").input_ids
            torch.testing.assert_close(ours(alone).logits[0, -1], score)
