"""The built-in corpus `stdlib_chat`: questions about Python's standard library, answered with its docstrings."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from llmtrain.data.cache import key_of
from llmtrain.data.sources.files import stdlib_folder
from llmtrain.data.sources.formats import Document, FileCorpus

STDLIB_CHAT = "stdlib_chat"
FORMAT = 1
"""Version of the rules by which conversations are made; part of the corpus' identity."""
QUESTIONS = ("What does {} do?", "What is {}?", "What is {} for?", "Explain {}.")
FOLLOWING = ("How is it called?", "What are its arguments?", "Show me how to call it.")
MIN_CHARACTERS, MAX_CHARACTERS = 12, 240
"""Smallest and largest number of characters of an answer."""
MAX_SUBJECTS = 2
"""Number of classes and functions in a conversation. With several, a question's position does not tell its kind."""
ROLES = ("user", "assistant")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class StdlibChat:
    """Conversations about public classes and functions with a docstring; each row is a JSON object with `messages`."""

    files: FileCorpus
    name: str = STDLIB_CHAT
    is_one_document: bool = False

    @property
    def identity(self) -> str:
        """Identifies the content."""
        return key_of(STDLIB_CHAT, FORMAT, self.files.identity)

    def documents(self) -> Iterator[Document]:
        """Yields the rows."""
        count = len(self.files.files)
        for number, (path, stored) in enumerate(zip(self.files.files, self.files.prints, strict=True), start=1):
            module = _module(path)
            if any(part.startswith("_") for part in module.split(".")):
                continue
            for file in replace(self.files, files=(path,), prints=(stored,)).documents():
                answered = _answered(module, ast.parse(file.text).body)
                while subjects := list(islice(answered, MAX_SUBJECTS)):
                    texts = [text for _, texts in subjects for text in texts]
                    messages = [{"role": ROLES[place % 2], "content": text} for place, text in enumerate(texts)]
                    place = f"{STDLIB_CHAT}, {subjects[0][0]}"
                    yield Document(json.dumps({"messages": messages}), number / count, place)


def _module(path: Path) -> str:
    parts = path.relative_to(stdlib_folder()).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _answered(scope: str, body: list[ast.stmt]) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each class and function with questions about it, each question followed by its answer."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{scope}.{node.name}"
        answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if MIN_CHARACTERS <= len(answer) <= MAX_CHARACTERS:
            chosen = len(name) + len(answer)
            texts = [QUESTIONS[chosen % len(QUESTIONS)].format(name), answer]
            if isinstance(node, Function):
                call = f"{node.name}({ast.unparse(node.args)})"
                if len(call) <= MAX_CHARACTERS:
                    texts += [FOLLOWING[chosen % len(FOLLOWING)], call]
            yield name, texts
        if isinstance(node, ast.ClassDef):
            yield from _answered(name, node.body)
