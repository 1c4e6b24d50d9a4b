"""`llmtrain init`: writes a recipe for given data, as a Python file or as YAML."""

from __future__ import annotations

import glob
import json
import re
import shlex
import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmtrain.errors import DataError, Problem, RecipeError, format_value, reason
from llmtrain.recipe import DataConfig, ModelConfig
from llmtrain.system.untrusted import expanded, json_fault

Kind = Literal["text", "conversations", "preferences", "labelled_completions"]
OBJECTIVES: dict[Kind, str] = {"preferences": "dpo", "labelled_completions": "kto"}
"""Kind of data → the objective that reads it, if that is not the language model's."""
LLAMA = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
"""Configuration of a new model that trains in minutes on CPUs."""
VOCABULARY = 4096
SHORT, LONG = 256, 2048
"""Sequence length for a new model, and upper limit for pretrained weights, because memory grows with the length."""
LONGEST = 8192
"""Upper limit for rows that are not split, and of which a shorter sequence would drop many."""
FITTING, CHARACTERS_OF_A_TOKEN = 0.99, 3
"""Share of such rows that should fit into a sequence, and a low estimate of the text of a token."""
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Fractions of the data to hold out, of which the smallest that holds out `HELD_OUT` documents is chosen."""
HELD_OUT = 10
"""Number of documents to evaluate on, or a twentieth of fewer than 200."""
MAX_DOCUMENTS, MAX_CHARACTERS = 1000, 1 << 26
"""Numbers of documents and of characters that are read at most; more documents are enough for the first fraction."""


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """The options of the command line."""

    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write: NAME.py or NAME.yaml; NAME means NAME.py.")
    ]
    data: Annotated[
        str | None, typer.Option(help="What to train on: a file, folder, pattern, or dataset on the hub.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of pretrained weights; default: a new, small Llama.")
    ] = None
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter instead of the weights.")] = False
    kind: Annotated[
        Kind | None, typer.Option(help="Kind of data; default: by the columns of a local file, otherwise text.")
    ] = None


def write_recipe(request: InitRequest) -> None:
    """Write a recipe for your data.

    The file is Python or YAML. Without --data, the command asks for what it needs.
    """
    from llmtrain.plan.load.write import recipe_text

    if request.file.name and not request.file.suffix:
        request = replace(request, file=request.file.with_suffix(".py"))
    if request.data is None:
        request = _prompt_for_missing(request)
    assert request.data is not None
    if problems := _problems(request):
        raise RecipeError(problems)
    try:
        found = _inspect(request.data)
    except DataError:
        if request.kind is None:
            raise
        found = _Data(request.kind)  # the files may not be there yet
    kind, held_out = request.kind or found.kind, found.held_out
    if problems := _needs_weights(kind, request.model):
        raise RecipeError(problems)
    recipe = _recipe(request.file.stem, request, replace(found, kind=kind))
    text = recipe_text(request.file, recipe)
    try:
        with request.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RecipeError(Problem("init.file", str(request.file), f"cannot be written: {reason(error)}")) from None
    where = "" if _is_here(request.data) else ", a dataset on the hub, since there is no such file or folder here"
    print(f"wrote {request.file}: {kind.replace('_', ' ')} from {request.data}{where}")
    if not held_out:
        print("there is too little data to hold some out, so the recipe does not evaluate")
    look = " --show 1" if kind != "text" else ""
    name = shlex.quote(str(request.file))
    print(f"look at the data:  llmtrain data {name}{look}\ntrain:             llmtrain train {name}")


def _prompt_for_missing(request: InitRequest) -> InitRequest:
    """Asks for missing options on a terminal."""
    if not sys.stdin.isatty():
        raise RecipeError(Problem("init.data", "--data", "is required", "--data FILE, FOLDER or NAME of a hub dataset"))
    data = typer.prompt("What to train on (a file, a folder, a pattern, or a dataset on the hub)")
    model = (
        request.model or typer.prompt("Pretrained weights (a folder or hub name; empty for a new model)", "") or None
    )
    lora = request.lora or (model is not None and typer.confirm("Train a LoRA adapter instead of all weights?"))
    return replace(request, data=data, model=model, lora=lora)


def _problems(request: InitRequest) -> list[Problem]:
    from llmtrain.data.sources.formats import kind_of
    from llmtrain.plan.load.file import SUFFIXES
    from llmtrain.system.hub import is_path

    problems = []
    for option, text in (("--data", request.data), ("--model", request.model)):
        if text and (fault := json_fault(text)):
            problems.append(Problem("init.text", option, f"{format_value(text)} is invalid: {fault}"))
    if (data := request.data) and not problems and not _is_here(data) and (is_path(data) or kind_of(Path(data))):
        problems.append(Problem("init.data", "--data", f"{format_value(data)} does not exist"))
    if request.file.suffix not in SUFFIXES:
        problems.append(Problem("init.file", str(request.file), f"must end in {', '.join(SUFFIXES)}"))
    if request.file.exists():
        problems.append(Problem("init.file", str(request.file), "exists", "choose another name"))
    if request.lora and request.model is None:
        message = "adapts pretrained weights, and a new model has none"
        problems.append(Problem("init.lora", "--lora", message, "--model FOLDER or hub name"))
    return problems + _needs_weights(request.kind, request.model)


def _needs_weights(kind: Kind | None, model: str | None) -> list[Problem]:
    if kind not in OBJECTIVES or model is not None:
        return []
    message = "is for comparing completions with those of pretrained weights, and a new model has none"
    return [Problem("init.model", kind.replace("_", " "), message, "--model FOLDER or hub name")]


def _is_here(data: str) -> bool:
    """Whether data are a built-in corpus, a glob, or an existing file or folder."""
    from llmtrain.data.sources.files import STDLIB
    from llmtrain.data.sources.stdlib_chat import STDLIB_CHAT

    return data in (STDLIB, STDLIB_CHAT) or glob.has_magic(data) or expanded(data).exists()


@dataclass(frozen=True)
class _Data:
    """What is known about the data."""

    kind: Kind
    held_out: float = FRACTIONS[0]
    """The fraction to hold out for evaluation."""
    characters: int | None = None
    """Length of a row that only a few are longer than; None if none was read."""


def _inspect(data: str) -> _Data:
    """Returns what is found in data; the defaults for data that are not read here.

    Raises DataError for local files that hold none of the kinds.
    """
    from llmtrain.data.sources.files import find_files
    from llmtrain.data.sources.formats import READERS, kind_of, read_document

    try:
        files = find_files(data, "train", "--data")
    except DataError as error:
        raise DataError([replace(problem, field="--data") for problem in error.problems]) from None
    reader = READERS[kind_of(files[0]) or ".txt"] if files else read_document
    if reader is read_document and len(files) < 2:  # the end of a text is held out
        return _Data("text")
    documents, size = [], 0
    for document in chain.from_iterable(reader(path, None) for path in files):
        documents.append(document.text)
        size += len(document.text)
        if len(documents) == MAX_DOCUMENTS or size > MAX_CHARACTERS:
            return _Data(_kind_of(documents, reader is read_document, files[0]), characters=_long_row(documents))
    kind = _kind_of(documents, reader is read_document, files[0])
    if kind == "text" and reader is not read_document:
        documents = [text for row in map(json.loads, documents) if (text := row.get("text"))]
    return _Data(kind, _fraction(documents), _long_row(documents))


def _long_row(documents: list[str]) -> int | None:
    lengths = sorted(map(len, documents))
    return lengths[min(len(lengths) - 1, int(FITTING * len(lengths)))] if lengths else None


def _kind_of(documents: list[str], are_texts: bool, file: Path) -> Kind:
    """Returns the kind of documents, which are texts or rows. Raises DataError if it is none of them."""
    from llmtrain.data.chat.conversation import find_layout, truth_value

    rows = [] if are_texts else [json.loads(row) for row in documents]
    if are_texts or (rows and "text" in rows[0]):
        return "text"
    formats = (("preferences", "preference"), ("labelled_completions", "unpaired_preference"), ("conversations", None))
    for kind, format in formats:
        try:
            layout = find_layout(rows[0] if rows else (), "--data", format=format, named={})  # type: ignore[arg-type]
        except DataError:
            continue
        label = layout.columns.get("label")
        if kind == "labelled_completions" and all(truth_value(row.get(label)) is None for row in rows):
            continue  # the label says something else, such as a topic
        return kind  # type: ignore[return-value]
    columns = ", ".join(rows[0]) if rows else "none"
    message = f"{file} has neither a column 'text' nor those of conversations or preferences: {columns}"
    fix = "rename a column, or name it in the recipe: text_column, or columns={...} of a Source"
    raise DataError(Problem("init.data", "--data", message, fix))


def _fraction(documents: list[str]) -> float:
    """Returns the smallest fraction that holds out enough of these documents, but at most half of them; 0 if none does.

    Which documents a fraction holds out depends on their texts, so this is exact.
    """
    from llmtrain.data.sources.corpus import held_out

    wanted = min(HELD_OUT, len(documents) // 20) or 1
    counts = {fraction: sum(held_out(text, fraction) for text in documents) for fraction in FRACTIONS}
    return next((fraction for fraction, count in counts.items() if wanted <= count <= len(documents) / 2), 0.0)


def _sequence_length(found: _Data, longest: Any, model: str | None) -> int:
    """Returns the sequence length. longest: the positions of the pretrained model, if they are known."""
    length = LONG if model else SHORT
    if found.kind != "text" and found.characters is not None:  # rows that are never split
        tokens = found.characters // CHARACTERS_OF_A_TOKEN
        length = min(max(SHORT, 1 << tokens.bit_length()), LONGEST if model else LONG)
    return min(length, longest) if isinstance(longest, int) else length


def _recipe(name: str, request: InitRequest, found: _Data) -> dict[str, Any]:
    """Returns the fields of the recipe."""
    from llmtrain.plan.facts.pretrained_config import pretrained_config
    from llmtrain.plan.facts.vocabulary import read_template

    model, kind, held_out = request.model, found.kind, found.held_out
    source = {"name": request.data}
    fields: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "run"}
    if model is None:
        fields["model"] = {"architecture": "llama", "config": LLAMA}
        fields["data"] = {"sources": [source], "tokenizer": {"vocab_size": VOCABULARY}}
        fields["data"]["sequence_length"] = _sequence_length(found, None, None)
    else:
        longest = pretrained_config(ModelConfig(pretrained=model))[1].get("max_position_embeddings")
        fields["model"] = {"pretrained": model} | ({"adapter": {"rank": 16}} if request.lora else {})
        length = _sequence_length(found, longest, model)
        fields["data"] = {"sources": [source], "tokenizer": model, "sequence_length": length}
    if kind != "text" and (model is None or read_template(None, model) is None):
        fields["data"]["chat_template"] = "plain"
    if held_out != DataConfig.model_fields["eval_fraction"].default:
        fields["data"]["eval_fraction"] = held_out
    if kind in OBJECTIVES:
        fields["objective"] = {"name": OBJECTIVES[kind]}
    rate = 2e-3 if model is None else 1e-4 if request.lora else 1e-5
    fields["optim"] = {"lr": float(f"{rate / 10:.6g}") if kind in OBJECTIVES else rate}
    fields["optim"] |= {"warmup_steps": 10} if kind == "text" else {"warmup_ratio": 0.05}
    fields["batch"] = {"global_batch_size": 8, "micro_batch_size": 1 if model else 2}
    fields["train"] = {"max_steps": 200} if kind == "text" else {"epochs": 1}
    if held_out:
        fields["evaluation"] = {"every_steps": 50, "max_sequences": 256}
    return fields
