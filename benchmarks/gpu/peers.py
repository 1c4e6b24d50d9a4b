"""Other libraries on the first device, with our model and batch: Hugging Face's Trainer and TRL's SFTTrainer."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import Numbers, Situation
from benchmarks.gpu.steps import CHATS, TimedPlan

STEPS, WARM_UP = 20, 5
CHAT_VOCABULARY = 4096
COPIES = 4
"""How often the built-in conversations are repeated, so that all batches differ in tokens."""


def trainer(given: Situation) -> Numbers:
    """Trains with Hugging Face's Trainer: bf16, its defaults for everything else, random tokens."""
    import torch
    from transformers import Trainer, TrainingArguments

    plan = TimedPlan()
    recipe = plan.recipe(given.small)
    rows, length, vocabulary = (
        recipe.batch.micro_batch_size,
        recipe.data.sequence_length,
        recipe.model.config["vocab_size"],
    )
    steps = WARM_UP + 2 if given.small else STEPS
    examples = [{"input_ids": row, "labels": row} for row in torch.randint(vocabulary, (rows * steps, length))]
    clock, on_cpu = _clock(), not torch.cuda.is_available()
    arguments: Any = TrainingArguments(
        output_dir=str(given.work / "trainer"),
        bf16=True,
        max_steps=steps,
        per_device_train_batch_size=rows,
        learning_rate=recipe.optim.lr,
        weight_decay=recipe.optim.weight_decay,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
    )
    Trainer(model=_model(recipe.model.config), args=arguments, train_dataset=examples, callbacks=[clock]).train()
    return _found(clock.times, tokens=rows * length)


def trl(given: Situation) -> Numbers:
    """Trains with TRL's SFTTrainer on packed conversations: bf16, without recomputation, otherwise its defaults."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    recipe = TimedPlan(source=CHATS).recipe(given.small, given.work)
    rows, length = recipe.batch.micro_batch_size, recipe.data.sequence_length
    folder, clock = chats_folder(given.work, given.small), _clock()
    trained: list[int] = []

    class Counting(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            trained.append(int((inputs["labels"][:, 1:] != -100).sum()))
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss

    conversations = [json.loads(line) for line in (folder / "chats.jsonl").open(encoding="utf-8")]
    Counting(
        model=_model(recipe.model.config),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train_dataset=Dataset.from_list(conversations),
        callbacks=[clock],
        args=SFTConfig(
            output_dir=str(given.work / "trl"),
            assistant_only_loss=True,
            max_length=length,
            packing=True,
            per_device_train_batch_size=rows,
            max_steps=WARM_UP + 2 if given.small else STEPS,
            bf16=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
    ).train()
    found = _found(clock.times, tokens=rows * length)
    taken = clock.times[-1] - clock.times[WARM_UP - 1]
    return found | {"trained_per_second": round(sum(trained[WARM_UP:]) / taken, 1)}


def chat_vocabulary(small: bool) -> int:
    """Returns the size of the vocabulary of the conversations' tokenizer."""
    return 512 if small else CHAT_VOCABULARY


def chats_folder(work: Path, small: bool) -> Path:
    """Returns the folder of the conversations and their tokenizer, which is written if it is not there."""
    folder = work / "chats"
    if not (folder / "written").exists():
        command = [sys.executable, "-m", "benchmarks.programs.chats", "write", str(folder)]
        command += ["--copies", str(1 if small else COPIES), "--vocabulary", str(chat_vocabulary(small))]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (folder / "written").touch()
    return folder


def chat_data(work: Path, small: bool) -> dict[str, Any]:
    """Returns the recipe's `data` for the conversations."""
    folder = chats_folder(work, small)
    return {
        "sources": [{"name": str(folder / "chats.jsonl")}],
        "tokenizer": str(folder / "tokenizer"),
        "packing": "best_fit",
        "cache_dir": str(folder / "cache"),
    }


def _model(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config))


def _clock() -> Any:
    """Returns a callback of the Trainer that notes when each step has ended on the device."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        times: list[float] = []  # noqa: RUF012  (one clock in a process)

        def on_step_end(self, *_: object, **__: object) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    return Clock()


def _found(times: list[float], tokens: int) -> Numbers:
    import torch

    taken = [after - before for before, after in itertools.pairwise(times)][WARM_UP - 1 :]
    step_s = statistics.median(taken)
    found: Numbers = {"steps": len(taken), "step_ms": round(1000 * step_s, 3)}
    found["tokens_per_second"] = round(tokens / step_s, 1)
    if torch.cuda.is_available():
        found["measured_bytes"] = torch.cuda.max_memory_allocated()
    return found
