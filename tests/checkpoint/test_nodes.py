"""Nodes with local disks: each has its part of a checkpoint, and together the parts are complete."""

from __future__ import annotations

import shutil

import pytest

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.manifest import read_manifests
from llmtrain.checkpoint.resume import choose_newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import restore
from llmtrain.checkpoint.storage import probe
from llmtrain.errors import CheckpointError
from tests.helpers.batches import GLOBAL_BATCH, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of, trace

RUN = "nodes"
FIELDS = {"batch.micro_batch_size": GLOBAL_BATCH // 2, "checkpoint.keep_last": 2}


def _plan(stage: int):
    return plan_of(tiny_recipe(**FIELDS, **{"parallel.zero_stage": stage}), 2)


def _disk(folder, node: int):
    return folder / f"node{node}" / "checkpoints"


def _saved(rank: int, folder, stage: int):
    """Saves steps 1, 2 and 3, each rank on a disk of its own; what comes after step 3."""
    plan = _plan(stage)
    engine = engine_of(plan)
    saver = Saver(_disk(folder, rank), plan, engine, RUN)
    assert (saver.storage.part, saver.storage.ranks, saver.storage.is_leader) == (rank, (rank,), True)
    for step in (1, 2, 3):
        trace(engine, range(step - 1, step), *_shape(plan), rank, 2)
        saver.save(TrainerState(step=step, samples=step * GLOBAL_BATCH, data="key"))
    return trace(engine, range(3, 5), *_shape(plan), rank, 2)


def _shape(plan) -> tuple[int, int]:
    return plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps


def _continued(rank: int, folder, stage: int, nodes):
    """Returns the results of a run that continues with rank r on nodes[r], and the step that it continued from."""
    plan, checkpoints = _plan(stage), _disk(folder, nodes[rank])
    storage = probe(checkpoints)
    try:
        choice = choose_newest(checkpoints, RUN, storage)
    except CheckpointError as error:
        return str(error)
    if choice is None:
        return None
    engine = engine_of(plan)
    state = restore(choice.folder, choice.manifests, storage, engine, plan, "key")
    assert not list(checkpoints.glob(".*view*"))
    return state.step, trace(engine, range(state.step, state.step + 2), *_shape(plan), rank, 2)


@pytest.fixture(scope="module", params=[1, pytest.param(3, marks=pytest.mark.breadth)], ids=["zero1", "zero3"])
def nodes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    return request.param, folder, run_ranks(2, _saved, folder, request.param)


def test_each_node_has_a_manifest_of_its_part(nodes):
    _, folder, _ = nodes
    found = [read_manifests(_disk(folder, node) / "step_00000003") for node in (0, 1)]
    assert [[one.part for one in manifests] for manifests in found] == [[0], [1]]
    assert {manifests[0].save for manifests in found} == {found[0][0].save}
    assert not (_disk(folder, 0) / "step_00000001").exists()  # both have been pruned
    assert not (_disk(folder, 1) / "step_00000001").exists()
    with pytest.raises(CheckpointError, match="lacks the part"):
        verify_checkpoint(_disk(folder, 0) / "step_00000003")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["same nodes", "swapped"])
def test_pieces_missing_on_a_node_come_from_the_others(nodes, order):
    """Weights of ZeRO 1 are written by rank 0 only; where nodes are swapped each needs the shard of the other."""
    stage, folder, whole = nodes
    for expected, (step, continued) in zip(whole, run_ranks(2, _continued, folder, stage, order), strict=True):
        assert step == 3
        assert continued.losses == expected.losses
        assert all((continued.weights[name] == expected.weights[name]).all() for name in expected.weights)


def test_parts_copied_into_one_folder_are_a_complete_checkpoint(nodes, tmp_path):
    stage, folder, whole = nodes
    shared = _disk(tmp_path, 0)
    for node in (0, 1):
        shutil.copytree(_disk(folder, node), shared, dirs_exist_ok=True)
    assert {one.part for one in verify_checkpoint(shared / "step_00000003")} == {0, 1}
    for expected, (_, continued) in zip(whole, run_ranks(2, _continued, tmp_path, stage, (0, 0)), strict=True):
        assert continued.losses == expected.losses


def test_a_checkpoint_that_is_incomplete_on_a_node_is_skipped(nodes, tmp_path):
    stage, folder, _ = nodes
    shutil.copytree(folder, tmp_path / "copy")
    newest = _disk(tmp_path / "copy", 1) / "step_00000003"
    # Killed between the renames of the two nodes.
    newest.rename(newest.with_name(f".{newest.name}.partial-{RUN}"))
    results = run_ranks(2, _continued, tmp_path / "copy", stage, (0, 1))
    assert [step for step, _ in results] == [2, 2]


def test_a_replaced_node_does_not_restart_the_run_from_scratch(nodes, tmp_path):
    stage, folder, _ = nodes
    shutil.copytree(_disk(folder, 1), _disk(tmp_path, 1))  # node 0 is new
    for said in run_ranks(2, _continued, tmp_path, stage, (0, 1)):
        assert "contains no complete checkpoint" in said
