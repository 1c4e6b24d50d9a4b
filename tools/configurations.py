"""Files for users to read, copy and edit: DeepSpeed configurations and job scripts."""

from __future__ import annotations

import json

from llmtrain.launch.jobs.slurm import example_scripts
from llmtrain.plan.ds_config import render
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import PythonRecipe
from llmtrain.plan.rules import resolve
from tools.page import ROOT, Files


def ds_configs() -> Files:
    """Returns the DeepSpeed configuration of every recipe and variant, each for the cluster that its recipe names."""
    files: Files = {}
    for path in sorted((ROOT / "recipes").glob("*.py")):
        file = PythonRecipe(path)
        # Published weights are planned from their architecture, so that rendering does not need the hub.
        facts = model_facts(file.module.architecture(), None) if hasattr(file.module, "architecture") else None
        for variant in ("", *file.variants()):
            cluster = file.cluster(variant)
            assert cluster is not None, f"{path} names no cluster"
            config = render(resolve(file.recipe(variant), cluster, facts))
            name = f"{path.stem}-{variant}" if variant else path.stem
            files[f"ds_configs/{name}.json"] = json.dumps(config, indent=2) + "\n"
    return files


def slurm() -> Files:
    """Returns the job scripts for Slurm, from the templates of `llmtrain/launch/jobs/templates`."""
    return {f"slurm/{name}": text for name, text in example_scripts().items()}
