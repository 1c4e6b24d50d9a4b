import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def quick_disk(tmp_path) -> Iterator[Path]:
    """A folder in memory where there is such a filesystem: to flush is quick there, and nothing else differs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a tokenizer of two tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder
