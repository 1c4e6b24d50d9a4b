"""A tokenizer whose tokens are the texts of their ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


def write_word_tokenizer(folder: Path, size: int) -> Path:
    """Writes the tokenizer to a folder, and returns the folder."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)
    return folder
