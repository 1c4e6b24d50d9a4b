"""A plan as settings of the Trainer and of Accelerate: they load there, and become the same recipe again."""

from __future__ import annotations

import json

import pytest
import yaml

from llmtrain import library
from llmtrain.cli import main
from llmtrain.plan.load import load_recipe
from llmtrain.plan.load.write import nested
from llmtrain.plan.migrate.back import as_accelerate, as_trainer
from llmtrain.plan.migrate.programs import translate
from llmtrain.recipe.cluster import Cluster

CPU, GPUS = Cluster(nodes=1, devices_per_node=1, device="cpu"), Cluster(nodes=2, devices_per_node=4, device="h100")
RECIPES = {
    "whole": {},
    "zero3": {
        "parallel.zero_stage": 3,
        "parallel.precision": "bf16",
        "parallel.offload_optimizer": "cpu",
        "parallel.activation_checkpointing": "full",
        "optim.schedule": "linear",
        "optim.min_lr_ratio": 0.0,
        "optim.betas": [0.8, 0.9],
        "optim.clip_grad_norm": 0.5,
    },
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1, "parallel.precision": "bf16"},
    "fsdp2": {
        "parallel.backend": "accelerate",
        "parallel.accelerate": "fsdp2",
        "parallel.zero_stage": 2,
        "parallel.precision": "bf16",
    },
    "wsd": {
        "optim.schedule": "wsd",
        "optim.decay_steps": 20,
        "optim.name": "adamw_8bit",
        "parallel.precision": "autocast_bf16",
        "logging.trackers": ["wandb"],
        "checkpoint.keep_best": 1,
        "checkpoint.keep_last": 3,
        "checkpoint.every_steps": 100,
        "evaluation.every_steps": 100,
    },
}


def planned(name, cluster):
    recipe, _ = load_recipe("recipes/tiny.py", [])
    return library.plan(recipe.with_(**{"batch.global_batch_size": 32, **RECIPES[name]}), cluster).plan


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("program", ["trainer", "accelerate"])
def test_settings_become_the_same_recipe(program, name, tmp_path):
    plan = planned(name, GPUS)
    rendered = (as_trainer if program == "trainer" else as_accelerate)(plan)
    file = tmp_path / ("args.json" if program == "trainer" else "accelerate.yaml")
    file.write_text(json.dumps(rendered.settings) if program == "trainer" else yaml.safe_dump(rendered.settings))
    translation = translate([file], GPUS.world_size)
    assert [str(line) for line in translation.of("unsupported")] == []
    dotted = translation.check().dotted()
    theirs = {field for name in nested(translation.fields) for field in dotted if field.startswith(f"{name}.")}
    lost = {line.key for line in rendered.lines}
    known = {
        field for field in theirs if any(field == one or field.startswith(f"{one}.") for one in rendered.expressed)
    }
    original = plan.recipe.dotted()
    assert {field: dotted[field] for field in known - lost - {"evaluation.at_start"}} == {
        field: original[field] for field in known - lost - {"evaluation.at_start"}
    }
    assert program == "accelerate" or len(known - lost) > 15


def test_what_is_lost_is_listed():
    recipe, _ = load_recipe("recipes/tiny.py", [])
    fields = {
        "parallel.pipeline": 2,
        "parallel.zero_stage": 1,
        "optim.name": "muon",
        "guard.spike_sigma": 3.0,
        "checkpoint.keep_best": 2,
    }
    plan = library.plan(recipe.with_(**fields, **{"batch.global_batch_size": 32}), GPUS).plan
    lines = {line.key: line.text for line in as_trainer(plan).lines}
    assert {*fields} - {"parallel.zero_stage"} <= lines.keys()
    assert "belongs to the script" in lines["data.sequence_length"]


def test_the_command_prints_nothing_but_settings(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "tiny", "--as", "accelerate"])
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["mixed_precision"] == "no"  # YAML 1.1 reads it as false without quotes
    assert "data.sequence_length" in err


@pytest.mark.slow
def test_the_programs_load_them(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    for name in ("whole", "zero3", "wsd"):
        plan = planned(name, CPU)
        rendered = as_trainer(plan)
        rendered.settings["output_dir"] = str(tmp_path / "out")
        configuration = rendered.settings.pop("deepspeed", None)
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(rendered.settings))
        (arguments,) = HfArgumentParser((TrainingArguments,)).parse_json_file(str(file))
        assert arguments.per_device_train_batch_size == plan.batch.micro_batch_size
        if configuration:
            read = HfTrainerDeepSpeedConfig(configuration)
            read.trainer_config_process(arguments)
            read.trainer_config_finalize(arguments, None, 100)  # refuses what says something else
            assert read.config["zero_optimization"]["stage"] == 3
    for name in ("whole", "zero3", "fsdp2"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(as_accelerate(planned(name, GPUS)).settings))
        loaded = load_config_from_file(str(file))
        assert loaded.num_processes == GPUS.world_size
