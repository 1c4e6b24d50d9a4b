"""Measures conversations: tokenizing them, and training on them; prints one line of JSON.

python -m benchmarks.programs.chats write FOLDER              conversations and a tokenizer, for the others
python -m benchmarks.programs.chats ours FOLDER --cores 2     our tokenizing, from the file to the token store
python -m benchmarks.programs.chats raw FOLDER --cores 2      `apply_chat_template` and `encode_batch`, rows in memory
python -m benchmarks.programs.chats train FOLDER [--packed] [--lora]   `llmtrain train` on the model of the recipe
python -m benchmarks.programs.chats trl FOLDER [--packed] [--lora]     TRL's SFTTrainer on the same, LoRA by PEFT
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.programs.data import BATCH, Clock, use_cores

VOCABULARY = 4096
LENGTH, MICRO, ACCUMULATED = 256, 2, 4
RANK, ALPHA = 16, 32
RECIPE = "recipes/sft_chat.py"
GENERATION = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML; TRL takes the mask from its blocks."""


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "chats.jsonl").open(encoding="utf-8")]


def write(folder: Path, copies: int, vocabulary: int = VOCABULARY) -> dict[str, float]:
    """Writes `chats.jsonl`, the built-in corpus several times, and the folder `tokenizer`."""
    from llmtrain.data import prepare
    from llmtrain.data.cache import Cache
    from llmtrain.data.progress import Progress
    from llmtrain.data.sources.files import stdlib_corpus
    from llmtrain.data.sources.stdlib_chat import StdlibChat
    from llmtrain.plan.load import load_recipe

    folder.mkdir(parents=True, exist_ok=True)
    rows = [one.text for one in StdlibChat(stdlib_corpus(Cache(folder / "cache", Progress()))).documents()]
    (folder / "chats.jsonl").write_text("".join(f"{row}\n" for _ in range(copies) for row in rows), encoding="utf-8")
    fields = [f'data.tokenizer={{"vocab_size": {vocabulary}}}', f"data.cache_dir={folder / 'cache'}"]
    fields += [f"model.config.vocab_size={vocabulary}"]
    made = prepare(load_recipe(f"{RECIPE}:verify", fields)[0]).tokenizer_dir
    target = folder / "tokenizer"
    target.mkdir(exist_ok=True)
    for file in made.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / "chat_template.jinja").write_text(GENERATION)
    return {"conversations": len(rows) * copies}


def ours(folder: Path) -> dict[str, float]:
    """Reads, renders, proves, tokenizes and writes the conversations; nothing is reused from an earlier run."""
    from llmtrain.data.cache import Cache
    from llmtrain.data.chat.template import load_template
    from llmtrain.data.chat.tokenize import ChatOptions
    from llmtrain.data.progress import Progress
    from llmtrain.data.sources.corpus import open_corpora
    from llmtrain.data.tokenize import TokenizeOptions, token_store
    from llmtrain.data.tokenizer import prepare_tokenizer
    from llmtrain.recipe import DataConfig, Source

    source = Source(str(folder / "chats.jsonl"))
    data = DataConfig(sources=[source], tokenizer=str(folder / "tokenizer"), sequence_length=LENGTH)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        cache = Cache(Path(made), Progress())
        corpora = open_corpora([source], cache)
        tokenizer = prepare_tokenizer(data, corpora, 0.01, cache)
        template = load_template(None, tokenizer.folder)
        chat = ChatOptions(template, "assistant", "drop", "refuse", LENGTH)
        clock = Clock()
        store = token_store(corpora[0], "source", TokenizeOptions(tokenizer, "text", 0.01, chat), cache)
        return clock.speed(sum(len(stream) for stream in store.streams.values()))


def raw(folder: Path) -> dict[str, float]:
    """Renders and tokenizes rows in memory; token ids are extracted and discarded."""
    from transformers import AutoTokenizer

    rows, tokenizer = _rows(folder), AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokens = 0
    clock = Clock()
    for first in range(0, len(rows), BATCH):
        texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows[first : first + BATCH]]
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
            tokens += len(encoding.ids)
    return clock.speed(tokens)


def train(folder: Path, packed: bool, lora: bool, steps: int) -> dict[str, float]:
    """Returns the median of trained tokens per second over the logged windows after the first."""
    adapter = {"adapter": {"rank": RANK, "alpha": ALPHA}} if lora else {}
    fields = {
        "data.sources": json.dumps([{"name": str(folder / "chats.jsonl")}]),
        "data.tokenizer": str(folder / "tokenizer"),
        "data.chat_template": "null",
        "data.packing": "best_fit" if packed else "none",
        "data.cache_dir": str(folder / "cache"),
        "model": json.dumps(_model() | adapter),
        "train.epochs": "null",
        "train.max_steps": str(steps),
        "evaluation.every_steps": "0",
        "checkpoint.every_steps": "0",
        "export.at_end": "false",
    }
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "llmtrain", "train", RECIPE, "--run-dir", f"{name}/run", "--nproc", "1"]
        command += [f"--set={key}={value}" for key, value in fields.items()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(name, "run/metrics.jsonl").read_text().splitlines()]
    windows = [line for line in lines if "loss" in line][1:]
    return {"trained_per_second": statistics.median(line["tokens_per_second"] for line in windows)}


def trl(folder: Path, packed: bool, lora: bool, steps: int) -> dict[str, float]:
    """Does the same with TRL's SFTTrainer, with its defaults for all but the batches and the precision."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    times: list[float] = []
    trained: list[int] = []

    class Timed(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            trained.append(int((inputs["labels"][:, 1:] != -100).sum()))
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            times.append(time.perf_counter())
            return loss

    declared = _model()
    config = AutoConfig.for_model(declared["architecture"], **declared["config"])
    Timed(
        model=AutoModelForCausalLM.from_config(config),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train_dataset=Dataset.from_list(_rows(folder)),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear") if lora else None,
        args=SFTConfig(
            output_dir=str(folder / "trl"),
            assistant_only_loss=True,
            max_length=LENGTH,
            packing=packed,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=steps,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    ).train()
    first = 10 * ACCUMULATED  # as many steps as our first window has
    return {"trained_per_second": sum(trained[first:]) / (times[-1] - times[first - 1])}


def _model() -> dict[str, Any]:
    from llmtrain.plan.load import PythonRecipe

    architecture = PythonRecipe(Path(RECIPE)).module.architecture()
    model: dict[str, Any] = architecture.model_dump(include={"architecture", "config"})
    return model


def main() -> None:
    """Measures one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("write", "ours", "raw", "train", "trl"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    options = parser.parse_args()
    use_cores(options.cores)
    parts = {
        "write": lambda: write(options.folder, options.copies, options.vocabulary),
        "ours": lambda: ours(options.folder),
        "raw": lambda: raw(options.folder),
        "train": lambda: train(options.folder, options.packed, options.lora, options.steps),
        "trl": lambda: trl(options.folder, options.packed, options.lora, options.steps),
    }
    print(json.dumps(parts[options.part]()))


if __name__ == "__main__":
    main()
