"""Damage of any kind is found before anything is loaded, named by file, and never loses the whole run."""

from __future__ import annotations

import json
import math
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import save_file

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.manifest import File, read_manifests
from llmtrain.checkpoint.resume import choose_named, choose_newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import _load_random_state, load
from llmtrain.checkpoint.storage import probe
from llmtrain.engines.state.files import write
from llmtrain.engines.state.save_load import PROGRESS_FILE, CheckpointReader, _read_progress
from llmtrain.engines.state.shards import CheckpointShard, WeightSlice
from llmtrain.engines.state.writer import DiskWriter
from llmtrain.errors import CheckpointError, Exit
from llmtrain.system.durable import fingerprint
from tests.helpers.batches import GLOBAL_BATCH, tiny_recipe
from tests.helpers.hand_made import PIECES, head_of, make_run, write_head
from tests.helpers.harness import run_ranks
from tests.helpers.small_saves import RUN, save, saver_of
from tests.helpers.traces import engine_of, plan_of


def _saved(rank: int, folder) -> None:
    plan = plan_of(tiny_recipe(**{"parallel.zero_stage": 1, "batch.micro_batch_size": GLOBAL_BATCH // 2}), 2)
    Saver(folder, plan, engine_of(plan), RUN).save(TrainerState(step=1, data="key"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A checkpoint of two ranks under ZeRO-1."""
    folder = tmp_path_factory.mktemp("shards")
    run_ranks(2, _saved, folder)
    return folder / "step_00000001"


@contextmanager
def _restored(path):
    content = path.read_bytes()
    try:
        yield content
    finally:
        path.write_bytes(content)


def _cut(path, content):
    path.write_bytes(content[:-1])


def _flip(path, content):
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def _remove(path, content):
    path.unlink()


@pytest.mark.parametrize("damage", [_cut, _flip, _remove])
def test_damage_to_any_file_is_named(shards, damage):
    (manifest,) = verify_checkpoint(shards)
    assert len([name for name in manifest.files if name.startswith("engine/rank_")]) == 2
    for name in manifest.files:
        with _restored(shards / name) as content:
            damage(shards / name, content)
            with pytest.raises(CheckpointError) as raised:
                verify_checkpoint(shards)
            assert [problem.field for problem in raised.value.problems] == [str(shards / name)]
            assert raised.value.exit_code == Exit.CHECKPOINT
    verify_checkpoint(shards)


def test_all_damaged_files_are_reported_at_once(shards):
    names = sorted(read_manifests(shards)[0].files)[:2]
    with _restored(shards / names[0]) as one, _restored(shards / names[1]) as other:
        _cut(shards / names[0], one)
        _flip(shards / names[1], other)
        with pytest.raises(CheckpointError) as raised:
            verify_checkpoint(shards)
    assert sorted(problem.rule for problem in raised.value.problems) == ["checkpoint.hash", "checkpoint.size"]


def test_pieces_missing_from_the_manifest_are_refused(tmp_path):
    made = save(saver_of(tmp_path), 1)
    save_file({"a": torch.ones(1)}, made / "engine" / "rank_00001.0.safetensors")
    with pytest.raises(CheckpointError, match="not in the manifest"):
        verify_checkpoint(made)


# What a run goes on from.


def _choose(checkpoints):
    return choose_newest(checkpoints, RUN, probe(checkpoints))


def test_a_new_run_has_no_checkpoint_to_continue_from(tmp_path):
    assert _choose(tmp_path / "none") is None
    (tmp_path / ".step_00000001.partial-small").mkdir()  # the first save was killed
    assert _choose(tmp_path) is None


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path):
    saver = saver_of(tmp_path)
    made = [save(saver, step) for step in (1, 2, 3)]
    _remove(made[2] / "engine" / "model.safetensors", b"")
    (made[1] / "MANIFEST.json").unlink()
    choice = _choose(tmp_path)
    assert choice.folder == made[0]
    told = "\n".join(map(str, choice.rejected))
    assert "step_00000003/engine/model.safetensors" in told
    assert "step_00000002" in told
    assert load(choice.folder, saver.engine, saver.plan, "key").step == 1


def test_a_run_never_starts_from_scratch_because_nothing_can_be_read(tmp_path):
    made = save(saver_of(tmp_path), 1)
    _remove(made / "trainer.json", b"")
    with pytest.raises(CheckpointError, match=r"trainer\.json") as raised:
        _choose(tmp_path)
    assert raised.value.problems[-1].rule == "checkpoint.none"
    assert raised.value.exit_code == Exit.CHECKPOINT


def test_a_dangling_latest_is_reported(tmp_path):
    made = save(saver_of(tmp_path), 1)
    (tmp_path / "latest").write_text("step_00000007\n")
    choice = _choose(tmp_path)
    assert choice.folder == made
    assert "step_00000007" in str(choice.rejected[0])
    (made / "MANIFEST.json").rename(tmp_path / "away")
    made.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="step_00000007"):
        _choose(tmp_path)


def test_latest_decides_after_a_rollback(tmp_path):
    saver = saver_of(tmp_path)
    first, _ = save(saver, 1), save(saver, 2)
    (tmp_path / "latest").write_text(first.name)
    assert _choose(tmp_path).folder == first


def test_a_checkpoint_of_another_run_is_not_used(tmp_path):
    other = save(saver_of(tmp_path, run="other"), 9)
    with pytest.raises(CheckpointError, match="another run"):
        _choose(tmp_path)
    own = save(saver_of(tmp_path), 1)
    (tmp_path / "latest").write_text(other.name)
    assert _choose(tmp_path).folder == own


def test_a_named_checkpoint_of_another_run_needs_the_same_recipe(tmp_path):
    made = save(saver_of(tmp_path, run="other"), 1)
    storage, recipe = probe(tmp_path), read_manifests(made)[0].recipe
    assert choose_named(made, RUN, recipe, storage).folder == made
    with pytest.raises(CheckpointError, match="a different recipe"):
        choose_named(made, RUN, "0" * 16, storage)


# Pickles.


class _Canary:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_is_refused_and_does_not_run(tmp_path):
    """Also one that the manifest lists, as an attacker would write it."""
    saver, canary = saver_of(tmp_path / "checkpoints"), tmp_path / "canary"
    made = save(saver, 1)
    torch.save({"step": torch.ones(2), "bad": _Canary(canary)}, made / "engine" / "model.pt")
    (manifest,) = read_manifests(made)
    file = File(**vars(fingerprint(made / "engine" / "model.pt")), rank=0, private=False)
    manifest.model_copy(update={"files": {**manifest.files, "engine/model.pt": file}}).write(made)
    for use in (
        lambda: verify_checkpoint(made),
        lambda: load(made, saver.engine, saver.plan, "key"),
        lambda: _choose(made.parent),
    ):
        with pytest.raises(CheckpointError, match=r"model\.pt: is a pickle.*would call .*open"):
            use()
    assert not canary.exists()
    torch.load(made / "engine" / "model.pt", weights_only=False)  # it is a live one
    assert canary.exists()


def test_a_file_that_only_resembles_a_pickle_is_reported(tmp_path):
    made = save(saver_of(tmp_path), 1)
    (made / "shard.pt").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(CheckpointError, match=r"shard\.pt: is a pickle"):
        verify_checkpoint(made)


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    made = save(saver_of(tmp_path), 1)
    with ZipFile(made / "bomb.pt", "w", ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(1 << 26))
    with pytest.raises(CheckpointError, match=r"bomb\.pt: is a pickle.*longer than 16,777,216 bytes when"):
        verify_checkpoint(made)


@pytest.mark.parametrize("name", ["notes", "model.PT", "state.dill", "engine/.x", "rng/MANIFEST.json", "b.zip"])
def test_a_file_that_the_manifest_does_not_name_is_reported(name, tmp_path):
    made = save(saver_of(tmp_path), 1)
    (made / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError) as raised:
        verify_checkpoint(made)
    assert [problem.field for problem in raised.value.problems] == [str(made / name)]
    if name == "model.PT":
        with pytest.raises(CheckpointError):
            _choose(tmp_path)
    else:
        assert _choose(tmp_path).folder == made  # nothing reads it


def test_links_and_fifos_among_the_files_are_reported(tmp_path):
    made = save(saver_of(tmp_path), 1)
    os.mkfifo(made / "fifo")
    (made / "loop").symlink_to("loop")
    (made / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        verify_checkpoint(made)
    assert [problem.rule for problem in raised.value.problems] == ["checkpoint.unlisted"] * 3


def test_a_pickle_that_the_manifest_names_otherwise_is_refused(tmp_path):
    made = save(saver_of(tmp_path), 1)
    (made / "state.dill").write_bytes(b"\x80\x04.")
    (manifest,) = read_manifests(made)
    file = File(**vars(fingerprint(made / "state.dill")), rank=0, private=False)
    manifest.model_copy(update={"files": {**manifest.files, "state.dill": file}}).write(made)
    for use in (lambda: verify_checkpoint(made), lambda: _choose(made.parent)):
        with pytest.raises(CheckpointError, match=r"state\.dill: has none of the suffixes \.safetensors and \.json"):
            use()


def test_a_damaged_latest_is_reported_and_loses_nothing(tmp_path):
    made = save(saver_of(tmp_path), 1)
    (tmp_path / "latest").write_bytes(b"step_\xff\n")
    choice = _choose(tmp_path)
    assert choice.folder == made
    assert "is not UTF-8 text" in str(choice.rejected[0])
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    assert _choose(tmp_path).folder == made
    assert _choose(tmp_path).rejected
    save(saver_of(tmp_path), 2)  # the folder makes room
    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    assert not _choose(tmp_path).rejected


# Content that is not what the model needs, under hashes that are right.


def _with_weight(run, shape: list[int], boxes: list[dict], dtype: str = "F32") -> CheckpointReader:
    """A checkpoint of one weight, in pieces of one box each."""
    made = run.checkpoints / "step_00000001"
    listed = [
        {"name": "a", "region": {"shape": shape, "boxes": [box], "dim": 0}, "start": 0, "kinds": ["weight"]}
        | {"numel": math.prod(box["size"]), "steps": None}
        for box in boxes
    ]
    write_head(made / PIECES, head_of(listed, dtype), sum(4 * one["numel"] for one in listed))
    return CheckpointReader(made)


def test_a_weight_of_another_type_or_size_is_refused(tmp_path):
    run = make_run(tmp_path / "run")
    box = {"first": [0, 0], "size": [2, 3]}
    assert _with_weight(run, [2, 3], [box]).read_as("a", torch.ones(2, 3)).shape == (6,)
    with pytest.raises(CheckpointError, match=r"'a' is torch\.int32 there, where torch\.bfloat16 is needed"):
        _with_weight(run, [2, 3], [box], "I32").read_as("a", torch.ones(2, 3, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match="'a' has 6 elements there, but 8 are needed"):
        _with_weight(run, [2, 3], [box]).read_as("a", torch.ones(2, 4))
    with pytest.raises(CheckpointError, match="does not hold the weight for 'a'"):
        _with_weight(run, [2**40, 2**20], [box]).read_as("a", torch.ones(2, 3))  # and asks for no memory
    overlapping = [((0, 0), (3, 1)), ((1, 0), (1, 2)), ((2, 0), (1, 1))]
    boxes = [{"first": list(first), "size": list(size)} for first, size in overlapping]
    with pytest.raises(CheckpointError, match="does not hold the weight for 'a'"):
        _with_weight(run, [3, 2], boxes).read_as("a", torch.ones(3, 2))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"schedule": "1"}', b'{"schedule": 1, "deepspeed": {"__class__": 1}}', b"[" * 100_000],
)
def test_the_progress_of_an_engine_is_checked(content, tmp_path):
    made = make_run(tmp_path / "run").checkpoints / "step_00000001"
    (made / PROGRESS_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"progress\.json: cannot be read"):
        _read_progress(made / PROGRESS_FILE)


@pytest.mark.parametrize("shape", [None, (2, 3), (3,)])
def test_the_state_of_a_generator_is_checked(shape, tmp_path):
    (tmp_path / "rng").mkdir()
    states = {"cpu": torch.zeros(shape, dtype=torch.uint8)} if shape else {"cpu": torch.ones(3)}
    save_file(states, tmp_path / "rng" / "rank_00000.safetensors")
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        _load_random_state(tmp_path)


# Disks.


def test_a_disk_that_fills_up_damages_no_checkpoint(small_disk):
    saver = saver_of(small_disk / "checkpoints", elements=15_000)
    first = save(saver, 1)
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        save(saver, 2)
    assert "step_00000001" in raised.value.problems[0].fix
    assert _choose(small_disk / "checkpoints").folder == first
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    verify_checkpoint(save(saver, 2))
    assert sorted(path.name for path in saver.checkpoints.iterdir()) == ["latest", "step_00000001", "step_00000002"]


def test_a_disk_that_cannot_be_written_is_reported(small_disk):
    saver = saver_of(small_disk / "checkpoints")
    first = save(saver, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(saver, 2)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        probe(small_disk / "checkpoints")
    verify_checkpoint(first)


# Moments in 8 bit.

CODES, SCALES = ("exp_avg_code", "exp_avg_sq_code"), ("exp_avg_scale", "exp_avg_sq_scale")
BLOCKS = WeightSlice.whole((2, 3))


def _eight_bit(folder: Path, scales: list[tuple[WeightSlice, int, list[float]]]) -> Path:
    """Writes a matrix of two rows of three blocks. scales: of both moments, as (slice, first index, values)."""
    bytes_of = {kind: torch.arange(80, dtype=torch.uint8) for kind in CODES}
    elements = CheckpointShard("w", WeightSlice.whole((2, 40)), 0, {"weight": torch.zeros(80), **bytes_of})
    parts = [
        CheckpointShard("w", weight_slice, first, {kind: torch.tensor(own)})
        for weight_slice, first, own in scales
        for kind in SCALES
    ]
    write(DiskWriter(folder), 0, [[elements, *parts]])
    return folder / "engine" / "rank_00000.0.safetensors"


def test_scales_of_blocks_that_ranks_share_are_read_once(tmp_path):
    """The middle block is cut, by slices of columns; in the second row, also by a partition."""
    left, right = (WeightSlice.ranges((2, 3), 1, [(first, 2)]) for first in (0, 1))
    _eight_bit(tmp_path, [(left, 0, [0.0, 1, 3]), (left, 2, [3.0, 4]), (right, 0, [1.0, 2, 4, 5])])
    source = CheckpointReader(tmp_path)
    for kind in SCALES:
        assert source.whole("w", kind).tolist() == [0, 1, 2, 3, 4, 5]
    assert source.whole("w", CODES[0]).tolist() == list(range(80))


def test_a_rank_with_no_element_of_a_matrix_needs_none(tmp_path):
    _eight_bit(tmp_path, [(BLOCKS, 0, [1.0] * 6)])
    empty = {kind: torch.zeros(0, dtype=torch.uint8) for kind in CODES}
    CheckpointReader(tmp_path, 0).load(
        CheckpointShard("w", WeightSlice.whole((2, 40)), 80, {"weight": torch.zeros(0), **empty})
    )


@pytest.mark.parametrize(
    "scales",
    [
        [],
        [(BLOCKS, 0, [1.0, 1, 1, 1, 1])],
        [(BLOCKS, 1, [1.0, 1, 1, 1, 1])],
        [
            (WeightSlice.ranges((2, 3), 1, [(0, 2)]), 0, [1.0] * 4),
            (WeightSlice.ranges((2, 3), 1, [(0, 1)]), 0, [1.0] * 2),
        ],
        [(BLOCKS, 0, [1.0] * 6), (WeightSlice.whole((2, 4)), 0, [1.0] * 8)],
    ],
    ids=["none", "end", "beginning", "column", "two shapes"],
)
def test_missing_scales_are_named(scales, tmp_path):
    _eight_bit(tmp_path, scales)
    for kind in SCALES:
        with pytest.raises(CheckpointError, match=f"does not hold '{kind}' of the optimizer for 'w'"):
            CheckpointReader(tmp_path).whole("w", kind)


def _without_scale(head, listed):
    del head["1.exp_avg_scale"]


def _without_piece(head, listed):
    listed.pop()


def _without_kind(head, listed):
    listed[1]["kinds"] = []


def _without_blocks(head, listed):
    listed[1]["region"]["boxes"] = []


def _no_blocks(head, listed):
    listed[1]["numel"] = 0


def _fewer_blocks(head, listed):
    listed[1]["numel"] = 5


def _codes_of_floats(head, listed):
    head["0.exp_avg_code"]["dtype"] = "F16"
    head["0.exp_avg_code"]["shape"] = [40]


def _signed_codes(head, listed):
    head["0.exp_avg_code"]["dtype"] = "I8"


def _scales_of_integers(head, listed):
    head["1.exp_avg_scale"]["dtype"] = "I32"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_without_scale, "not at the offset"),
        (_without_piece, "do not match its list of pieces, such as '2.exp_avg_sq_scale'"),
        (_without_kind, "kinds"),
        (_without_blocks, "boxes"),
        (_no_blocks, "numel"),
        (_fewer_blocks, r"1.exp_avg_scale of 'w' has the shape \[6\], not \[5\]"),
        (_codes_of_floats, r"has the shape \[40\], not \[80\]"),
        (_signed_codes, "0.exp_avg_code of 'w' is I8, but codes are U8"),
        (_scales_of_integers, "1.exp_avg_scale of 'w' is I32, but trained tensors are floating point"),
    ],
)
def test_damaged_heads_of_8_bit_moments_are_named(edit, words, tmp_path):
    file = _eight_bit(tmp_path, [(BLOCKS, 0, [1.0] * 6)])
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    listed = json.loads(head["__metadata__"]["pieces"])
    edit(head, listed)
    head["__metadata__"]["pieces"] = json.dumps(listed)
    write_head(file, head, len(content) - 8 - length)
    for kind in ("weight", *CODES, *SCALES):
        with pytest.raises(CheckpointError, match=words) as raised:
            CheckpointReader(tmp_path).whole("w", kind)
        assert str(file) in str(raised.value)
