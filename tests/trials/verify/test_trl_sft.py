"""The plain loop, to which every strategy is compared, trains on conversations as TRL's SFTTrainer does.

TRL's normalisation is the same: a step's sum of losses over its trained tokens, accumulated micro-batches included
(`num_items_in_batch`). TRL finds these tokens by `{% generation %}` alone, and its sequences are not packed here, since
it keeps packed documents apart with flash attention only.
"""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from llmtrain.data import MicroBatch, StepBatch, prepare
from llmtrain.data.samples import NO_TARGET
from llmtrain.engines.plain import PlainLoop
from llmtrain.models import build_model
from llmtrain.recipe import parse_recipe
from tests.helpers.chat_tokenizers import case

STEPS, MICRO, ACCUMULATED = 20, 2, 2
TOLERANCE = 1e-5
"""Relative; both sum some hundred terms in fp32 in another order, and 20 steps of AdamW carry the difference on."""
LLAMA = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.fixture
def rows():
    words = ["It", "is", "4.", "Be", "brief.", "What", "2+2?", "Thanks", "Bye.", "weather", "in", "Rome", "sunny"]
    random = np.random.default_rng(1)

    def text():
        return " ".join(random.choice(words, random.integers(3, 30)))

    roles = ("user", "assistant")
    return [
        [{"role": roles[turn % 2], "content": text()} for turn in range(2 * random.integers(1, 3))]
        for _ in range(STEPS * MICRO * ACCUMULATED)
    ]


@pytest.mark.slow
def test_the_plain_loop_trains_as_trl_does(tmp_path, rows):
    import datasets
    import trl
    from transformers import AutoTokenizer

    one = case("chatml_generation", tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    recipe = parse_recipe(
        {
            "name": "sft",
            "model": {"architecture": "llama", "config": LLAMA},
            "data": {
                "sources": [{"name": str(tmp_path / "rows.jsonl")}],
                "tokenizer": str(one.folder),
                "sequence_length": 256,
                "packing": "none",
                "eval_fraction": 0.0,
                "cache_dir": str(tmp_path / "cache"),
            },
            "optim": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0, "schedule": "constant"},
            "batch": {"global_batch_size": MICRO * ACCUMULATED, "micro_batch_size": MICRO},
            "train": {"epochs": 1},
        }
    ).with_(**{"train.max_steps": STEPS})
    source = prepare(recipe).sources[0]
    stream = source.store.streams["train"]
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    theirs = []

    class Trainer(trl.SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            theirs.append((loss.item(), inputs["input_ids"], inputs["labels"]))
            return loss

    Trainer(
        model=copy.deepcopy(model),
        processing_class=AutoTokenizer.from_pretrained(one.folder),
        train_dataset=datasets.Dataset.from_list([{"messages": row} for row in rows]),
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "trl"),
            assistant_only_loss=True,
            max_length=None,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=STEPS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
        ),
    ).train()
    bounds = stream.documents.astype(int).tolist()
    documents = {
        tuple(stream.tokens[first:end].tolist()): (number, stream.loss_mask[first:end])
        for number, (first, end) in enumerate(pairwise(bounds))
    }
    loop = PlainLoop(model, recipe)
    assert len(theirs) == STEPS * ACCUMULATED
    for step in range(STEPS):
        micro_batches, loss = [], 0.0
        for part, inputs, labels in theirs[step * ACCUMULATED : (step + 1) * ACCUMULATED]:
            loss += part
            index = []
            for ids, targets in zip(inputs.tolist(), labels.numpy(), strict=True):
                size = next(size for size in range(len(ids), 0, -1) if tuple(ids[:size]) in documents)
                number, trained = documents[tuple(ids[:size])]
                assert np.array_equal(targets[:size] != NO_TARGET, trained)
                assert np.array_equal(targets[:size][trained], np.array(ids[:size])[trained])
                assert (targets[size:] == NO_TARGET).all()
                index.append(number)
            read = source.train.read(np.array(index))
            micro_batches.append(MicroBatch(*map(torch.from_numpy, read[:3])))
        targets = sum(int((one.labels != NO_TARGET).sum()) for one in micro_batches)
        batch = StepBatch(micro_batches, targets, MICRO * ACCUMULATED, step * MICRO * ACCUMULATED)
        assert loop.train_step(batch).loss.item() == pytest.approx(loss, rel=TOLERANCE)
