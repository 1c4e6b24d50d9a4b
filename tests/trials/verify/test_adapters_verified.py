"""`verify` certifies adapters and frozen weights under every strategy, and detects planted bugs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtrain.data import prepare
from llmtrain.models import build_model
from llmtrain.trials.verify.job import comparable
from tests.helpers import planted_adapter
from tests.helpers.batches import WRAPPER
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, GPT_OSS
from tests.helpers.quantized import fp8, quantize_folder
from tests.helpers.small_verify import certified, job_of, plant, refer, small
from tests.helpers.wrappers import VISION, save_wrapper

CPU = torch.device("cpu")
SLOW, BREADTH = pytest.mark.slow, pytest.mark.breadth
UNTIED = {"model.config.tie_word_embeddings": False}
ADAPTER = {"rank": 4, "alpha": 12.0, "rslora": True, "modules_to_save": ["lm_head"]}
FEWER_TOKENS = WRAPPER | {"text_config": WRAPPER["text_config"] | {"vocab_size": 300}}
SHORT = {"vocab_size": 300, "max_position_embeddings": 32}
SPARSE = {key: value for key, value in CONFIGS["qwen3_moe"].items() if key != "mlp_only_layers"} | SHORT
FUSED = {
    "rank": 2,
    "alpha": 8.0,
    "targets": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "mlp.[gr]*.weight"],
}
TRAINED: dict[str, dict[str, Any]] = {
    "adapter": {"model.adapter": ADAPTER, **UNTIED},
    "dora": {"model.adapter": {"rank": 2, "dora": True, "targets": ["q_proj", "mlp.*"]}},
    "in bf16": {"model.adapter": ADAPTER, **UNTIED, "parallel.precision": "bf16"},
    "by name": {"model.trainable": ["model.layers.1.*"]},
    "experts": {"model": {"architecture": "qwen3_moe", "config": SPARSE, "adapter": FUSED}},
    "transposed experts": {"model": {**GPT_OSS, "config": GPT_OSS["config"] | SHORT, "adapter": FUSED}},
    "of a wrapper": {"model": {"architecture": "gemma3", "config": FEWER_TOKENS, "adapter": {"rank": 4}}},
}
PARTS = 10
"""Tests over which all plans of four ranks are spread, which take eight minutes together."""
FLAT, STAGED, SLICED = "dp2-zero1-acc2", "dp1-pp2-zero1-acc4", "dp1-pp2-tp2-zero1-acc4"


@pytest.mark.parametrize(
    ("trained", "names", "nproc"),
    [
        pytest.param("adapter", ["dp1-zero1-acc4"], 1, marks=BREADTH),
        pytest.param("adapter", [FLAT, STAGED, "dp2-zero3-acc2"], 2, marks=SLOW),
        pytest.param("experts", ["dp2-zero3-acc2", "dp1-tp2-zero1-acc4"], 2, marks=SLOW),
        pytest.param("dora", [FLAT, STAGED, "dp2-zero2-acc2"], 2, marks=BREADTH),
        pytest.param("of a wrapper", [FLAT, STAGED, "dp2-zero3-acc2"], 2, marks=BREADTH),
        pytest.param("by name", [FLAT, STAGED, "dp2-zero3-acc2"], 2, marks=BREADTH),
        pytest.param("in bf16", [FLAT, STAGED, "dp2-zero2-acc2", "dp2-zero3-acc2"], 2, marks=BREADTH),
        *(pytest.param(trained, [], 2, marks=BREADTH) for trained in ("adapter", "experts", "transposed experts")),
    ],
)
def test_clean_plans_are_certified(trained, names, nproc, verify_corpus, tmp_path):
    job = job_of(small(verify_corpus, **TRAINED[trained]), names, nproc)
    run_ranks(1, refer, job, tmp_path)
    verdicts = run_ranks(nproc, certified, job, tmp_path, timeout=600)[0]
    assert verdicts
    assert [name for name, good in verdicts.items() if not good] == []


@pytest.mark.breadth
@pytest.mark.parametrize("part", range(PARTS))
def test_clean_plans_of_four_ranks_are_certified(part, verify_corpus, tmp_path):
    plans = job_of(small(verify_corpus, **TRAINED["adapter"]), [], 4).plans
    names = [name for name, plan in plans.items() if plan.workers == 4][part::PARTS]
    test_clean_plans_are_certified("adapter", names, 4, verify_corpus, tmp_path)


@pytest.mark.parametrize(
    ("plan", "bugs"),
    [
        pytest.param(FLAT, "FLAT", marks=BREADTH),
        pytest.param(STAGED, "STAGED", marks=BREADTH),
        pytest.param(SLICED, "SLICED", marks=BREADTH),
    ],
)
def test_every_planted_bug_is_detected(plan, bugs, verify_corpus, tmp_path):
    job = job_of(small(verify_corpus, **TRAINED["adapter"]), [plan], nproc=4 if plan == SLICED else 2)
    run_ranks(1, refer, job, tmp_path)
    found = run_ranks(job.plans[plan].workers, plant, job, tmp_path, "planted_adapter", bugs, timeout=600)[0]
    assert found.pop("none") == [plan]
    assert found.keys() == {bug.__name__ for bug in getattr(planted_adapter, bugs)}
    assert {name for name, plans in found.items() if plans} == set()


@pytest.mark.parametrize(
    ("family", "trained", "names"),
    [
        pytest.param("gemma3", {}, [STAGED], marks=SLOW),
        pytest.param("qwen2_5_vl", {"model.adapter": {"rank": 4}}, [FLAT, STAGED, "dp2-zero3-acc2"], marks=BREADTH),
        *(pytest.param(family, {}, [FLAT], marks=BREADTH) for family in VISION),
        pytest.param("qwen3_vl", {}, [], marks=BREADTH),
    ],
)
def test_the_text_models_of_multimodal_models_are_certified(family, trained, names, verify_corpus, tmp_path):
    """The reference runs the forward of the whole."""
    fields = {"model": {"pretrained": str(save_wrapper(tmp_path / "model", family))}, **trained}
    tokenizer = str(prepare(small(verify_corpus)).tokenizer_dir)
    job = job_of(small(verify_corpus, **fields, **{"data.tokenizer": tokenizer}), names)
    run_ranks(1, refer, job, tmp_path)
    assert all(run_ranks(2, certified, job, tmp_path)[0].values())


DENSE = {**UNTIED, "model.adapter": ADAPTER}
SPARSE_BASE = TRAINED["experts"] | {"model.adapter.targets": "all-linear"}


def _beside_packed(corpus, folder, fields=DENSE):
    recipe = small(corpus, **fields)
    build_model(recipe.with_(**{"model.adapter": None}), torch.float32, CPU).save_pretrained(folder)
    routed = {key: value for key, value in recipe.model.config.items() if key == "output_router_logits"}
    model = {"model.architecture": None, "model.config": routed, "model.pretrained": str(folder)}
    model |= {"data.tokenizer": str(prepare(small(corpus)).tokenizer_dir)}
    return small(corpus, **model, **{"model.adapter": recipe.model.adapter, "model.quantize": "nf4"})


@pytest.mark.parametrize(
    ("fields", "names", "nproc"),
    [
        pytest.param(DENSE, ["dp1-zero1-acc4"], 1, marks=SLOW, id="layers"),
        pytest.param(SPARSE_BASE, ["dp1-pp2-zero1-acc4"], 2, marks=SLOW, id="experts"),
        pytest.param(DENSE, [FLAT, STAGED, "dp2-zero2-acc2"], 2, marks=BREADTH, id="some"),
        pytest.param(DENSE, [], 2, marks=BREADTH, id="all"),
        pytest.param(SPARSE_BASE, [], 2, marks=BREADTH, id="all of experts"),
    ],
)
def test_plans_with_4_bit_weights_are_certified(fields, names, nproc, verify_corpus, tmp_path):
    job = job_of(_beside_packed(verify_corpus, tmp_path / "base", fields), names, nproc)
    run_ranks(1, refer, job, tmp_path)
    verdicts = run_ranks(nproc, certified, job, tmp_path, timeout=600)[0]
    assert verdicts
    assert [name for name, good in verdicts.items() if not good] == []


@pytest.mark.breadth
def test_bugs_of_4_bit_weights_are_detected(verify_corpus, tmp_path):
    job = job_of(_beside_packed(verify_corpus, tmp_path / "base"), [FLAT], nproc=2)
    run_ranks(1, refer, job, tmp_path)
    found = run_ranks(2, plant, job, tmp_path, "planted_adapter", "PACKED", timeout=600)[0]
    assert found.pop("none") == [FLAT]
    assert found == {bug.__name__: [] for bug in planted_adapter.PACKED}


def test_dropout_of_an_adapter_is_not_compared(verify_corpus):
    recipe = small(verify_corpus).with_(**{"model.adapter": {"rank": 2, "dropout": 0.5}})
    assert comparable(recipe, 4).model.adapter.dropout == 0.0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WHOLE = {"model.adapter": None, "model.quantize": "none", "model.config": {"rope_scaling": YARN, "rope_theta": 5e4}}


@pytest.mark.slow
@pytest.mark.parametrize("more", [WHOLE, {}], ids=["whole", "4 bits"])
def test_plans_on_fp8_folders_are_certified(more, verify_corpus, tmp_path):
    """The reference reads them as `transformers` does, with other rotary positions; in 4 bits, the values of fp8 are
    quantized again."""
    recipe = _beside_packed(verify_corpus, tmp_path / "base").with_(**more)
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantize_folder(tmp_path / "base", settings, lambda weight, name: fp8(weight, name, (32, 32)))
    job = job_of(recipe, [STAGED], 2)
    run_ranks(1, refer, job, tmp_path)
    assert all(run_ranks(2, certified, job, tmp_path)[0].values())
