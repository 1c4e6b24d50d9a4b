"""A run directory is read back as written, and refuses another recipe, except for changes that the user permits."""

import json
import os
import stat
import subprocess
from dataclasses import replace

import pytest

from llmtrain.errors import CheckpointError, RecipeError
from llmtrain.plan import KernelChoice
from llmtrain.run_dir import (
    MAY_CHANGE,
    RunDir,
    check_allowed,
    default_run_dir,
    environment,
    forbidden_changes,
    identity_of,
)
from llmtrain.system.durable import write_atomically
from tests.helpers.small_plan import small_plan

DS_CONFIG = {"train_batch_size": 8}


@pytest.fixture
def plan():
    return small_plan()


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "runs" / "small")


def refused(run, plan, **changes):
    """Dotted fields that a run refuses to be continued with."""
    changed = plan.model_copy(update={"recipe": plan.recipe.with_(**changes)})
    with pytest.raises(RecipeError) as error:
        run.create(changed, DS_CONFIG)
    return [problem.field for problem in error.value.problems]


def test_the_default_path_contains_recipe_and_variant(plan):
    assert str(default_run_dir(plan.recipe).path) == "runs/small"
    assert str(default_run_dir(plan.recipe, "64gpu").path) == "runs/small-64gpu"


def test_a_written_run_directory_is_read_back(run, plan):
    run.create(plan, DS_CONFIG)
    assert run.read_plan() == plan
    assert json.loads(run.ds_config_file.read_text()) == DS_CONFIG
    assert json.loads(run.recipe_file.read_text())["name"] == "small"
    assert {"torch", "pydantic"} <= set(json.loads(run.environment_file.read_text())["packages"])
    assert sorted(entry.name for entry in run.path.iterdir()) == [
        *("checkpoints", "ds_config.json", "environment.json", "logs", "plan.json", "recipe.json", "run_id"),
        "tensorboard",
    ]
    assert stat.S_IMODE(run.recipe_file.stat().st_mode) == 0o644


def test_without_deepspeed_there_is_no_configuration_of_it(run, plan):
    assert run.read_ds_config() == {}
    run.create(plan, DS_CONFIG)
    assert run.read_ds_config() == DS_CONFIG
    run.create(plan, {})
    assert not run.ds_config_file.exists()
    assert run.read_ds_config() == {}


def test_another_recipe_is_refused_once_the_run_has_trained(run, plan):
    run.create(plan, DS_CONFIG)
    run.metrics_file.write_text('{"step": 1}\n')
    changes = {
        "optim.lr": 2e-3,
        "train.seed": 2,
        "train.max_steps": 200,
        "data.sources": [{"name": "a"}, {"name": "b"}],
    }
    fields = ["data.sources.0.name", "optim.lr", "train.seed"]
    found = refused(run, plan, **changes)
    assert set(fields) <= set(found)
    assert "data.sources.1.name" in found
    assert "train.max_steps" not in found
    assert run.read_plan() == plan


IMPORTED = {"data.tokenizer": "a/tokenizer"}


@pytest.mark.parametrize(
    ("changes", "allowed", "refused_fields"),
    [
        ({"optim.lr": 2e-3}, ["optim.lr"], set()),
        ({"optim.lr": 2e-3, "optim.weight_decay": 0.2}, ["optim.lr"], {"optim.weight_decay"}),
        ({"data.sources": [{"name": "other"}]}, ["data.sources"], set()),
        ({"optim.name": "lion"}, ["optim.lr"], {"optim.name"}),
    ],
)
def test_a_run_is_continued_with_other_values_at_its_users_request(changes, allowed, refused_fields, run, plan):
    plan = plan.model_copy(update={"recipe": plan.recipe.with_(**IMPORTED)})
    run.create(plan, DS_CONFIG)
    run.metrics_file.write_text('{"step": 1}\n')
    asked = replace(run, allowed=tuple(allowed))
    changed = plan.model_copy(update={"recipe": plan.recipe.with_(**changes)})
    if refused_fields:
        assert set(refused(asked, plan, **changes)) == refused_fields
        return
    assert all("--allow-change" in one.fix for one in forbidden_changes(plan.recipe, changed.recipe, "it"))
    asked.create(changed, DS_CONFIG)
    run.create(changed, DS_CONFIG)  # from now on it is the run's own value
    with pytest.raises(RecipeError):
        run.check(plan.recipe)


def test_other_sources_are_refused_if_tokens_or_steps_depend_on_them(plan):
    allowed, other = ("data.sources",), {"data.sources": [{"name": "other"}]}
    trained = plan.recipe.with_(**{"data.tokenizer": {"vocab_size": 512}})
    (problem,) = forbidden_changes(trained, trained.with_(**other), "it", allowed)
    assert "the tokenizer is trained on the sources" in problem.fix
    (problem,) = forbidden_changes(
        plan.recipe.with_(**IMPORTED, **EPOCHS), plan.recipe.with_(**IMPORTED, **EPOCHS, **other), "it", allowed
    )
    assert "with train.epochs" in problem.fix


EPOCHS = {"train.epochs": 2, "train.max_steps": None}


@pytest.mark.parametrize("name", ["model.config.hidden_size", "optim.name", "optim.lrr", "data.tokenizer"])
def test_only_some_changes_can_be_permitted(name):
    with pytest.raises(RecipeError, match="cannot be permitted"):
        check_allowed([name, "optim.lr"])
    with pytest.raises(RecipeError, match="may change without this option"):
        check_allowed(["train.max_steps"])
    check_allowed(["optim.lr", "data.sources", "data.sources.0.weight"])


def test_the_message_shows_both_values(run, plan):
    run.create(plan, DS_CONFIG)
    run.metrics_file.write_text('{"step": 1}\n')
    changed = plan.model_copy(update={"recipe": plan.recipe.with_(**{"optim.lr": 2e-3})})
    with pytest.raises(RecipeError, match=r"optim\.lr: .*started with 0\.001, but the recipe now has 0\.002"):
        run.create(changed, DS_CONFIG)


def test_another_recipe_is_refused_if_there_is_a_checkpoint(run, plan):
    run.create(plan, DS_CONFIG)
    (run.checkpoints / "step_00000010").mkdir()
    assert refused(run, plan, **{"model.config.hidden_size": 128}) == ["model.config.hidden_size"]


def test_a_run_that_never_trained_accepts_a_corrected_recipe(run, plan):
    run.create(plan, DS_CONFIG)
    changed = plan.model_copy(update={"recipe": plan.recipe.with_(**{"optim.lr": 2e-3})})
    run.create(changed, DS_CONFIG)
    assert run.read_plan().recipe.optim.lr == 2e-3


def test_a_run_can_be_continued_on_another_machine_and_extended(run, plan):
    run.create(plan, DS_CONFIG)
    run.metrics_file.write_text('{"step": 1}\n')
    changes = {"parallel.zero_stage": 2, "train.max_steps": 300, "logging.every_steps": 1, "batch.micro_batch_size": 4}
    changed = plan.model_copy(update={"recipe": plan.recipe.with_(**changes)})
    run.create(changed, DS_CONFIG)
    assert run.read_plan().recipe.train.max_steps == 300


def test_a_run_that_is_continued_keeps_its_kernels(run, plan):
    run.create(plan, DS_CONFIG)
    assert run.read_plan().kernels is None
    kernels = KernelChoice(key="k", device="d", why="measured", values={"kernels.loss": "chunked"})
    run.write_plan(plan.model_copy(update={"kernels": kernels}))
    run.create(plan, DS_CONFIG)
    assert run.read_plan().kernels == kernels


def test_each_field_decides_whether_it_may_change(plan):
    """A new field of the recipe fails this test until it is decided whether it makes another run."""
    fields = plan.recipe.dotted()
    free = {field for field in fields if MAY_CHANGE.fullmatch(field)}
    assert {field for field in fields if field not in free and field.startswith("parallel.")} == {
        *("parallel.precision", "parallel.grad_accum_dtype"),
    }
    assert {field for field in free if not field.startswith("parallel.")} == {
        *("name", "code_dir", "model.attention", "model.trust_remote_code", "data.cache_dir"),
        "data.special_tokens",  # another choice that changes tokens is found by their key
        *("kernels.blocks", "kernels.loss", "kernels.matmul", "kernels.threads"),
        *("batch.micro_batch_size", "batch.global_batch_size"),
        *(
            "train.max_steps",
            "train.epochs",
            "evaluation.every_steps",
            "evaluation.max_sequences",
            "evaluation.at_start",
            "evaluation.sets",
            "evaluation.metrics",
        ),
        *("checkpoint.every_steps", "checkpoint.keep_last", "checkpoint.keep_every_steps", "checkpoint.keep_best"),
        *("checkpoint.background", "checkpoint.best_metric", "checkpoint.best_mode"),
        "train.early_stopping",
        *(
            "guard.spike_sigma",
            "guard.spike_norm_ratio",
            "guard.window_steps",
            "guard.max_skipped",
            "guard.every_steps",
            "guard.then",
        ),
        "guard.max_rollbacks",
        *("watchdog.min_seconds", "watchdog.factor", "watchdog.phase_seconds", "watchdog.straggler_ratio"),
        *("logging.every_steps", "logging.trackers.0", "logging.project", "logging.price_per_device_hour"),
        *("export.at_end", "export.sample_prompt", "export.sample_tokens"),
        *("samples.every_steps", "samples.tokens", "samples.temperature"),
        *("tasks.every_steps", "tasks.include_path", "tasks.limit"),
        *("profile.steps", "profile.after_step", "profile.ranks.0", "profile.memory"),
    }


def test_a_run_keeps_its_identity(run, plan, tmp_path):
    run.create(plan, DS_CONFIG)
    first = run.read_id()
    run.create(plan, DS_CONFIG)
    assert run.read_id() == first
    other = RunDir(tmp_path / "other")
    other.create(plan, DS_CONFIG)
    assert other.read_id() != first


def test_the_identity_of_a_recipe_consists_of_the_fields_that_a_run_may_not_change(plan):
    recipe = plan.recipe
    identity = identity_of(recipe)
    assert identity_of(recipe.with_(**{"train.max_steps": 10, "parallel.zero_stage": 2, "name": "x"})) == identity
    assert identity_of(recipe.with_(**{"optim.lr": 0.5})) != identity
    default = type(recipe.optim).model_fields["weight_decay"].default
    # A field that is spelled out is not another recipe: one that a later version adds is not, either.
    assert identity_of(recipe.with_(**{"optim.weight_decay": default})) == identity


def test_a_folder_with_other_content_is_not_changed(run, plan):
    run.path.mkdir(parents=True)
    (run.path / "thesis.tex").write_text("years of work")
    with pytest.raises(RecipeError, match=r"thesis\.tex"):
        run.create(plan, DS_CONFIG)
    assert [entry.name for entry in run.path.iterdir()] == ["thesis.tex"]


def test_an_interrupted_creation_is_completed(run, plan):
    run.create(plan, DS_CONFIG)
    run.recipe_file.unlink()
    run.create(plan, DS_CONFIG)
    assert run.read_plan() == plan


def test_a_run_directory_cannot_replace_a_file(run, plan):
    run.path.parent.mkdir(parents=True)
    run.path.write_text("")
    with pytest.raises(RecipeError, match="is a file"):
        run.create(plan, DS_CONFIG)


def test_a_run_directory_below_a_file_is_refused(tmp_path, plan):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="file is a file"):
        RunDir(tmp_path / "file" / "run").create(plan, DS_CONFIG)


def test_a_damaged_recipe_is_named(run, plan):
    run.create(plan, DS_CONFIG)
    run.metrics_file.write_text('{"step": 1}\n')
    run.recipe_file.write_text('{"name": ')
    with pytest.raises(CheckpointError, match=r"recipe\.json"):
        run.create(plan, DS_CONFIG)


def test_a_missing_or_broken_plan_is_named(run, plan):
    with pytest.raises(RecipeError, match="is not a run"):
        run.read_plan()
    run.create(plan, DS_CONFIG)
    run.plan_file.write_text("{}")
    with pytest.raises(CheckpointError, match=r"plan\.json"):
        run.read_plan()


def test_no_secret_is_recorded():
    env = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SECRET_THING": "s3cr3t",
        "NCCL_API_KEY": "s3cr3t",
        "HF_TOKEN": "s3cr3t",
        "WANDB_API_KEY": "s3cr3t",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        "DB_PASSWORD": "s3cr3t",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": "/home/somebody",
    }
    document = environment(env)
    assert document["variables"] == {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false"}
    assert "s3cr3t" not in json.dumps(document)


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_users_repository_is_only_read(tmp_path, monkeypatch):
    """`git status` alone would write the index, under a lock that a killed run leaves there."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.py"
    recipe.touch()
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *command], check=True)
    os.utime(recipe, (1, 1))  # git looks again, and would note it
    index = (tmp_path / ".git" / "index").read_bytes()
    assert environment()["git"]["modified"] is False
    assert (tmp_path / ".git" / "index").read_bytes() == index
