import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick_disk(tmp_path) -> Iterator[Path]:
    """A folder in memory where there is such a filesystem: to flush is quick there, and nothing else differs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)
