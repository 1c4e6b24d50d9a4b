"""Files with correct hashes but invalid content: each causes one designed error that names the file."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llmtrain.checkpoint.before import check_data, check_resume
from llmtrain.checkpoint.contents import read_plan, read_state
from llmtrain.checkpoint.folder import check_new, faults, find, newest
from llmtrain.checkpoint.manifest import Manifest, read_manifests
from llmtrain.errors import CheckpointError, Exit, RecipeError, UserError
from llmtrain.run_dir import RunDir
from llmtrain.system.piece_headers import read_header
from llmtrain.system.untrusted import UNREADABLE
from tests.helpers.hand_made import PIECES, head_of, make_run, pieces, seal, write_head
from tests.helpers.small_plan import small_plan

ROUNDS = 100
"""Edits of each document."""
STRANGE = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "\0", "..", "/etc/passwd", "\ud800", "1", "step", "[" * 500, "é" * 5000, "\x1b[2J"),
    *([], {}, [[]], [None], {"": None}, {"a": {}}, [0] * 100, ["x"] * 100),
)


@pytest.fixture
def run(tmp_path) -> RunDir:
    return make_run(tmp_path / "run")


def _made(run: RunDir) -> Path:
    found = newest(run.checkpoints)
    assert found is not None
    return found


def _changed(document: Any, draw: random.Random) -> Any:
    """The document with one value replaced, removed or added at random."""
    document = copy.deepcopy(document)
    holder, key = None, None
    here = document
    while isinstance(here, dict | list) and here and (holder is None or draw.random() < 0.8):
        holder, key = here, draw.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = holder[key]
    if holder is None:
        return draw.choice(STRANGE)
    how = draw.random()
    if how < 0.2:
        del holder[key]
    elif how < 0.3 and isinstance(holder, dict):
        holder[draw.choice(["extra", "\0", "../x", "/x", "a/../../b", ""])] = here
    elif how < 0.4 and isinstance(here, int):
        holder[key] = here + draw.choice([-1, 1, 2**62])
    else:
        holder[key] = draw.choice(STRANGE)
    return document


def _text(document: Any, draw: random.Random) -> bytes:
    text = json.dumps(document).encode()
    how = draw.random()
    if how < 0.05:
        return text[: draw.randrange(len(text) + 1)]
    if how < 0.10:
        at = draw.randrange(len(text))
        return text[:at] + bytes([text[at] ^ (1 << draw.randrange(8))]) + text[at + 1 :]
    if how < 0.12:
        return b"[" * 100_000
    return text


def _only_designed(action, *named: Path) -> bool:
    """Whether it is refused: by an error that names one of these files. Nothing else may be raised."""
    try:
        action()
    except CheckpointError as error:
        told = error.report()
        assert any(str(path) in told for path in named), told
        assert told.replace("\n", "").isprintable()
        return True
    return False


def test_mutated_manifests_are_read_or_refused(run):
    made = _made(run)
    file = made / "MANIFEST.json"
    whole, refused = json.loads(file.read_text()), 0
    for seed in range(ROUNDS):
        draw = random.Random(seed)
        file.write_bytes(_text(_changed(whole, draw), draw))
        refused += _only_designed(lambda: read_manifests(made), file)
        _only_designed(lambda: check_resume(small_plan(), run, "auto", is_local=True), made)
        for ask in (find, newest, faults):
            ask(run.checkpoints)
    assert refused > ROUNDS // 2


@pytest.mark.parametrize("name", ["plan.json", "trainer.json"])
def test_mutated_plans_and_states_are_read_or_refused(run, name):
    made = _made(run)
    whole, refused = json.loads((made / name).read_text()), 0
    for seed in range(ROUNDS):
        draw = random.Random(seed)
        (made / name).write_bytes(_text(_changed(whole, draw), draw))
        refused += _only_designed(lambda: (read_plan(made), read_state(made)), made / name)
        _only_designed(lambda: check_data(made, "key"), made)
    assert refused > 0


def test_mutated_headers_of_pieces_are_read_or_refused(run):
    made = _made(run)
    listed, refused = pieces(), 0
    for seed in range(2 * ROUNDS):
        draw = random.Random(seed)
        head = head_of(listed)
        if seed % 2:
            head["__metadata__"]["pieces"] = _text(_changed(listed, draw), draw).decode(errors="replace")
        else:
            head = _changed(head, draw)
        write_head(made / PIECES, _text(head, draw), 120)
        seal(made)
        with suppress(*UNREADABLE):
            read_header(made / PIECES)
        refused += _only_designed(lambda: check_resume(small_plan(), run, "auto", is_local=True), made)
    assert refused > ROUNDS


@pytest.mark.parametrize("name", ["recipe.json", "plan.json", "run_id"])
def test_mutated_files_of_a_run_directory_are_read_or_refused(run, name):
    file = run.path / name
    whole = file.read_text()
    readers = {"recipe.json": run.read_recipe, "plan.json": run.read_plan, "run_id": run.read_id}
    for seed in range(ROUNDS):
        draw = random.Random(seed)
        content = whole.strip() if name == "run_id" else json.loads(whole)
        file.write_bytes(_text(_changed(content, draw), draw))
        _only_designed(readers[name], file)
        with suppress(RecipeError):  # another recipe
            _only_designed(lambda: run.check(small_plan().recipe), file)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("recipe.json", b"{", "recipe.json: cannot be read"),
        ("recipe.json", b"[]", "recipe.json: cannot be read"),
        ("plan.json", b"\xff", "plan.json: cannot be read"),
        ("run_id", b"", "run_id: cannot be read: contains ''"),
        ("run_id", b"\0" * 12, "run_id: cannot be read"),
        ("run_id", b"\xff\n", "run_id: cannot be read: is not UTF-8"),
    ],
)
def test_a_damaged_run_directory_is_exit_code_4(run, name, content, words):
    (run.path / name).write_bytes(content)
    readers = {"recipe.json": run.read_recipe, "plan.json": run.read_plan, "run_id": run.read_id}
    with pytest.raises(CheckpointError, match=words) as raised:
        readers[name]()
    assert raised.value.exit_code == Exit.CHECKPOINT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hosts": ["x"] * 1_000_000}, "hosts"),
        ({"hosts": []}, "hosts"),
        ({"part": 1}, "is part 1 of 1"),
        ({"step": "1"}, "step"),
        ({"step": -1}, "step"),
        ({"written": "\x1b[2J"}, "written"),
        ({"files": {"a\0b": None}}, "not the path of a file within"),
        ({"files": {"../a": None}}, "not the path of a file within"),
        ({"files": {"/etc/passwd": None}}, "not the path of a file within"),
    ],
)
def test_invalid_manifests_are_refused(run, fields, words):
    made = _made(run)
    file = made / "MANIFEST.json"
    document = json.loads(file.read_text())
    if "files" in fields:
        fields = {"files": {name: next(iter(document["files"].values())) for name in fields["files"]}}
    file.write_text(json.dumps(document | fields))
    with pytest.raises(CheckpointError, match=words) as raised:
        read_manifests(made)
    assert len(str(raised.value)) < 2000
    assert raised.value.exit_code == Exit.CHECKPOINT


def test_many_missing_machines_are_reported_in_one_line(run):
    made = _made(run)
    file = made / "MANIFEST.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hosts": [f"node{one}" for one in range(1000)]}))
    with pytest.raises(CheckpointError, match="and 994 more") as raised:
        check_resume(small_plan(), run, "auto", is_local=True)
    assert len(str(raised.value)) < 1000


def _without_pieces(head, listed):
    del head["__metadata__"]["pieces"]


def _integers(head, listed):
    head["0.exp_avg"]["dtype"] = "I32"


def _other_shape(head, listed):
    head["0.weight"]["shape"] = [2, 3]


def _gap(head, listed):
    head["1.exp_avg_sq"]["data_offsets"] = [88, 104]


def _beyond(head, listed):
    listed[0]["region"]["boxes"][0]["first"] = [1, 0]


def _too_long(head, listed):
    listed[0]["start"] = 1


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_without_pieces, "no list of pieces"),
        (_integers, "is I32, but trained tensors are floating point"),
        (_other_shape, r"has the shape \[2, 3\], not \[6\]"),
        (_gap, "is not at the offset that"),
        (_beyond, "not within the weight"),
        (_too_long, "elements 1 to 7 of 6"),
    ],
)
def test_invalid_headers_of_pieces_are_refused(run, edit, words):
    made, listed = _made(run), pieces()
    head = head_of(listed)
    edit(head, listed)
    if "pieces" in head["__metadata__"]:
        head["__metadata__"]["pieces"] = json.dumps(listed)
    write_head(made / PIECES, head, 120)
    seal(made)
    with pytest.raises(CheckpointError, match=words) as raised:
        check_resume(small_plan(), run, "auto", is_local=True)
    assert str(made / PIECES) in str(raised.value)


def test_a_header_with_an_excessive_length_is_not_read(run):
    file = _made(run) / PIECES
    file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ValueError, match="has a head of"):
        read_header(file)


# Of two checkpoints the newest is damaged: the one before is taken, and it is said why.


@pytest.fixture
def two(tmp_path) -> RunDir:
    run = make_run(tmp_path / "run")
    second = run.checkpoints / "step_00000002"
    shutil.copytree(run.checkpoints / "step_00000001", second)
    (second / "trainer.json").write_text(json.dumps({"step": 2, "samples": 16, "data": "key"}))
    seal(second, step=2)
    (run.checkpoints / "latest").write_text("step_00000002\n")
    return run


def test_a_flipped_byte_in_the_newest_header_falls_back(two):
    """Whichever byte it is: the launcher refuses the checkpoint by itself, or leaves it to the hashes."""
    file = two.checkpoints / "step_00000002" / PIECES
    content = file.read_bytes()
    length = 8 + struct.unpack("<Q", content[:8])[0]
    fell_back = 0
    for at in range(0, length, 7):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        chosen = check_resume(small_plan(), two, "auto", is_local=True)
        assert chosen is not None
        fell_back += chosen.name == "step_00000001"
    assert fell_back > length // 14


@pytest.mark.parametrize("how", ["byte", "folder", "fifo", "device", "binary", "empty", "loop", "long"])
def test_a_damaged_latest_loses_nothing(two, how):
    latest = two.checkpoints / "latest"
    latest.unlink()
    match how:
        case "byte":
            latest.write_bytes(b"step_0000000\xb2\n")
        case "folder":
            latest.mkdir()
        case "fifo":
            os.mkfifo(latest)
        case "device":
            latest.symlink_to("/dev/zero")
        case "binary":
            latest.write_bytes(b"\0\n")
        case "empty":
            latest.touch()
        case "loop":
            latest.symlink_to(latest)
        case "long":
            latest.write_bytes(b"x" * 100_000)
    assert newest(two.checkpoints) == two.checkpoints / "step_00000002"
    assert check_resume(small_plan(), two, "auto", is_local=True) == two.checkpoints / "step_00000002"
    (problem,) = faults(two.checkpoints)
    assert problem.field == str(latest)
    if how in ("binary", "empty"):
        assert "is not the name of a checkpoint" in problem.message


@pytest.mark.parametrize("how", ["file", "fifo", "dangling", "loop", "closed"])
def test_a_checkpoint_that_is_not_a_folder_is_reported(two, how):
    folder = two.checkpoints / "step_00000002"
    shutil.rmtree(folder)
    match how:
        case "file":
            folder.touch()
        case "fifo":
            os.mkfifo(folder)
        case "dangling":
            folder.symlink_to("nothing")
        case "loop":
            folder.symlink_to(folder)
        case "closed":
            folder.mkdir()
    assert newest(two.checkpoints) == two.checkpoints / "step_00000001"
    (problem,) = faults(two.checkpoints)
    assert problem.field == str(folder)
    from llmtrain.commands.checkpoint import one_checkpoint

    assert one_checkpoint(two.path) == two.checkpoints / "step_00000001"


@pytest.mark.parametrize("name", ["MANIFEST.json", PIECES, "trainer.json", "plan.json"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_devices_and_fifos_are_never_opened(run, name, kind):
    file = _made(run) / name
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is not a regular file"):
        check_resume(small_plan(), run, "auto", is_local=True)


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 2100])
def test_an_impossible_folder_name_is_reported(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"out\.write"):
        check_new(tmp_path / name)


def test_the_reader_accepts_saved_files(run):
    """The limits are wide enough for what is written: nothing of a manifest is lost on the way."""
    (manifest,) = read_manifests(_made(run))
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
