"""Every setting that the installed programs have is in a table, and every row of a table becomes a line."""

from __future__ import annotations

import dataclasses
import json

import pytest

from llmtrain.plan.migrate import accelerate, deepspeed_settings, trainer_settings, trl_settings
from llmtrain.plan.migrate.programs import translate
from llmtrain.recipe import Recipe
from llmtrain.recipe.aliases import FIELD_OF_ALIAS
from llmtrain_lint.schema import Node, schema

UNKNOWN = "is no setting"
BASE = {"per_device_train_batch_size": 2, "learning_rate": 1e-4}


def keys(tables):
    return {row.key for table in tables.values() for row in table}


def test_the_hints_for_misplaced_names_agree_with_the_tables():
    """A recipe's hints are below the tables, so they are a list of their own."""
    tables = [accelerate.TABLES, deepspeed_settings.TABLES, trainer_settings.TABLES, trainer_settings.OF_SCRIPTS]
    rows = [row for programs in tables for table in programs.values() for row in table] + [*trl_settings.ROWS]
    known = {row.key: row.field for row in rows if row.field and row.key in FIELD_OF_ALIAS}
    assert len(known) > 40
    assert {key: field for key, field in known.items() if field != FIELD_OF_ALIAS[key]} == {}


def names(kind) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.slow
def test_tables_have_the_settings_of_the_trainer_and_of_trl():
    from transformers import TrainingArguments
    from trl import DPOConfig, KTOConfig, ModelConfig, RewardConfig, ScriptArguments, SFTConfig

    assert names(TrainingArguments) - keys(trainer_settings.TABLES) == set()
    for kind in (SFTConfig, DPOConfig, KTOConfig, RewardConfig, ModelConfig, ScriptArguments):
        assert names(kind) - keys(trainer_settings.TABLES) - keys(trl_settings.TABLES) == set(), kind


@pytest.mark.slow
def test_defaults_are_those_of_the_installed_trainers():
    from transformers import TrainingArguments
    from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

    kinds = {"sft": SFTConfig, "dpo": DPOConfig, "kto": KTOConfig, "reward": RewardConfig}
    for method, kind in kinds.items():
        own = {field.name: field.default for field in dataclasses.fields(kind)}
        ours = trl_settings.DEFAULTS[method] | trl_settings.SHARED_DEFAULTS | {"bf16": None}  # which it makes true
        assert {name: own[name] for name in ours} == ours
        assert own["max_length"] == trl_settings.MAX_LENGTH
    rows = {row.key: row for table in trainer_settings.TABLES.values() for row in table}
    declared = Recipe.model_fields
    for field in dataclasses.fields(TrainingArguments):
        row = rows[field.name]
        if row.joint or not row.field:
            continue
        part, _, name = row.field.partition(".")
        here = declared[part].annotation.model_fields[name].default if name in declared else row.default
        default = row.default if row.default is not None else _default_of(row.field)
        assert default == field.default or here == field.default, field.name


def _default_of(field: str):
    part, _, name = field.partition(".")
    of_part = Recipe.model_fields[part].annotation.model_fields
    return of_part[name].default if name in of_part else None


@pytest.mark.slow
def test_tables_have_the_settings_of_accelerate():
    from accelerate.commands.config.config_args import ClusterConfig

    known = {key.partition(".")[0] for key in keys(accelerate.TABLES)}
    known |= {"fsdp_config"}  # whose keys have a table of their own
    assert names(ClusterConfig) - known == set()


def test_tables_have_the_keys_of_deepspeed():
    known = keys(deepspeed_settings.TABLES)

    def missing(node: Node, path: str):
        for name, inner in (node.keys or {}).items():
            key = f"{path}{name}"
            if key in known:
                continue
            if inner.keys and any(other.startswith(f"{key}.") for other in known):
                yield from missing(inner, f"{key}.")
            elif not inner.removed:
                yield key

    left = sorted(missing(schema().root, ""))
    assert not left, left


def samples(row):
    """Values of a setting: one that has a consequence, and, where they differ, the others of its row."""
    if row.values:
        return list(row.values)
    if row.field.startswith("parallel.") and "bf16" not in row.key and "fp16" not in row.key:
        return [1]
    return [1, 0.5, "text", True]


@pytest.mark.parametrize("program", ["trainer", "trl-sft", "trl-dpo", "trl-kto", "trl-orpo", "trl-reward"])
def test_rows_become_lines(program, tmp_path):
    file = tmp_path / "args.json"
    tables = [*trainer_settings.TABLES.values(), *trainer_settings.OF_SCRIPTS.values()]
    if program != "trainer":
        method = program.removeprefix("trl-")
        tables = [
            trl_settings.ROWS,
            trl_settings.OF_METHOD[method],
            *(() if method == "sft" else (trl_settings.OF_PREFERENCES,)),
        ]
    silent = []
    for table in tables:
        for row in table:
            for value in samples(row):
                file.write_text(json.dumps({**BASE, row.key: value}))
                try:
                    lines = translate([file], 1, program).lines
                except (TypeError, AttributeError, ZeroDivisionError) as error:
                    silent.append((row.key, value, repr(error)))
                    continue
                mine = [str(line) for line in lines if row.key in line.key or row.key in line.text]
                if not mine or any(UNKNOWN in line for line in mine):
                    silent.append((row.key, value, mine))
    assert not silent, "\n".join(map(str, silent))


def test_rows_of_deepspeed_are_keys_that_it_knows():
    known = schema()
    older = {".".join(key) for key in known.other_releases}
    free = ("optimizer.params.", "scheduler.params.")
    unknown = [
        key
        for key in keys(deepspeed_settings.TABLES)
        if known.node(*key.split(".")) is None and key not in older and not key.startswith(free)
    ]
    assert unknown == []
