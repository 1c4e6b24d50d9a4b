"""The launcher refuses runs that cannot continue, with the reason and a fix, and accepts the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from llmtrain.checkpoint.before import check_data, check_resume
from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.manifest import read_manifests
from llmtrain.errors import CheckpointError
from llmtrain.run_dir import RunDir, check_unchanged
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import plan_under, save_each

SOURCE = {"checkpoints": (2, {"zero_stage": 1})}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    run_ranks(2, save_each, SOURCE, {}, folder)
    return folder


@pytest.fixture
def run(written, tmp_path) -> RunDir:
    """A run directory with one checkpoint of two ranks; its identity is the empty one of `save_each`."""
    shutil.copytree(written, tmp_path / "run")
    return RunDir(tmp_path / "run")


@pytest.fixture
def plan():
    return plan_under({"zero_stage": 3}, 1)


def _of(run: RunDir) -> Path:
    found = newest(run.checkpoints)
    assert found is not None
    return found


def _refusal(run: RunDir, plan, resume: str = "auto", is_local: bool = True) -> str:
    with pytest.raises(CheckpointError) as error:
        check_resume(plan, run, resume, is_local)
    return error.value.report()


def _rewrite(folder: Path, **fields: object) -> None:
    """Changes fields of the manifest."""
    (file,) = folder.glob("MANIFEST*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_checkpoints_that_a_run_can_continue_from_pass(run, plan, tmp_path):
    assert check_resume(plan, run, "auto", is_local=True) == _of(run)
    assert check_resume(plan, run, str(_of(run)), is_local=True) == _of(run)
    assert check_resume(plan, RunDir(tmp_path / "new"), "auto", is_local=True) is None
    assert check_resume(plan, run, "never", is_local=True) is None
    check_data(_of(run), "key")


def test_other_data_are_refused(run):
    with pytest.raises(CheckpointError, match="was trained on other data"):
        check_data(_of(run), "another key")


def test_other_sources_that_the_run_has_accepted_are_taken(run, plan):
    other = plan.recipe.with_(**{"data.sources": [{"name": "other"}]})
    assert check_data(_of(run), "another key", other).data == "another key"
    with pytest.raises(CheckpointError, match="was trained on other data"):
        check_data(_of(run), "another key", plan.recipe)


def test_a_missing_or_shortened_file_is_named(run, plan):
    first, second = sorted((_of(run) / "engine").glob("rank_*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    told = _refusal(run, plan)
    assert f"{first}: is in the manifest but does not exist" in told
    assert f"{second}: has " in told
    assert "start a new run with another --run-dir" in told
    assert f"{first}: is in the manifest but does not exist" in _refusal(run, plan, str(_of(run)))


def test_the_previous_checkpoint_is_used(run, plan):
    older = run.checkpoints / "step_00000002"
    shutil.copytree(_of(run), older)
    _rewrite(older, written="2020-01-01")
    (_of(run) / "trainer.json").unlink()
    assert check_resume(plan, run, "auto", is_local=True) == older


def test_a_part_on_another_node_is_requested_if_all_workers_run_here(run, plan):
    _rewrite(_of(run), hosts=["node-a", "node-b"])
    assert "lacks the part of node-b" in _refusal(run, plan)
    assert check_resume(plan, run, "auto", is_local=False) == _of(run)  # node-b may have it


def test_another_run_is_refused(run, plan):
    _rewrite(_of(run), run="0123456789ab")
    assert "was written by another run, 0123456789ab" in _refusal(run, plan)
    assert check_resume(plan, run, str(_of(run)), is_local=True) == _of(run)  # of the same recipe: a branch


def test_another_recipe_is_refused_by_its_fields(run):
    _rewrite(_of(run), run="0123456789ab")
    other = plan_under({}, 1, **{"model.config.hidden_size": 128, "optim.lr": 0.5, "batch.global_batch_size": 16})
    told = _refusal(run, other, str(_of(run)))
    assert "model.config.hidden_size: the run that wrote" in told
    assert "was started with 64, but the recipe now has 128" in told
    assert "optim.lr: " in told
    assert "global_batch_size" not in told  # that may change
    assert "model.pretrained" in told


def test_a_checkpoint_without_the_optimizers_state_is_refused(run, plan):
    """As an importer of weights alone would write it."""
    _without(_of(run), ("exp_avg", "exp_avg_sq"))
    told = _refusal(run, plan)
    assert (
        "does not contain 'exp_avg' of the optimizer and 'exp_avg_sq' of the optimizer, which adamw needs to continue"
        in told
    )
    assert "export it" in told


def test_a_checkpoint_without_a_rank_is_refused(run, plan):
    """One that a manifest does not miss, as after a copy of the wrong files."""
    manifest = read_manifests(_of(run))[0]
    files = {name: file.model_dump() for name, file in manifest.files.items() if "engine/rank_00001" not in name}
    _rewrite(_of(run), files=files)
    for file in (_of(run) / "engine").glob("rank_00001.*"):
        file.unlink()
    verify_checkpoint(_of(run))
    assert "does not contain all of the weight for 'model." in _refusal(run, plan)


def _without(folder: Path, kinds: tuple[str, ...]) -> None:
    sizes = {}
    for file in (folder / "engine").glob("rank_*.safetensors"):
        with safe_open(file, framework="pt") as content:
            tensors = {key: content.get_tensor(key) for key in content.keys() if key.split(".")[1] not in kinds}  # noqa: SIM118
            pieces = json.loads(content.metadata()["pieces"])
        for piece in pieces:
            piece["kinds"] = [kind for kind in piece["kinds"] if kind not in kinds]
        save_file(tensors, file, {"pieces": json.dumps(pieces)})
        sizes[f"engine/{file.name}"] = file.stat().st_size
    files = {name: file.model_dump() for name, file in read_manifests(folder)[0].files.items()}
    _rewrite(folder, files={name: {**file, "bytes": sizes.get(name, file["bytes"])} for name, file in files.items()})


def test_unreadable_checkpoints_are_reported_without_a_traceback(run, plan):
    folder = _of(run)
    file = next((folder / "engine").glob("rank_*.safetensors"))
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert f"{file}: has a head of " in _refusal(run, plan)
    (folder / "MANIFEST.json").write_text("{")
    assert "cannot be read" in _refusal(run, plan, str(folder))
    assert "cannot be read" in _refusal(run, plan)


def test_the_global_batch_may_change():
    check_unchanged(tiny_recipe(), tiny_recipe(**{"batch.global_batch_size": 16}), "the run")
