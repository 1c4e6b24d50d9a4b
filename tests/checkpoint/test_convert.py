"""A converted checkpoint has the same state, split for another plan: each of its ranks reads only its own files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import read_plan
from llmtrain.checkpoint.convert import convert, target_plan
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.state import load
from llmtrain.engines.state.save_load import CheckpointReader
from llmtrain.errors import CheckpointError, RecipeError
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import BACKENDS, EXPERTS, LAYOUTS, STOP, plan_under, save_each
from tests.helpers.traces import engine_of

MOE = {**MIXTRAL, "model.config.tie_word_embeddings": False, "micro": 4}
MUON = {"dp2-muon-zero3": (2, {"zero_stage": 3}), "pp2-muon-zero1": (2, {"pipeline": 2, "zero_stage": 1})}
ADAFACTOR = {
    "dp2-adafactor-zero3": (2, {"zero_stage": 3}),
    "pp2-adafactor-zero1": (2, {"pipeline": 2, "zero_stage": 1}),
    "tp2-adafactor-zero0": (2, {"tensor": 2}),
}
EIGHT_BIT = {
    "dp2-8bit-zero3": (2, {"zero_stage": 3}),
    "pp2-8bit-zero1": (2, {"pipeline": 2, "zero_stage": 1}),
    "tp2-8bit-zero0": (2, {"tensor": 2}),
    "dp2-8bit-fsdp2": (2, {"backend": "accelerate", "accelerate": "fsdp2", "zero_stage": 3}),
}
PLANS = LAYOUTS | BACKENDS | EXPERTS | MUON | ADAFACTOR | EIGHT_BIT
KINDS = {
    "experts": MOE,
    "muon": {"optim.name": "muon"},
    "adafactor": {"optim.name": "adafactor"},
    "8bit": {"optim.name": "adamw_8bit", "optim.options": {"block_size": 48}, "model.config.vocab_size": 257},
    "dense": {},
}
SLOW = ("dp2-fsdp2", "dp2-adafactor-zero3", "dp2-8bit-zero3")


def _mark(name: str):
    return pytest.mark.slow if name in SLOW else pytest.mark.breadth


def _kind(name: str) -> str:
    if name in EXPERTS:
        return "experts"
    return next((kind for kind in ("muon", "adafactor", "8bit") if f"-{kind}-" in name), "dense")


def _others(name: str) -> dict:
    return dict(KINDS[_kind(name)])


@pytest.fixture(scope="module")
def checkpoint_for(tmp_path_factory) -> Callable[[str], Path]:
    """Returns the checkpoint for a plan: of a dense model, or of a mixture of experts, by two ranks under ZeRO-2."""
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def saved(kind: str) -> Path:
        run_ranks(2, save_each, {kind: (2, {"zero_stage": 2})}, KINDS[kind], folder)
        return newest(folder / kind)

    return lambda name: saved(_kind(name))


def _next_losses(rank: int, checkpoints: list, name: str, own_only: list[bool]) -> list[list[float]]:
    """Losses after each checkpoint, by an engine that was built anew."""
    every = CheckpointReader.shards
    found = []
    for checkpoint, alone in zip(checkpoints, own_only, strict=True):
        if alone:
            CheckpointReader.shards = property(lambda self: pytest.fail("looked into the files of other ranks"))  # type: ignore[assignment]
        ranks, fields = PLANS[name]
        plan = plan_under(fields, ranks, **_others(name))
        engine = engine_of(plan)
        state = load(checkpoint, engine, plan, "key")
        assert (state.step, state.samples) == (STOP, STOP * GLOBAL_BATCH)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        batches = [
            step_batch(STOP + step, *shape, engine.data_parallel_rank, plan.data_parallel_size) for step in range(3)
        ]
        found.append([engine.train_step(batch).loss.item() for batch in batches])
        CheckpointReader.shards = every  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=_mark(name)) for name in PLANS])
def test_a_converted_checkpoint_has_the_same_state_and_each_rank_reads_its_own_files(name, checkpoint_for, tmp_path):
    source = checkpoint_for(name)
    ranks, fields = PLANS[name]
    plan = plan_under(fields, ranks, **_others(name))
    told: list[str] = []
    convert(source, tmp_path / "out", plan, told.append)
    (manifest,) = verify_checkpoint(tmp_path / "out")
    assert len(told) == manifest.world_size == ranks
    assert read_plan(tmp_path / "out") == plan
    assert not list(tmp_path.glob(".*"))
    # Each replica saves a share and reads all shares; a rank then reads what its replicas wrote.
    own_only = all(file.private for path, file in manifest.files.items() if path.startswith("engine/rank"))
    for direct, converted in run_ranks(ranks, _next_losses, [source, tmp_path / "out"], name, [False, own_only]):
        assert converted == direct


def _resized(cluster):
    return cluster.resized(1, 4, None)


def test_the_new_plan_is_the_old_one_with_other_fields(checkpoint_for):
    source = checkpoint_for("dp2-pp2-tp1-zero1")
    plan = target_plan(source, {"parallel.pipeline": 2, "parallel.zero_stage": 1}, _resized)
    assert (plan.data_parallel_size, plan.parallel.pipeline, plan.parallel.zero_stage, plan.workers) == (2, 2, 1, 4)
    assert plan.recipe.optim == read_plan(source).recipe.optim


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optim.lr": 0.5}, "optim.lr: .* was started with 0.001, but the recipe now has 0.5"),
        ({"model.config.hidden_size": 128}, "model.config.hidden_size"),
        ({"parallel.pipeline": 2, "parallel.zero_stage": 3}, "parallel.zero_stage"),
        ({"parallel.pipelin": 2}, "did you mean 'pipeline'"),
    ],
)
def test_impossible_conversions_are_refused_before_anything_is_written(fields, words, checkpoint_for):
    with pytest.raises(RecipeError, match=words):
        target_plan(checkpoint_for("dp2-pp2-tp1-zero1"), fields, _resized)


def test_a_damaged_source_or_an_existing_target_leaves_nothing(checkpoint_for, tmp_path):
    source = checkpoint_for("dp2-pp2-tp1-zero1")
    plan = plan_under({"zero_stage": 1}, 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="is not empty"):
        convert(source, tmp_path / "full", plan)
    shutil.copytree(source, tmp_path / "damaged")
    file = next((tmp_path / "damaged" / "engine").glob("rank_*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="its hash differs"):
        convert(tmp_path / "damaged", tmp_path / "out", plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "full"]


def test_half_precision_is_refused_with_a_fix(checkpoint_for, tmp_path):
    fields = {"parallel.precision": "fp16", "parallel.zero_stage": 2, "batch.micro_batch_size": 4}
    plan = resolve(tiny_recipe(**fields), Cluster(devices_per_node=2, device="h100"))
    with pytest.raises(RecipeError, match="continue from it as it is"):
        convert(checkpoint_for("dp2-pp2-tp1-zero1"), tmp_path / "out", plan)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kib", [16, 128])
def test_a_full_disk_is_reported_and_leaves_nothing(kib, checkpoint_for, small_disk, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    subprocess.run(["mount", "-o", f"remount,size={kib}k", str(small_disk)], check=True)
    plan = plan_under({"zero_stage": 1}, 2)
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(checkpoint_for("dp2-pp1-tp1-zero1"), small_disk / "out", plan, lambda _: None)
    assert not list(small_disk.iterdir())
    assert not (tmp_path / "extensions").exists(), "a minute was spent on compiling a collective of DeepSpeed"


@pytest.mark.slow
def test_the_command_on_a_full_disk_ends(checkpoint_for, small_disk):
    subprocess.run(["mount", "-o", "remount,size=128k", str(small_disk)], check=True)
    command = [sys.executable, "-m", "llmtrain", "checkpoint", "convert", checkpoint_for("dense"), small_disk / "out"]
    result = subprocess.run([*map(str, command), "--nproc", "1"], capture_output=True, text=True, timeout=200)
    assert (result.returncode, list(small_disk.iterdir())) == (4, []), result.stderr
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
