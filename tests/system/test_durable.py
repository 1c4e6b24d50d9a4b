"""A write that fails names its file."""

from __future__ import annotations

import resource
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


def test_an_error_names_the_new_file(tmp_path):
    with pytest.raises(OSError, match="File too large") as error, no_room(), create(tmp_path / "file") as file:
        file.stream.write(b"x" * 1000)
    assert error.value.filename == str(tmp_path / "file")


def test_an_error_names_the_file_of_a_run_directory(tmp_path):
    with pytest.raises(RecipeError, match=f"cannot write {tmp_path}/plan.json: File too large"), no_room():
        write_json(tmp_path / "plan.json", "x" * 1000)
