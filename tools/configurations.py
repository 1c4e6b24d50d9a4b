"""Files for users to read, copy and edit: DeepSpeed configurations and job scripts."""

from __future__ import annotations

import json
from typing import Any

from llmtrain.launch.jobs import render_template
from llmtrain.launch.jobs.slurm import SlurmOptions
from llmtrain.plan.ds_config import render
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.facts.trained import with_trained
from llmtrain.plan.load import PythonRecipe
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from tools.page import ROOT, Files


def ds_configs() -> Files:
    """Returns the DeepSpeed configuration of every recipe and variant, each for the cluster that its recipe names."""
    files: Files = {}
    for path in sorted((ROOT / "recipes").glob("*.py")):
        file = PythonRecipe(path)
        for variant in ("", *file.variants()):
            cluster = file.cluster(variant)
            assert cluster is not None, f"{path} names no cluster"
            recipe = file.recipe(variant)
            config = render(resolve(recipe, cluster, declared_facts(file, recipe)))
            name = f"{path.stem}-{variant}" if variant else path.stem
            files[f"ds_configs/{name}.json"] = json.dumps(config, indent=2) + "\n"
    return files


def declared_facts(file: PythonRecipe, recipe: Recipe) -> ModelFacts | None:
    """Returns the facts of published weights from the architecture that a recipe's file declares, without the hub."""
    declared = getattr(file.module, "architecture", None)
    return with_trained(model_facts(declared(), None), recipe.model) if declared else None


TRAIN = (
    "Trains a recipe on the nodes of a Slurm job, with one task per device:",
    "",
    "    sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 slurm/train.sbatch recipes/NAME.py --run-dir runs/NAME",
    "",
    "Before the time limit it saves, goes back into the queue, and continues when it is restarted. On CPUs, add",
    "--gpus-per-node=0.",
)
TRAIN_ARRAY = (
    "Trains a recipe several times as a job array, each time with another value of a field: seeds, or a sweep.",
    "",
    "    sbatch --array=0-1 slurm/train_array.sbatch runs/seeds train.seed=1 train.seed=2 -- recipes/NAME.py",
    "",
    "Each run directory is RUNS_FOLDER/FIELD=VALUE; each run saves, requeues and continues as train.sbatch does.",
)
PREPARE_DATA = (
    "Tokenizes and packs a recipe's data in advance, so that no GPU has to wait:",
    "",
    "    sbatch slurm/prepare_data.sbatch recipes/NAME.py",
)
VERIFY = (
    "Checks on one node that every plan of a recipe trains the same as plain PyTorch:",
    "",
    "    sbatch slurm/verify.sbatch recipes/NAME.py",
)


def slurm() -> Files:
    """Returns the job scripts for Slurm, which train any recipe, from the templates of `llmtrain/launch/jobs`."""
    common = ["--job-name=llmtrain", "--output=%x-%j.log"]
    several = ["--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=24:00:00"]
    alone = ["--nodes=1", "--ntasks=1", "--cpus-per-task=16"]
    again = [f"--signal=B:USR1@{SlurmOptions().warn_s}", "--open-mode=append", "--requeue"]
    train: dict[str, Any] = {"command": "", "choices": "", "run_dir": "", "srun_options": "", "setup": ()}
    train |= {"program": "python -m llmtrain", "max_requeues": SlurmOptions().max_requeues}
    one_node: dict[str, Any] = {"program": "python -m llmtrain", "setup": ()}
    scripts = {
        "train.sbatch": render_template(
            "train.sbatch.j2", comment=TRAIN, directives=[*common, *several, *again], array=False, **train
        ),
        "train_array.sbatch": render_template(
            "train.sbatch.j2",
            comment=TRAIN_ARRAY,
            directives=[common[0], "--output=%x-%A_%a.log", "--array=0-2", *several, *again],
            array=True,
            **train,
        ),
    }
    for name, comment, shape in (
        ("prepare_data", PREPARE_DATA, ["--time=12:00:00"]),
        ("verify", VERIFY, ["--gpus-per-node=8", "--time=04:00:00"]),
    ):
        scripts[f"{name}.sbatch"] = render_template(
            "one_node.sbatch.j2",
            comment=comment,
            directives=[f"--job-name=llmtrain_{name}", common[1], *alone, *shape],
            subcommand=name.removeprefix("prepare_"),
            **one_node,
        )
    return {f"slurm/{name}": text for name, text in scripts.items()}
