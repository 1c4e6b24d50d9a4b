"""A recipe small enough to train in a second, on a corpus cut from the standard library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from tests.helpers.commands import BREAKABLE, metrics

RECIPE = """
from llmtrain import (
    BatchConfig, CheckpointConfig, DataConfig, EvalConfig, LoggingConfig, ModelConfig, OptimConfig, Recipe, Source,
    TrainConfig, TrainedTokenizer, main,
)


def recipe() -> Recipe:
    return Recipe(
        name="small",
        model=ModelConfig(
            architecture="llama",
            config={{
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
            }},
        ),
        data=DataConfig(
            sources=[Source({corpus!r})], tokenizer=TrainedTokenizer(vocab_size=512), sequence_length=64,
            eval_fraction=0.1, cache_dir={cache!r},
        ),
        optim=OptimConfig(lr=1e-2, warmup_steps=3, clip_grad_norm=0.5),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(max_steps=12),
        evaluation=EvalConfig(every_steps=6, max_sequences=10),
        checkpoint=CheckpointConfig(every_steps=4),
        logging=LoggingConfig(every_steps=1, trackers=()),
    )


if __name__ == "__main__":
    main(recipe)
"""


STEPS = 40
RUN = (
    *("--nproc", "2", "--set", "parallel.zero_stage=1", "--set", f"train.max_steps={STEPS}"),
    *("--set", "checkpoint.every_steps=1000", "--set", "evaluation.every_steps=0", "--set", "export.at_end=false"),
)
"""Two ranks, without saves except when stopped."""


def write_small_recipe(folder: Path) -> Path:
    """Writes the recipe file and its corpus, a jsonl of some modules of the standard library."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    with (folder / "corpus.jsonl").open("w") as corpus:
        for module in modules:
            corpus.write(json.dumps({"text": module.read_text(encoding="utf-8")[:4000]}) + "\n")
    path = folder / "small.py"
    path.write_text(RECIPE.format(corpus=str(folder / "corpus.jsonl"), cache=str(folder / "cache")))
    return path


def start(small_recipe, run_dir: Path, *arguments: str) -> subprocess.Popen:
    """Starts a run, and returns after its first step; each step waits, so that the run does not end before its
    signal."""
    command = [sys.executable, "-m", "llmtrain", "train", str(small_recipe), "--run-dir", str(run_dir)]
    env = {**os.environ, "FAULT": "slow:0:1", "PYTHONPATH": BREAKABLE}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, *RUN, *arguments], **pipes, text=True, env=env)
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or not metrics(run_dir):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process
