"""A write that fails names its file."""

from __future__ import annotations

import os
import resource
import stat
from contextlib import contextmanager

import pytest

from llmtrain.errors import RecipeError
from llmtrain.run_dir import write_json
from llmtrain.system.durable import create, write_atomically


@contextmanager
def no_room():
    """No file of this process may grow beyond some bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_error_names_the_replaced_file(tmp_path):
    with pytest.raises(OSError, match="File too large") as error, no_room():
        write_atomically(tmp_path / "file", "x" * 1000)
    assert error.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def _device(path):
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


NODES = {
    "a link": lambda path: path.symlink_to(path.with_name("target")),
    "a FIFO": os.mkfifo,
    "a device": _device,
}


@pytest.mark.parametrize("kind", NODES)
def test_only_regular_files_are_replaced(kind, tmp_path):
    node = tmp_path / "node"
    (tmp_path / "target").write_text("kept")
    try:
        NODES[kind](node)
    except PermissionError:
        pytest.skip("only root can create devices")
    before = node.lstat()
    with pytest.raises(OSError, match="is not a regular file"):
        write_atomically(node, "text")
    assert (node.lstat().st_ino, node.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["node", "target"]


def test_an_error_names_the_new_file(tmp_path):
    with pytest.raises(OSError, match="File too large") as error, no_room(), create(tmp_path / "file") as file:
        file.stream.write(b"x" * 1000)
    assert error.value.filename == str(tmp_path / "file")


def test_an_error_names_the_file_of_a_run_directory(tmp_path):
    with pytest.raises(RecipeError, match=f"cannot write {tmp_path}/plan.json: File too large"), no_room():
        write_json(tmp_path / "plan.json", "x" * 1000)
