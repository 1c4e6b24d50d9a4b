"""A rank's files are on disk with the hash of what was written, or the rank reports an error."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.checkpoint import save
from llmtrain.checkpoint.save import HostCopies
from llmtrain.engines.state.writer import DeferredBytes, DiskWriter
from llmtrain.system.durable import create, fingerprint


def test_fingerprints_are_those_of_the_files(tmp_path):
    writer = DiskWriter(tmp_path)
    writer.file("engine/a", [b"1" * 3_000_000], private=True)
    writer.tensors("b.safetensors", {"x": torch.arange(5)})
    writer.text("c.json", "ä")
    assert writer.error is None
    assert {name: file.private for name, file in writer.files.items()} == {
        "engine/a": True,
        "b.safetensors": False,
        "c.json": False,
    }
    for name, file in writer.files.items():
        assert fingerprint(tmp_path / name) == file.fingerprint
        assert file.fingerprint.bytes == (tmp_path / name).stat().st_size
    assert (tmp_path / "engine" / "a").read_bytes() == b"1" * 3_000_000
    assert torch.equal(load_file(tmp_path / "b.safetensors")["x"], torch.arange(5))
    assert (tmp_path / "c.json").read_text(encoding="utf-8") == "ä"


def test_the_fingerprint_does_not_depend_on_how_it_was_written(tmp_path):
    content = os.urandom(3_000_001)
    with create(tmp_path / "small") as small:
        for start in range(0, len(content), 777):
            small.stream.write(content[start : start + 777])
    with create(tmp_path / "large") as large:
        large.stream.write(content)
    assert small.fingerprint == large.fingerprint == fingerprint(tmp_path / "large")
    assert (tmp_path / "small").read_bytes() == content


def test_the_first_error_is_kept_and_nothing_is_written_after_it(tmp_path, monkeypatch):
    writer, written = DiskWriter(tmp_path), os.write

    def full(descriptor, data):
        if os.lseek(descriptor, 0, os.SEEK_CUR) > 1_000_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(descriptor, data)

    writer.text("before", "1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        writer.file("large", [b"1" * 800_000] * 4)
    writer.text("after", "1")
    assert writer.error
    assert writer.error.errno == errno.ENOSPC
    assert list(writer.files) == ["before"]
    assert not (tmp_path / "after").exists()


def test_a_file_is_never_written_over(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError), create(tmp_path / "a"):
        pass
    assert (tmp_path / "a").read_text() == "mine"


def test_copies_are_the_files_at_the_time_of_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "CHUNK", 16)
    copies = HostCopies()
    for size in (30, 9, 41):  # memory is used again, and allocated where it does not suffice
        large, count = torch.arange(size, dtype=torch.float32), torch.tensor([size])
        late = DeferredBytes(count, lambda numbers: f"{numbers[0]} updates".encode())
        copies.clear()
        copies.file("a", [late, b"head", large, b"between", torch.ones(3, dtype=torch.bfloat16)])
        expected = f"{size} updates".encode() + b"head" + large.numpy().tobytes() + b"between" + b"\x80\x3f" * 3
        large.zero_()
        count.zero_()
        copies.write(DiskWriter(tmp_path / str(size)))
        assert (tmp_path / str(size) / "a").read_bytes() == expected
