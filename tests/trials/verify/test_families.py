"""The forward pass of the engines equals the reference, family by family."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from llmtrain.engines.plain import PlainLoop
from llmtrain.models import build_model
from llmtrain.models.documents import keep_apart
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.documents_check import mixing_parts
from llmtrain.trials.verify.compare import FP32
from llmtrain.trials.verify.job import worst
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.reference_run import ReferenceRun

# Of those whose documents run alone, learned positions and none, masks of their own, experts, recurrences; then whole
# sequences.
ALONE = ("gpt2", "opt", "bloom", "mpt", "falcon", "gpt_oss", "gemma2", "deepseek_v3", "ernie4_5_moe")
RECURRENT = ("falcon_h1", "jamba", "minimax", "xlstm")
WHOLE = ("deepseek_v32", "glm_moe_dsa", "doge")
SLOW = pytest.param("qwen3_next", marks=pytest.mark.slow)
ALL = [SLOW, *(pytest.param(family, marks=pytest.mark.breadth) for family in ALONE + RECURRENT + WHOLE)]


@pytest.mark.parametrize("family", ALL)
def test_packed_sequences_equal_the_documents_of_the_reference(family):
    default = AutoConfig.for_model(family)
    values = shrink_configuration(default, 4).to_dict()
    # Only fields that differ: a default may be infinite, which a recipe cannot contain.
    fields = {key: value for key, value in values.items() if default.to_dict().get(key, ...) != value}
    fields |= {key: 0.0 for key, value in fields.items() if ("drop" in key or "jitter" in key) and value}
    recipe = tiny_recipe(
        **{"model.architecture": family, "model.config": fields, "model.attention": "eager", "optim.warmup_steps": 0}
    )
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    keep_apart(model, mixing_parts(model.config))
    plain = PlainLoop(model, recipe)
    reference = ReferenceRun(recipe)
    assert reference.loop.runs_whole is (family in WHOLE)
    for step in range(2):
        batch = step_batch(step, 2, 2, size=4, vocab=values["vocab_size"])
        ours, theirs = plain.train_step(batch), reference.train_step(batch)
        pairs = ((ours.loss, theirs.loss), (ours.grad_norm, theirs.grad_norm))
        assert worst(abs(a.item() / b.item() - 1) for a, b in pairs) < FP32
