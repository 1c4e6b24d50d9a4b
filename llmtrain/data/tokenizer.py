"""The tokenizer of a recipe: from a folder, from the hub, or trained on the corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.order import integer_weights
from llmtrain.data.sources.corpus import ConversationCorpus, Corpus, first_break, split_documents, split_identity
from llmtrain.errors import DataError, Problem
from llmtrain.plan.facts.vocabulary import control_tokens, named_template, read_template, tokens_to_add
from llmtrain.recipe import DataConfig, NewTokens, TrainedTokenizer
from llmtrain.system.hub import hub_has, is_path, stored_file
from llmtrain.system.untrusted import expanded, read_bytes

FIELD = "data.tokenizer"
FORMAT = 1
"""Version of the folder's layout; part of its key."""
FORMAT_OF_FOLDERS = 2
"""The same for a tokenizer that is imported from a folder. One from the hub keeps its first version."""
PROBES = (
    "In 2023, 3 of 14,159 didn't fit; it's 0.5%.",
    "  two  spaces\tand a tab\n\n line ends\r\n",
    "naïve café Ünïcödé e\u0301 ﬁ ½",
    "Привет, мир! Γειά σου",
    "你好，世界。日本語のテスト 한국어",
    "नमस्ते ภาษาไทย مرحبا שלום",
    "def f(x_1): return {'a': [x**2, 0x1F]}  # C++ -> camelCase HTTPServer",
    "🙂👍🏽 «quotes» — … <tag>&amp; https://a.b/c?d=e",
)
"""Texts on which a loaded tokenizer is compared with its tokenizer.json."""
MAX_SHOWN_TOKENS = 5
END_OF_TEXT = "<|endoftext|>"
"""The special token of every trained tokenizer, used as beginning, end and padding."""
BYTES = 256
TRAINING_CHARACTERS = 64_000_000
"""Largest number of characters to train a tokenizer on: more take memory and minutes, but hardly change the merges."""
CHUNK_CHARACTERS = 1 << 17
"""Longer documents are tokenized in chunks, to bound the memory and to use all cores."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",  # `AutoTokenizer` looks up the class here if tokenizer_config.json names none
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "tiktoken.model",
    "tekken.json",
)
"""Files from which `transformers` makes a fast tokenizer; part of the key of a folder that has them."""


@dataclass(frozen=True)
class PreparedTokenizer:
    """A tokenizer in the cache."""

    folder: Path
    """Folder for `AutoTokenizer.from_pretrained`."""
    identity: str
    """Hash of the tokenizer's files."""
    vocab_size: int
    """Highest token id plus one."""
    eos_id: int
    bos_id: int | None
    """The token that the tokenizer puts before each text, or None."""
    made: bool
    """Whether this call made it."""
    known_size: int | None = None
    """`vocab_size` before `model.new_tokens` were added; None if there are none."""
    difference: str = ""
    """How its class in `transformers` reads a text differently from its tokenizer.json; empty if no difference is
    known."""


class Encoder:
    """Encodes many documents at once on all cores (`RAYON_NUM_THREADS`)."""

    def __init__(self, folder: Path, parse_special: bool = False) -> None:
        """parse_special: whether the text of a special token within a document is read as the token."""
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not parse_special

    def special_tokens(self) -> dict[str, int]:
        """Returns the special tokens by their texts."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def text_of(self, token: int) -> str:
        """Returns the text of one token."""
        return str(self._tokenizer.id_to_token(token))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Returns the token ids of each text, without adding special tokens."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def prepare_tokenizer(
    data: DataConfig, corpora: Sequence[Corpus], eval_fraction: float, cache: Cache, new_tokens: NewTokens = ()
) -> PreparedTokenizer:
    """Returns the recipe's tokenizer, imported or trained once on the training split. new_tokens: as in `ModelConfig`.

    Raises DataError for a tokenizer that cannot be loaded, has no end-of-text token, or is not a fast tokenizer.
    """
    declared = data.tokenizer
    if isinstance(declared, TrainedTokenizer):
        weights = integer_weights([source.weight for source in data.sources])
        identities = [split_identity(corpus, eval_fraction) for corpus in corpora]
        parsed = ["parse"] if data.special_tokens == "parse" else []
        has_chats = any(isinstance(corpus, ConversationCorpus) for corpus in corpora)
        special = control_tokens(named_template(data.chat_template)) if has_chats and data.chat_template else ()
        chats = ["messages", list(special)] if has_chats else []
        key = key_of("trained", FORMAT, declared.vocab_size, eval_fraction, weights, identities, *parsed, *chats)

        def build(folder: Path) -> dict[str, Any]:
            with cache.progress.task("Training the tokenizer") as task:
                texts = _training_texts(data, corpora, eval_fraction)
                meta = _train(folder, declared, special, data.sequence_length, texts)
                task.update(1.0)
            return meta
    else:
        source = expanded(declared)
        # A hub name keeps the meaning that it had when this folder first used it, as in `hub_corpus`.
        content = _files_hash(source) if source.is_dir() else declared
        template_file = source / "chat_template.jinja"
        chat: list[Any] = [_hash(template_file)] if template_file.is_file() else []
        if more := {path.name: _hash(path) for path in source.glob("additional_chat_templates/*.jinja")}:
            chat.append(more)
        template = named_template(data.chat_template) if data.chat_template and new_tokens == "template" else None
        added = [new_tokens if isinstance(new_tokens, str) else list(new_tokens), template] if new_tokens else []
        generic = [data.tokenizer_class] if data.tokenizer_class != "auto" else []
        form = FORMAT_OF_FOLDERS if source.is_dir() else FORMAT
        key = key_of("imported", form, source.is_dir(), content, *chat, *added, *generic)

        def build(folder: Path) -> dict[str, Any]:
            name = str(source) if source.is_dir() else declared
            return _import(folder, name, new_tokens, template, is_generic=bool(generic))

    entry = cache.entry("tokenizers", key, build)
    return PreparedTokenizer(entry.path, made=entry.made, **entry.meta)


def split_text(text: str) -> Iterator[str]:
    """Yields the text in chunks of at most `CHUNK_CHARACTERS`.

    They are cut at a single line end or before a single space, which does not change the tokens. A long stretch without
    either is cut elsewhere. A tokenizer that marks the start of a text marks each chunk.
    """
    start = 0
    while len(text) - start > CHUNK_CHARACTERS:
        lowest, highest = start + CHUNK_CHARACTERS // 2, start + CHUNK_CHARACTERS
        stop = first_break(text, lowest, highest) or highest
        yield text[start:stop]
        start = stop
    yield text[start:]


def _train(
    folder: Path, declared: TrainedTokenizer, special: Sequence[str], sequence_length: int, texts: Iterator[str]
) -> dict[str, Any]:
    """Trains a byte-level BPE (Radford et al. 2019) and writes it in the format of `transformers`.

    special: special tokens besides `END_OF_TEXT`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokens = list(dict.fromkeys([END_OF_TEXT, *special]))
    if declared.vocab_size < BYTES + len(tokens):
        message = f"{declared.vocab_size} tokens are too few for {BYTES} bytes and {', '.join(tokens)}"
        raise DataError(Problem("data.vocab", f"{FIELD}.vocab_size", message, f"use at least {BYTES + len(tokens)}"))
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=declared.vocab_size,
        special_tokens=tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": sequence_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    eos = tokenizer.token_to_id(END_OF_TEXT)
    return _meta(folder, tokenizer, eos, None)


def _training_texts(data: DataConfig, corpora: Sequence[Corpus], eval_fraction: float) -> Iterator[str]:
    """Yields the first training documents of each source, in proportion to its weight."""
    total = sum(source.weight for source in data.sources)
    for source, corpus in zip(data.sources, corpora, strict=True):
        left = TRAINING_CHARACTERS * source.weight / total
        for text, _, is_held_out, _ in split_documents(corpus, eval_fraction):
            if left <= 0:
                break
            if not is_held_out:
                text = (corpus.text_of(text) if isinstance(corpus, ConversationCorpus) else text)[: int(left) + 1]
                left -= len(text)
                for part in text.split(END_OF_TEXT) if data.special_tokens == "parse" else [text]:
                    yield from split_text(part)


def _import(folder: Path, name: str, new_tokens: NewTokens, template: str | None, is_generic: bool) -> dict[str, Any]:
    """Writes a copy of a tokenizer from a folder or the hub, with new tokens.

    template: the chat template that the recipe names, if it matters. is_generic: whether to use the generic class.
    """
    from tokenizers import AddedToken

    tokenizer = _load(name, is_generic)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        message = f"'{name}' is not a fast tokenizer (it has no tokenizer.json)"
        raise DataError(
            Problem("data.tokenizer", FIELD, message, "convert it with transformers' convert_slow_tokenizer")
        )
    if not fast.get_vocab_size(with_added_tokens=False):
        message = f"'{name}' contains no vocabulary: it has neither a tokenizer.json nor other tokenizer files"
        raise DataError(Problem("data.tokenizer", FIELD, message, "name a folder with a saved tokenizer"))
    if tokenizer.eos_token_id is None:
        message = f"'{name}' has no end-of-text token, which separates documents"
        fix = "set eos_token in its tokenizer_config.json to a token of its vocabulary"
        raise DataError(Problem("data.eos", FIELD, message, fix))
    file = stored_file(name, "tokenizer.json")
    difference = _difference(file, fast, type(tokenizer).__name__) if file else ""
    vocabulary = tokenizer.get_vocab()
    if new_tokens:
        added = tokens_to_add(new_tokens, template or read_template(None, name))
        lacking = [AddedToken(token, normalized=False) for token in added if token not in vocabulary]
        tokenizer.add_tokens(lacking, special_tokens=new_tokens == "template")
    tokenizer.save_pretrained(folder)
    first = tokenizer("a")["input_ids"][:1]
    bos = tokenizer.bos_token_id if first == [tokenizer.bos_token_id] else None
    meta = _meta(folder, fast, tokenizer.eos_token_id, bos) | {"difference": difference}
    return meta | {"known_size": max(vocabulary.values()) + 1} if new_tokens else meta


def _difference(file: Path, fast: Any, name: str) -> str:
    """Describes the first difference between a tokenizer and its file on `PROBES`; empty if there is none.

    fast: the tokenizer as its class, of this name, has made it.
    """
    from tokenizers import Tokenizer

    tokenizers = [Tokenizer.from_file(str(file)), Tokenizer.from_str(fast.to_str())]
    for tokenizer in tokenizers:
        tokenizer.no_truncation()
        tokenizer.no_padding()
    for text in PROBES:
        of_file, of_class = (tokenizer.encode(text, add_special_tokens=False) for tokenizer in tokenizers)
        if of_file.ids != of_class.ids:
            pairs = zip(of_file.ids, of_class.ids, strict=False)
            same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], pairs))
            read = [
                " ".join(repr(text[start:end]) for start, end in tokenizer.offsets[same : same + MAX_SHOWN_TOKENS])
                for tokenizer in (of_class, of_file)
            ]
            return f"in {text!r}, its class {name} reads {read[0]}, but its tokenizer.json {read[1]}"
    return ""


def _load(name: str, is_generic: bool) -> Any:
    """Loads a tokenizer with `transformers`. Raises DataError if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_folder = Path(name).is_dir()
    if not is_folder and is_path(name):
        raise DataError(Problem("data.tokenizer", FIELD, f"the folder '{name}' does not exist"))
    on_hub = None if is_folder else hub_has(name)
    try:
        # Explicit, since `transformers` otherwise asks at the terminal about custom code next to the tokenizer.
        loader: Any = PreTrainedTokenizerFast if is_generic else AutoTokenizer
        return loader.from_pretrained(name, local_files_only=not on_hub, trust_remote_code=False)
    except Exception as error:  # the Rust library raises plain exceptions
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if not is_folder and not on_hub:
            has_none = "does not answer" if on_hub is None else "has no such repository, or it is private"
            reason = f"the hub {has_none}, and it is not in the local cache"
        message = f"'{name}' is neither a folder with a tokenizer nor one that the hub provides: {reason}"
    raise DataError(Problem("data.tokenizer", FIELD, message))


def _meta(folder: Path, tokenizer: Any, eos: int, bos: int | None) -> dict[str, Any]:
    """Returns the fields of `PreparedTokenizer` that are stored with its folder."""
    identity = key_of(_files_hash(folder), eos, bos)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return {"identity": identity, "vocab_size": vocab_size, "eos_id": eos, "bos_id": bos}


def token_bytes(folder: Path, size: int) -> NDArray[np.int64] | None:
    """Returns the number of UTF-8 bytes that each token stands for, [vocabulary]; 0 for special tokens.

    None if this is unknown, because the tokens are neither sequences of bytes nor texts with `▁` for spaces.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    described = json.loads(tokenizer.to_str())
    decoder = json.dumps(described["decoder"], ensure_ascii=False)
    of_bytes = '"ByteLevel"' in decoder  # a character for each byte (Radford et al. 2019)
    if not of_bytes and '"Metaspace"' not in decoder and '"▁"' not in decoder:
        return None
    single = re.compile("<0x[0-9A-F]{2}>" if described["model"].get("byte_fallback") else "(?!)")
    sizes = np.zeros(size, np.int64)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if of_bytes:
            sizes[number] = len(token)
        else:
            sizes[number] = 1 if single.fullmatch(token) else len(token.replace("▁", " ").encode())
    for number, added in tokenizer.get_added_tokens_decoder().items():
        sizes[number] = 0 if added.special else len(added.content.encode())
    return sizes


def _files_hash(folder: Path) -> str:
    files = (folder / name for name in TOKENIZER_FILES)
    return key_of({path.name: _hash(path) for path in files if path.exists()})


def _hash(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(read_bytes(path))
