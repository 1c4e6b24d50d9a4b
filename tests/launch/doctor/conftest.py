from pathlib import Path

import pytest

from llmtrain.launch.doctor.finding import HostContext


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Writes programs that come before all others: name, what they print, their exit code."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def write(name: str, said: str, code: int = 0) -> Path:
        (folder / f"{name}.txt").write_text(said)
        file = folder / name
        file.write_text(f"#!/bin/sh\ncat '{folder}/{name}.txt'\nexit {code}\n")
        file.chmod(0o755)
        return file

    return write


@pytest.fixture
def context(tmp_path):
    """A host with nothing set, and a /sys of its own."""
    return HostContext({}, tmp_path / "runs", tmp_path / "cache", sys=tmp_path / "sys")
