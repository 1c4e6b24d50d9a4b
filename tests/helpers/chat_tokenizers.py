"""Chat templates of many kinds, each with a small tokenizer for its tokens, and the turns that are trained on.

Each file in `chat_templates/` is written here after the structure of a family's public template. The comment at its
beginning holds its special tokens, its added tokens that are not special, and the turns expected to be trained on.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llmtrain.data.chat.encode import ChatEncoder, Encoded
from llmtrain.data.chat.template import ChatTemplate

FOLDER = Path(__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TEXTS = ["It is 4.", "Be brief.", "What is 2+2?", "Thanks", "Bye.", "the weather in Rome is sunny", '{"name": "value"}']


class Case(NamedTuple):
    """A template, the facts in its file, and a folder with a tokenizer for it."""

    source: str
    about: dict[str, Any]
    folder: Path
    template: ChatTemplate

    def encoder(self, **options: Any) -> ChatEncoder:
        return ChatEncoder(self.folder, self.template, **options)

    def trained(self, encoded: Encoded) -> list[str]:
        """Returns the text of each contiguous span of trained tokens."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        runs: list[list[int]] = []
        before = False
        for token, trained in zip(encoded.ids.tolist(), encoded.loss_mask.tolist(), strict=True):
            if trained:
                runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
            before = trained
        return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@cache
def base_tokenizer() -> str:
    """Returns a byte-level BPE tokenizer without special tokens, as JSON."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    return str(tokenizer.to_str())


def write_chat_tokenizer(folder: Path, about: dict[str, Any], source: str | None, base: Any = None) -> Path:
    """Writes a tokenizer with a template's tokens. base: a `Tokenizer` other than the byte-level one."""
    tokenizer = base if base is not None else Tokenizer.from_str(base_tokenizer())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in about["special"]])
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=True) for text in about.get("stripping", [])]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in about.get("added", [])])
    names = {f"{name}_token": about[name] for name in ("bos", "eos") if name in about}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = source
    fast.save_pretrained(folder)
    return folder


def about_template(name: str) -> dict[str, Any]:
    """Returns the facts in the file of a template."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.jinja").read_text().split("{#-", 1)[1].split("-#}", 1)[0])
    return found


def case(name: str, folder: Path) -> Case:
    """Reads a template, and writes a tokenizer for it."""
    source = (FOLDER / f"{name}.jinja").read_text()
    about = about_template(name)
    names = {f"{kind}_token": about[kind] for kind in ("bos", "eos") if kind in about}
    return Case(source, about, write_chat_tokenizer(folder, about, source), ChatTemplate(source, names))
