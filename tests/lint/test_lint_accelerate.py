"""Accelerate's own configuration: what lint says equals what Accelerate does with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain_lint import examine
from llmtrain_lint.accelerate import KNOWN, NVME_PATHS, PLUGIN, TOP_LEVEL, deepspeed_values

PLAIN: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
}
FILE = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def launched(own: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bool]:
    """DeepSpeed's configuration as `accelerate launch` and the plugin of its workers make it, and `zero3_init_flag`."""
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(own))
    arguments, defaults, from_file = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    )
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    before = dict(os.environ)
    os.environ.update(prepare_deepspeed_cmd_env(arguments)[1])
    try:
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(os.environ["ACCELERATE_MIXED_PRECISION"])
        return plugin.deepspeed_config, plugin.zero3_init_flag
    finally:
        os.environ.clear()
        os.environ.update(before)


def lint(own: dict[str, Any]) -> list[str]:
    """The findings of Accelerate's own rules."""
    found = examine("accelerate.yaml", yaml.safe_dump(own)).findings
    return sorted(f"{one.rule}:{one.field}" for one in found if one.rule.startswith("lint.accelerate_"))


def with_block(block: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {**PLAIN, "deepspeed_config": block, **others}


@pytest.mark.parametrize(
    "own",
    [
        with_block({}),
        with_block(
            {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}, mixed_precision="bf16"
        ),
        with_block({"zero_stage": 2, "offload_optimizer_device": "cpu", "zero3_save_16bit_model": True}),
        with_block({"zero_stage": 3, "offload_param_device": "nvme"}, mixed_precision="fp16"),
    ],
)
def test_deepspeed_gets_what_lint_checks(own, tmp_path):
    theirs, _ = launched(own, tmp_path)
    ours = deepspeed_values(own)
    for key, value in ours.items():
        if isinstance(value, dict):
            known = {name: part for name, part in theirs[key].items() if part is not None and name != "auto_cast"}
            known = {
                name: {inner: one for inner, one in part.items() if one is not None} if isinstance(part, dict) else part
                for name, part in known.items()
            }
            assert value == known, key
        else:
            assert value == theirs[key], key
    assert lint(own) == []


@pytest.mark.parametrize("key", [*PLUGIN, *NVME_PATHS, "mixed_precision"])
def test_what_a_file_excludes_is_refused_by_both(key, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    block: dict[str, Any] = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False}
    assert lint(with_block(block)) == []
    launched(with_block(block), tmp_path)
    value: Any = {"zero_stage": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}.get(key, "none")
    own = with_block({**block, key: value}) if key != "mixed_precision" else with_block(block, mixed_precision="bf16")
    where = key if key == "mixed_precision" else f"deepspeed_config.{key}"
    assert lint(own) == [f"lint.accelerate_file:{where}"]
    with pytest.raises(ValueError, match="will be ignored"):
        launched(own, tmp_path)


def test_paths_for_nvme_are_lost(tmp_path):
    own = with_block(
        {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/drive"},
    )
    assert launched(own, tmp_path)[0]["zero_optimization"]["offload_optimizer"]["nvme_path"] == "none"
    assert lint(own) == ["lint.accelerate_nvme:deepspeed_config.offload_optimizer_nvme_path"]


def test_zero_init_below_stage_3_is_turned_off(tmp_path):
    for stage, is_on in ((2, False), (3, True)):
        own = with_block({"zero_stage": stage, "zero3_init_flag": True})
        assert launched(own, tmp_path)[1] is is_on
        assert bool(lint(own)) is not is_on


def test_unknown_keys(tmp_path):
    own = with_block({"zero_stage": 2, "offload_optimiser_device": "cpu"})
    assert launched(own, tmp_path)[0]["zero_optimization"]["offload_optimizer"]["device"] == "none"
    [found] = [one for one in examine("a.yaml", yaml.safe_dump(own)).findings if one.rule == "lint.accelerate_key"]
    assert "did you mean 'offload_optimizer_device'?" in found.message
    assert found.effect == "ignores"
    own = {**with_block({}), "num_process": 2}
    assert lint(own) == ["lint.accelerate_key:num_process"]
    with pytest.raises(ValueError, match="unknown keys"):
        launched(own, tmp_path)


def test_the_known_keys_are_those_of_accelerate():
    from accelerate.commands.config.config_args import ClusterConfig

    parser = launch_command_parser()
    known = {action.dest for action in parser._actions}
    assert set(KNOWN) - set(NVME_PATHS) <= known
    assert set(ClusterConfig.__dataclass_fields__) <= TOP_LEVEL


def test_other_types_of_distribution():
    assert "without DeepSpeed" in examine("a.yaml", yaml.safe_dump({**PLAIN, "distributed_type": "MULTI_GPU"})).skipped
    assert lint(with_block({"zero_stage": 2}, distributed_type="MULTI_GPU")) == [
        "lint.accelerate_unused:deepspeed_config"
    ]


def test_the_file_that_a_configuration_names_is_checked_with_its_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    (tmp_path / "ds.json").write_text(json.dumps({**FILE, **sizes}))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(with_block({"deepspeed_config_file": "ds.json"})))
    told = CliRunner().invoke(app, ["lint", "a.yaml"])
    assert told.exit_code == 1
    assert "a.yaml for Accelerate" in told.output
    assert "ds.json for Accelerate" in told.output
    assert "[lint.batch_mismatch]" in told.output or "train_batch_size" in told.output
    (tmp_path / "ds.json").unlink()
    assert CliRunner().invoke(app, ["lint", "a.yaml"]).exit_code == 0
