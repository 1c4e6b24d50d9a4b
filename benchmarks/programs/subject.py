"""Writes our recipe's model and batches as plain files, from which the bare scripts and Hugging Face's Trainer train.

python -m benchmarks.programs.subject FOLDER --ranks 2 --steps 60 --set parallel.zero_stage=1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from llmtrain.plan.ds_config import render
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster

RECIPE = "recipes/tiny.py"


def write(path: str, folder: Path, ranks: int, steps: int, fields: list[str]) -> None:
    """Writes `model.json`, `ds_config.json` and `train.json`, and `batches_RANK.pt` for each rank."""
    import torch

    from llmtrain.data import BatchLoader, prepare
    from llmtrain.models.build import model_configuration

    recipe, _ = load_recipe(path, fields)
    plan = resolve(recipe, Cluster(devices_per_node=ranks))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "model.json", model_configuration(recipe).to_dict())
    _write(folder / "ds_config.json", render(plan))
    optim = recipe.optim
    _write(
        folder / "train.json",
        {
            "attention": recipe.model.attention_kernel,
            "lr": optim.lr,
            "betas": optim.betas,
            "eps": optim.eps,
            "weight_decay": optim.weight_decay,
            "warmup_steps": optim.warmup_steps,
            "min_lr_ratio": optim.min_lr_ratio,
            "clip_grad_norm": optim.clip_grad_norm,
            "log_every": recipe.logging.every_steps,
            "micro_batch_size": plan.batch.micro_batch_size,
            "accumulation": plan.batch.gradient_accumulation_steps,
            "sequence_length": recipe.data.sequence_length,
        },
    )
    prepared = prepare(recipe)
    for rank in range(ranks):
        schedule = BatchLoader.of(plan, prepared, dp_rank=rank)
        batches = [schedule.train_batch(number * plan.batch.global_batch_size) for number in range(steps)]
        torch.save(
            [[(one.input_ids, one.position_ids, one.labels) for one in step.micro_batches] for step in batches],
            folder / f"batches_{rank}.pt",
        )


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], dest="fields")
    options = parser.parse_args()
    write(options.recipe, options.folder, options.ranks, options.steps, options.fields)


if __name__ == "__main__":
    main()
