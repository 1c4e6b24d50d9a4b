"""Findings for single faults of a configuration, with their places, and none for correct files."""

import json
import random
import re
from pathlib import Path

import pytest

from llmtrain_lint import RULES, UsageError, Use, examine, parse_allowed
from llmtrain_lint.schema import REMOVED_KEYS, REMOVED_ZERO_KEYS, schema
from tests.lint.corpus import lint_file, lint_text

TOP_LEVEL_KEYS = {key for key, node in (schema().root.keys or {}).items() if not node.removed}
GOOD = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def rules(values: dict, world_size: int | None = None) -> list[str]:
    return [finding.rule for finding in lint_text(json.dumps(values), world_size) if finding.severity == "error"]


def effects(values: dict, reader: str = "deepspeed") -> dict[str, str]:
    found = examine("", json.dumps(values), Use(reader)).findings
    return {finding.field: finding.effect for finding in found if finding.severity == "error"}


def errors(text: str) -> list:
    return [finding for finding in lint_text(text) if finding.severity == "error"]


def test_correct_files_have_no_findings():
    assert rules({**GOOD, "bf16": {"enabled": True}}, 4) == []
    assert rules({**GOOD, "sequence_parallel_size": 2}, 8) == []
    assert errors("{ # a comment\n  train_batch_size: 8\n}") == []  # Hjson, as DeepSpeed reads it


def test_rendered_files_pass():
    files = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
    assert files
    assert [finding for file in files for finding in lint_file(file) if finding.severity == "error"] == []


def test_brackets_after_an_unquoted_text_are_pointed_out():
    text = "{\n  // device: x }\n  zero_optimization: { stage: 3, contiguous_gradients: true }\n"
    text += '  "a": {b: "c"}\n  offload: { device: nvme }\n}\n'
    (finding,) = errors(text)
    assert finding.rule == "lint.unreadable"
    assert finding.fix.startswith("line 5: an unquoted text extends to the end of its line")
    assert finding.fix.endswith('write "nvme"')
    (finding,) = errors('{"train_batch_size": 8, "bf16": {"enabled": true}')
    assert (finding.rule, finding.fix) == ("lint.unreadable", "")


def test_misspelt_keys_have_a_place():
    (finding,) = errors('{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 2}\n}')
    assert (finding.rule, finding.severity, finding.field) == ("lint.unknown_key", "error", "zero_optimisation")
    assert "did you mean 'zero_optimization'" in finding.message
    assert (finding.line, finding.column) == (3, 3)


def test_removed_keys_say_how_to_migrate():
    for key in REMOVED_KEYS:
        (finding,) = errors(json.dumps({**GOOD, key: {}}))
        assert (finding.rule, finding.field) == ("lint.removed_key", key)
        assert finding.fix
    (finding,) = errors(json.dumps({**GOOD, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}))
    assert (finding.field, finding.line) == ("zero_optimization.mics_shard_size", 1)


def test_auto_and_duplicate_keys_are_reported():
    text = '{"train_batch_size": 8,\n "optimizer": {"params": {"lr": "auto",\n  "lr": "auto"}}}'
    found = {finding.rule: finding for finding in examine("", text, Use("deepspeed")).findings}
    assert {"lint.auto", "lint.duplicate"} <= set(found)
    assert effects({**GOOD, "zero_optimization": {"stage": "auto"}})["zero_optimization.stage"] == "changes"
    assert found["lint.duplicate"].field == "optimizer.params.lr"
    assert (found["lint.duplicate"].line, found["lint.duplicate"].column) == (3, 3)
    # Objects in a list repeat their keys rightly.
    assert rules({**GOOD, "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": []}] * 2}}}) == []


def test_contradictory_batch_sizes_are_reported():
    assert rules({}) == ["lint.batch_missing"]
    assert rules({"train_batch_size": "8"}) == ["lint.batch_value"]
    assert rules({**GOOD, "train_batch_size": 10}) == ["lint.batch_triangle"]  # with no number of ranks
    assert rules(GOOD, 3) == ["lint.batch_triangle"]
    assert rules({"train_batch_size": 10}, 4) == ["lint.batch_triangle"]
    assert rules({"train_batch_size": 8}, 4) == []
    assert rules({**GOOD, "sequence_parallel_size": 3}, 4) == ["lint.world_divides"]
    (finding,) = lint_text(json.dumps({**GOOD, "gradient_clipping": 1, "tensor_parallel": {"autotp_size": 2}}), 8)
    assert finding.rule == "lint.batch_tensor"
    assert "2 × 2 × 4 = 16" in finding.message


def test_any_file_is_handled(tmp_path):
    deep = "[" * 100_000
    cases = [b"", b"\xff\xfe\x00", b"\x00" * 2000, deep.encode(), b'{"a": ' * 5000, b"[]", b"3", b"{", b'{"a" 1}']
    cases += [b'{"train_batch_size": ' + b"9" * 5000 + b"}", b'{"train_batch_size": ' + b"9" * 4000 + b"}"]
    for number, content in enumerate(cases):
        file = tmp_path / f"{number}.json"
        file.write_bytes(content)
        assert lint_file(file, 8), content[:20]
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (2**20 + 1))
    for path in (large, tmp_path, tmp_path / "gone.json"):
        assert [finding.rule for finding in lint_file(path)] == ["lint.unreadable"]
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert [finding.rule for finding in lint_file(tmp_path / "bom.json")] == ["lint.clipping_default"]


def test_damaged_files_never_crash():
    draw = random.Random(0)
    text = json.dumps({**GOOD, "zero_optimization": {"stage": 2}, "betas": [0.9, 0.95], "amp": None}, indent=1)
    for _ in range(400):
        damaged = list(text)
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(damaged))
            damaged[place : place + draw.randint(0, 3)] = draw.choice(
                ['"', "{", "}", "[", ",", ":", "\\", "'''", "#", "é", ""]
            )
        lint_text("".join(damaged), draw.choice([None, 0, 1, 7]))


def test_keys_are_those_that_deepspeed_reads():
    import deepspeed.runtime.config as config

    assert set(REMOVED_KEYS) == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(REMOVED_ZERO_KEYS) == set(config._REMOVED_ZERO_CONFIG_KEYS)
    # Every constant that runtime/config.py looks up in the configuration is known.
    source = Path(config.__file__).read_text(encoding="utf-8")
    looked_up = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", source))
    looked_up |= set(re.findall(r"param_dict\.get\(([A-Z_]+)|([A-Z_]+) in param_dict", source)[0])
    names = {getattr(config, constant) for constant in looked_up if constant}
    assert len(names) >= 15
    assert names <= TOP_LEVEL_KEYS


def test_allowed_rules_are_not_reported():
    text = json.dumps({**GOOD, "zero_optimisation": {}})
    assert lint_text(text, allow=parse_allowed(["unknown_key:zero_*", "lint.clipping_default"])) == []
    with pytest.raises(UsageError, match="every typo would be accepted"):
        parse_allowed(["unknown_key"])
    with pytest.raises(UsageError, match=r"did you mean 'lint\.unknown_key'"):
        parse_allowed(["lint.unknown_keys"])
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_the_right_place_of_misplaced_keys_is_named():
    (finding,) = errors('{"train_batch_size": 8, "grad_accum_dtype": "fp32"}')
    assert finding.fix == "move it to data_types.grad_accum_dtype"
    (finding,) = errors(
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3,\n "offload_param": {"devise": "cpu"}}}'
    )
    assert (finding.field, finding.line, finding.column) == ("zero_optimization.offload_param.devise", 2, 20)
    assert "did you mean 'device'" in finding.message


def test_hjson_is_read_as_deepspeed_reads_it():
    (finding,) = errors("train_batch_size: 8\nzero_optimization: {\n  # none\n  stage: 7\n}")  # no outermost braces
    assert (finding.rule, finding.line, finding.column) == ("lint.range", 4, 3)
    (finding,) = errors('{"train_batch_size": 8,\n "steps_per_print": Infinity\n}')  # a text to Hjson
    assert (finding.rule, finding.field) == ("lint.type", "steps_per_print")


@pytest.mark.parametrize("key", sorted(TOP_LEVEL_KEYS))
def test_no_known_key_is_refused(key):
    assert "lint.unknown_key" not in rules({key: 1})


ARGUMENTS = {"learning_rate": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "fp16": False}


def test_auto_is_allowed_where_the_reader_fills_it_in():
    betas = {"optimizer": {"type": "AdamW", "params": {"betas": "auto", "lr": "auto"}}}
    values = {**GOOD, **betas, "gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}}
    assert effects(values, "trainer") == {}
    assert effects(values, "accelerate") == {"optimizer.params.betas": "refuses"}
    assert effects(values)["zero_optimization.stage"] == "changes"
    assert effects(values)["gradient_clipping"] == "refuses"
    by = {one.by for one in examine("", json.dumps(values), Use("accelerate")).findings if one.rule == "lint.auto"}
    assert by == {"Accelerate"}


def test_arguments_of_the_trainer_are_compared():
    params = {"lr": 2e-4, "betas": [0.9, 0.95], "eps": "auto"}
    values = {**GOOD, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True}, "optimizer": {"params": params}}
    found = examine("", json.dumps(values), Use("trainer", arguments=ARGUMENTS)).findings
    differing = {one.field for one in found if one.rule == "lint.mismatch"}
    assert differing == {"optimizer.params.lr", "optimizer.params.betas", "fp16.enabled"}


def test_only_similar_keys_are_suggested():
    (finding,) = errors('{"train_batch_size": 8, "train_epochs": 3}')
    assert "did you mean" not in finding.message
    assert finding.fix == "remove it"


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("memory_optimization", "fix: remove it"),
        ("num_epochs", "fix: remove it"),
        ("verbose", "fix: remove it"),
        ("dtype", "fix: remove it"),
        ("max_train_micro_batch_size_per_gpu", "fix: remove it"),  # of the autotuner
        ("zero_optimisation", "did you mean 'zero_optimization'?"),
        ("train_batchsize", "did you mean 'train_batch_size'?"),
        ("max_grad_norm", "fix: rename it to gradient_clipping"),
        ("optimizer.eps", "fix: move it to optimizer.params.eps"),
        ("bf16.loss_scale", "fix: remove it"),
        ("zero_optimization.verbose", "fix: remove it"),
        ("zero_optimization.pipeline_read", "fix: move it to zero_optimization.offload_optimizer.pipeline_read"),
        ("checkpoint.partition_activations", "fix: move it to activation_checkpointing.partition_activations"),
        ("flops_profiler.end_profile_step", "did you mean 'profile_step'?"),
        ("scheduler.params.warmup_min_lr", "fix: remove it"),
    ],
)
def test_an_unknown_key_has_a_fix(key, says):
    values = {**GOOD, "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupCosineLR", "params": {}}}
    block = values
    for name in key.split(".")[:-1]:
        block = block.setdefault(name, {})
    block[key.rpartition(".")[2]] = 1
    [found] = [one for one in lint_text(json.dumps(values)) if one.field == key and one.severity == "error"]
    assert found.text.endswith(says)


def test_numbers_of_python_are_refused_by_other_readers():
    text = '{\n"steps_per_print": Infinity\n, "train_batch_size": 8, "zero_optimization": {"stage": 1}\n}'
    assert [one for one in examine("", text, Use("trainer")).findings if one.severity == "error"] == []
    assert [one.rule for one in errors(text)] == ["lint.type"]  # a text to Hjson
    (finding,) = errors('{"train_batch_size": NaN}')
    assert finding.fix.endswith("write a number")


def test_a_block_that_is_not_a_mapping_is_refused():
    for key in ("optimizer", "checkpoint", "activation_checkpointing"):
        for value in (None, True, "x"):
            assert effects({**GOOD, key: value}) == {key: "refuses"}
    assert effects({**GOOD, "bf16": None}) == {}
    assert effects({**GOOD, "fp16": None}) == {"fp16": "refuses"}


def test_the_total_batch_size_is_compared_with_the_known_factors():
    values = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 16}
    values["zero_optimization"] = {"stage": 1}
    assert effects(values, "trainer") == {"train_batch_size": "refuses"}
    assert effects({**values, "train_batch_size": 32}, "trainer") == {}


@pytest.mark.parametrize(("arguments", "severity"), [({}, "warning"), ({"fp16": True}, "error"), ({"fp16": False}, "")])
def test_loss_scales_are_checked_only_for_fp16(arguments, severity):
    values = {**GOOD, "zero_optimization": {"stage": 1}, "fp16": {"enabled": "auto", "min_loss_scale": 0}}
    found = examine("", json.dumps(values), Use("trainer", arguments=arguments)).findings
    assert [one.severity for one in found if one.field == "fp16.min_loss_scale"] == ([severity] if severity else [])


def test_data_parallel_ranks_are_given_with_the_world_size():
    text = json.dumps({**GOOD, "pipeline": {"pipe_partitioned": False}})
    found = examine("", text, Use(world_size=8, data_parallel=4)).findings
    assert "lint.batch_triangle" not in {one.rule for one in found}
    assert "lint.batch_triangle" in {one.rule for one in examine("", text, Use(world_size=8)).findings}


def test_yaml_is_read_with_positions():
    text = "train_batch_size: 8\nzero_optimization:\n  stage: 7\n  stage: 8\n"
    found = {one.rule: one for one in examine("a.yaml", text).findings}
    assert (found["lint.range"].line, found["lint.duplicate"].line) == (4, 4)
    for wrong in ("a: &b 1\nc: *b\n", "[1", "- 1", "[[]," * 20000, "[" * 5000, "? [a]\n: 1"):
        assert examine("a.yml", wrong).findings
    skipped = examine("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 3\n")
    assert (skipped.findings, skipped.readable) == ([], True)
