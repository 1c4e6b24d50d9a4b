"""The plain loop compared with TRL's trainers on the same rows: tokens, labels, and the losses of twenty steps.

Some things are chosen to be the same, because they differ by design. TRL trains on whatever the template writes after
the prompt, here nothing but the turn and its end token; with ChatML's own template it would train on the line feed
between two turns. TRL averages over the pairs or completions of a micro-batch, here the whole batch. It also estimates
KTO's divergence from the micro-batch; it is given the mismatched completions that llmtrain has chosen. Its
cross-entropy term is the mean over the chosen tokens of a micro-batch; ours is, as in arXiv 2404.19733, a mean of the
completions' means, so that it is left out here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer

from llmtrain.data import prepare
from llmtrain.models import build_model
from llmtrain.recipe import Recipe
from llmtrain.trials.verify.batches import Batches
from llmtrain.trials.verify.reference import NO_TARGET, ReferenceDocument, ReferenceLoop
from tests.helpers.small_pairs import LENGTH, TEMPLATE, small_pairs, write_pairs

STEPS, BATCH = 20, 4
CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Absolute. A log-probability of a completion is some hundred, and TRL sums it in fp32: it is off by some 2⁻²⁴ of that,
1e-5, however small the loss is. The loss changes by at most β times as much."""


def rows() -> list[dict[str, str]]:
    """Pairs of which only one fits into a sequence, as TRL packs none."""
    draw = random.Random(3)

    def text(size: int) -> str:
        return "".join(draw.choices("abcde ", k=size)).strip() or "a"

    return [
        {"prompt": text(20), "chosen": f"yes {text(draw.randrange(30, 45))}", "rejected": f"no {text(45)}"}
        for _ in range(STEPS * BATCH)
    ]


def recipe(folder: Path, texts: list[dict[str, Any]], **fields: Any) -> Recipe:
    path = write_pairs(folder)
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    own = {
        "data.eval_fraction": 0.0,
        "data.sequence_length": LENGTH,
        "batch.global_batch_size": BATCH,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.0,
        "train.max_steps": STEPS,
        "guard.spike_sigma": 0.0,
    }
    return small_pairs(path, **{**own, **fields})


def trainer(made: Recipe, weights: dict[str, torch.Tensor], data: Dataset, folder: Path, **options: Any) -> Any:
    kind = "KTO" if made.objective.name == "kto" else "DPO"
    model, reference = (build_model(made, torch.float32, CPU) for _ in range(2))
    for one in (model, reference):
        one.load_state_dict(weights)
    tokenizer = AutoTokenizer.from_pretrained(str(made.data.tokenizer))
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, tokenizer.eos_token
    optim = made.optim
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        max_grad_norm=optim.clip_grad_norm,
        beta=made.objective.beta,
        max_length=None,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        train_sampling_strategy="sequential",
        use_cpu=True,
        **options,
    )
    own = {"model": model, "ref_model": reference, "args": arguments, "train_dataset": data}
    return getattr(trl, f"{kind}Trainer")(**own, processing_class=tokenizer)


def ids(document: ReferenceDocument, end: int) -> tuple[int, ...]:
    """The tokens of a conversation, the last of which is no input."""
    return (*document.inputs.tolist(), end)


def completion(document: ReferenceDocument) -> list[int]:
    """The tokens that are trained on."""
    return [label for label in document.targets.tolist() if label != NO_TARGET]


@pytest.mark.parametrize(
    ("name", "loss_type"),
    [
        pytest.param("dpo", "sigmoid", marks=pytest.mark.slow),
        pytest.param("ipo", "ipo", marks=pytest.mark.breadth),
    ],
)
def test_losses_are_those_of_trl(name: str, loss_type: str, tmp_path: Path) -> None:
    made = recipe(tmp_path, rows(), **{"objective.name": name, "objective.beta": 0.3})
    weights = build_model(made, torch.float32, CPU).state_dict()
    turns = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{part: [{"role": "assistant", "content": row[part]}] for part in ("chosen", "rejected")},
        }
        for row in rows()
    ]
    theirs = trainer(made, weights, Dataset.from_list(turns), tmp_path, loss_type=loss_type)
    known = {
        tuple(tuple(one["prompt_ids"] + one[part]) for part in ("chosen_ids", "rejected_ids")): (number, one)
        for number, one in enumerate(theirs.train_dataset)
    }
    end = theirs.processing_class.convert_tokens_to_ids("<|im_end|>")

    prepared = prepare(made)
    steps = list(Batches(made, prepared, STEPS)._read_steps)  # none loses a pair
    order = []
    for sequences in steps:
        for documents in sequences:
            chosen, rejected = (one for one in documents if one.pair is not None)
            number, row = known[ids(chosen, end), ids(rejected, end)]
            assert (completion(chosen), completion(rejected)) == (row["chosen_ids"], row["rejected_ids"])
            order.append(number)
    loop = ReferenceLoop(made, weights, CPU)
    ours = [loop.train_step(sequences).loss for sequences in steps]

    assert ours == pytest.approx(losses(theirs, order), rel=0, abs=TOLERANCE)


@pytest.mark.slow
def test_losses_of_kto_are_those_of_trl(tmp_path: Path) -> None:
    draw = random.Random(4)
    labelled: list[dict[str, Any]] = []
    for row in rows():
        good = draw.random() < 0.6
        labelled.append({"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good})
    weights = {"objective.desirable_weight": 1.3, "objective.undesirable_weight": 0.8}
    own = {"objective.name": "kto", "objective.beta": 0.3, "data.packing": "none", **weights}
    made = recipe(tmp_path, labelled, **own)
    initial = build_model(made, torch.float32, CPU).state_dict()
    turns = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
            "label": row["label"],
        }
        for row in labelled
    ]
    weights = {name.removeprefix("objective."): value for name, value in weights.items()}
    theirs = trainer(made, initial, Dataset.from_list(turns), tmp_path, loss_type="kto", **weights)
    known = {
        tuple(one["prompt_ids"] + one["completion_ids"]): (number, one)
        for number, one in enumerate(theirs.train_dataset)
    }
    end = theirs.processing_class.convert_tokens_to_ids("<|im_end|>")

    steps = list(Batches(made, prepare(made), STEPS)._read_steps)  # none loses a completion
    order, mismatched = [], []
    for documents in (one for sequences in steps for one in sequences):
        (document,) = (one for one in documents if one.desirable is not None)
        number, row = known[ids(document, end)]
        assert (completion(document), document.desirable) == (row["completion_ids"], row["label"])
        assert document.mismatched is not None
        order.append(number)
        mismatched.append(completion(document.mismatched))
        assert ids(document.mismatched, end) == (*row["prompt_ids"], *mismatched[-1])
    loop = ReferenceLoop(made, initial, CPU)
    ours, divergences = [], []
    for sequences in steps:
        ours.append(loop.train_step(sequences).loss)
        divergences.append(loop.divergence)
    assert max(divergences) > 0.1
    logged = losses(theirs, order, KL_completion_ids=mismatched)
    assert divergences == pytest.approx([line["kl"] for line in theirs.state.log_history if "kl" in line], abs=1e-3)
    assert ours == pytest.approx(logged, rel=0, abs=TOLERANCE)


def losses(theirs: Any, order: list[int], **columns: list[Any]) -> list[float]:
    """Trains on rows in an order, with other columns for them; returns the loss of each step."""
    data = theirs.train_dataset.select(order)
    for name, values in columns.items():
        data = data.remove_columns(name).add_column(name, values)
    theirs.train_dataset = data
    theirs.train()
    return [line["loss"] for line in theirs.state.log_history if "loss" in line]
