"""A job that is small enough to train dozens of times in a test."""

from __future__ import annotations

import importlib
import json
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from llmtrain.data import prepare
from llmtrain.plan.search.enumerate import enumerate_plans
from llmtrain.recipe import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    Source,
    TrainConfig,
    TrainedTokenizer,
)
from llmtrain.trials.verify import train
from llmtrain.trials.verify.batches import Batches
from llmtrain.trials.verify.job import VerifyJob, comparable, read_references
from llmtrain.trials.verify.job import certified as is_certified

STEPS = 4
CPU = torch.device("cpu")
MOE = {
    "model.architecture": "mixtral",
    "model.config.num_local_experts": 4,
    "model.config.num_experts_per_tok": 2,
    "model.config.output_router_logits": True,
    "model.config.router_aux_loss_coef": 0.1,
}


CHATS = {"data.chat_template": "chatml", "data.sequence_length": 96, "model.config.max_position_embeddings": 96}
"""With `write_chats`: conversations, several of which share a sequence."""


def write_chats(folder: Path) -> Path:
    """Writes conversations of different lengths."""
    path = folder / "chats.jsonl"
    roles = ("user", "assistant")
    rows = [
        [
            {"role": roles[turn % 2], "content": f"{turn} of {row}" + " and" * (row % 7)}
            for turn in range(2 + row % 2 * 2)
        ]
        for row in range(160)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def write_corpus(folder: Path) -> Path:
    """Writes documents that fill many sequences, and short ones of which several share a sequence."""
    path = folder / "corpus.jsonl"
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
    texts = [file.read_text(encoding="utf-8") for file in modules]
    parts = [part for text in texts for part in (text[:1200], *(text[at : at + 20] for at in range(1200, 2000, 20)))]
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    return path


def small(corpus: Path, **fields) -> Recipe:
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True}
    recipe = Recipe(
        name="small",
        model=ModelConfig(architecture="llama", config=config),
        data=DataConfig(
            sources=[Source(str(corpus))],
            tokenizer=TrainedTokenizer(vocab_size=300),
            sequence_length=32,
            eval_fraction=0.1,
            cache_dir=str(corpus.parent / "cache"),
        ),
        optim=OptimConfig(lr=1e-2, warmup_steps=1),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(max_steps=100),
    )
    return comparable(recipe.with_(**fields), STEPS)


def job_of(recipe: Recipe, names: list[str], nproc: int = 2) -> VerifyJob:
    plans = {one.name: one.plan for one in enumerate_plans(recipe, nproc)[0]}
    return VerifyJob(recipe=recipe, steps=STEPS, plans={name: plans[name] for name in names or plans})


def certified(rank: int, job: VerifyJob, folder: Path) -> dict[str, bool]:
    """Runs on each rank; returns plan → whether it stayed within its tolerances."""
    batches = Batches(job.recipe, prepare(job.recipe), STEPS)
    references = read_references(folder)
    return {
        name: is_certified(train.compare_plan(name, plan, batches, folder, CPU), references)
        for name, plan in job.of_size(dist.get_world_size())
    }


def refer(rank: int, job: VerifyJob, folder: Path) -> None:
    """Makes the reference of a job, without training its plans with one worker."""
    train.verify_rank(job.model_copy(update={"plans": {}}), folder, CPU, lambda text: None)


def plant(rank: int, job, folder, module: str, bugs: tuple[str, ...] | str) -> dict[str, list[str]]:
    """Returns bug → the plans that are certified although it is planted; `none`: without a bug. bugs: names, or the
    name of a list of them."""
    planted = importlib.import_module(f"tests.helpers.{module}")
    chosen = getattr(planted, bugs) if isinstance(bugs, str) else [getattr(planted, name) for name in bugs]
    found = {"none": certified(rank, job, folder)}
    for bug in chosen:
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            found[bug.__name__] = certified(rank, job, folder)
    return {name: [plan for plan, good in verdicts.items() if good] for name, verdicts in found.items()}
