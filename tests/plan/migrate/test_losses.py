"""Five steps of the Trainer and of TRL, and of the recipe that their own settings become: the losses are the same.

Every step reads all rows, so that their order does not matter. The recipe is trained by the plain reference, to which
every plan is compared. Not here: KTO, whose divergence TRL estimates from other completions (`test_trl_dpo.py` has it
with the same ones); ORPO, whose cross-entropy TRL takes of the prompt, too; reward models, whose reward TRL reads at
the end token.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmtrain.data import prepare
from llmtrain.plan.load.write import nested
from llmtrain.plan.migrate.programs import translate
from llmtrain.recipe import Recipe, parse_recipe
from llmtrain.trials.verify.batches import Batches
from llmtrain.trials.verify.reference import ReferenceLoop
from tests.helpers.chat_tokenizers import case as chat_tokenizer
from tests.helpers.small_pairs import TEMPLATE

pytestmark = pytest.mark.slow
STEPS, ROWS = 5, 8
TOLERANCE = 1e-5
"""Relative; both sum some hundred terms in fp32 in another order, and AdamW carries the difference on, as for twenty
steps in `tests/trials/verify/test_trl_sft.py`. Log-probabilities of completions, whose differences the other losses
are, are some hundred: absolute, as in `test_trl_dpo.py`."""
SHARED = {"max_steps": STEPS, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True}
SHARED |= {"bf16": False, "gradient_checkpointing": False, "output_dir": "out"}
QUIET = {"logging_nan_inf_filter": False, "disable_tqdm": True}
"""Settings of TRL alone, which no translation needs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    chat_tokenizer("chatml_generation", folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def text(draw: random.Random, size: int) -> str:
    return "".join(draw.choices("abcde ", k=size)).strip() or "a"


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Rows of which only one fits into a sequence."""
    draw = random.Random(3)
    made: list[dict[str, Any]] = []
    for _ in range(ROWS):
        prompt = text(draw, 20)
        user = {"role": "user", "content": prompt}
        if kind == "text":
            made.append({"text": text(draw, draw.randrange(20, 60))})
        elif kind == "messages":
            made.append({"messages": [user, {"role": "assistant", "content": text(draw, draw.randrange(10, 40))}]})
        else:
            made.append({"prompt": prompt, "chosen": f"yes {text(draw, 42)}", "rejected": f"no {text(draw, 45)}"})
    return made


def recipe_of(settings: dict[str, Any], name: str, kind: str, model: Path, folder: Path, **fields: Any) -> Recipe:
    """The recipe that settings become, with the rows and the model of this machine."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind)))
    file = folder / name
    file.write_text(yaml.dump({**settings, "model_name_or_path": str(model)}))
    made = translate([file]).fields
    made |= {"data.sources": [{"name": str(data)}], "data.cache_dir": str(folder / "cache"), "guard.spike_sigma": 0.0}
    return parse_recipe(nested(made | fields))


def ours(recipe: Recipe, weights: dict[str, torch.Tensor] | None = None) -> list[float]:
    loop = ReferenceLoop(recipe, weights or {}, torch.device("cpu"))
    steps = list(Batches(recipe, prepare(recipe), STEPS)._read_steps)  # none loses a target
    return [loop.train_step(sequences).loss for sequences in steps]


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


TRAINER = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "max_seq_length": 96,
}


@pytest.mark.parametrize(
    "own",
    [
        {
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "adam_beta2": 0.9,
            "max_grad_norm": 0.2,
        },
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-3}, "adam_epsilon": 1e-4},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 1, "optim": "sgd", "learning_rate": 0.5},
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 3, "min_lr_ratio": 0.1, "decay_type": "linear"},
            "warmup_steps": 1,
        },
    ],
    ids=["linear", "cosine_with_a_floor", "sgd", "warmup_stable_decay"],
)
def test_the_trainer(own, model, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    settings = {**SHARED, **TRAINER, **own}
    recipe = recipe_of(settings, "args.yaml", "text", model, tmp_path)
    assert recipe.batch.global_batch_size == ROWS
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id] for row in rows_of("text")]

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        padded = {
            "input_ids": [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows],
            "labels": [row["input_ids"] + [-100] * (longest - len(row["input_ids"])) for row in rows],
            "attention_mask": [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows],
        }
        return {name: torch.tensor(value) for name, value in padded.items()}

    arguments = {key: value for key, value in settings.items() if key != "max_seq_length"}
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=TrainingArguments(**{**arguments, **QUIET, "output_dir": str(tmp_path / "out")}),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in ids]),
        data_collator=collate,
    )
    assert ours(recipe) == pytest.approx(losses(trainer), rel=TOLERANCE)


SFT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_length": 96}
PAIRED = {"per_device_train_batch_size": ROWS, "learning_rate": 1e-3, "max_length": 96, "warmup_steps": 1}


@pytest.mark.parametrize("own", [{"assistant_only_loss": True, "packing": False}, {"packing": False}])
def test_sft(own, model, tmp_path):
    import trl
    from datasets import Dataset

    settings = {**SHARED, **SFT, **own, "lr_scheduler_type": "cosine"}
    recipe = recipe_of(settings, "sft.yaml", "messages", model, tmp_path)
    trainer = trl.SFTTrainer(
        model=str(model),
        args=trl.SFTConfig(**{**settings, **QUIET, "output_dir": str(tmp_path / "out")}),
        train_dataset=Dataset.from_list(rows_of("messages")),
    )
    assert ours(recipe) == pytest.approx(losses(trainer), rel=TOLERANCE)


def test_sft_of_an_adapter(model, tmp_path):
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model_state_dict

    adapter = {"lora_r": 4, "lora_alpha": 16, "lora_dropout": 0.0}
    settings = {**SHARED, **SFT, "assistant_only_loss": True, "packing": False}
    asked = {**settings, **adapter, "use_peft": True, "lora_target_modules": ["q_proj", "down_proj"]}
    recipe = recipe_of(asked, "sft.yaml", "messages", model, tmp_path)
    trainer = trl.SFTTrainer(
        model=str(model),
        args=trl.SFTConfig(**{**settings, **QUIET, "output_dir": str(tmp_path / "out")}),
        train_dataset=Dataset.from_list(rows_of("messages")),
        peft_config=LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    state = get_peft_model_state_dict(trainer.model)
    drawn = {name.removeprefix("base_model.model."): value.clone() for name, value in state.items()}
    assert ours(recipe, drawn) == pytest.approx(losses(trainer), rel=TOLERANCE)


@pytest.mark.parametrize("own", [{"beta": 0.3}, {"loss_type": "ipo"}])
def test_dpo(own, model, tmp_path):
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = {**SHARED, **PAIRED, **own}
    recipe = recipe_of(settings, "dpo.yaml", "pairs", model, tmp_path, **{"data.chat_template": TEMPLATE})
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, tokenizer.eos_token
    pairs = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{part: [{"role": "assistant", "content": row[part]}] for part in ("chosen", "rejected")},
        }
        for row in rows_of("pairs")
    ]
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=trl.DPOConfig(**{**settings, **QUIET, "output_dir": str(tmp_path / "out")}),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    assert ours(recipe) == pytest.approx(losses(trainer), rel=0, abs=TOLERANCE)
