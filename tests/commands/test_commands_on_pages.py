"""All pages mention only commands, options, arguments and fields that exist. Other tests run many of the commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from llmtrain.cli import app
from llmtrain.commands.completion import assignments
from llmtrain.errors import RecipeError
from llmtrain.plan.load import declared
from llmtrain.recipe import LoraConfig, Recipe, Source, parse_assignments
from llmtrain.recipe.aliases import FIELD_OF_ALIAS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/design/test_costs.md"})]
"""Without the page of docstrings."""
PROGRAM: Any = get_command(app)
GROUPS = [[name] for name, command in PROGRAM.commands.items() if hasattr(command, "commands")]
USAGE_ERROR: Any = typer.BadParameter.__base__
"""UsageError, which older versions of typer take from click."""
OPERATORS = "|&;<>\n"
"""Characters that end a command."""


def _commands(shell: str) -> Iterator[list[str]]:
    """Yields the words after `llmtrain` of each command."""
    lexer = shlex.shlex(shell.replace("\\\n", ""), posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words = list(lexer)
    for place, word in enumerate(words):
        after = list(takewhile(lambda one: not set(one) <= set(OPERATORS), words[place + 1 :]))
        before = words[place - 1] if place else "\n"
        # Elsewhere in a line, it is a container's image, after which the command may follow.
        is_first = set(before) <= set(OPERATORS) or "=" in before
        if word == "llmtrain" and after[:1] != ["llmtrain"] and (is_first or {*after[:1]} & {*PROGRAM.commands}):
            yield after


def _in_blocks(page: Path) -> Iterator[list[str]]:
    """Yields the commands of the page's shell blocks, except for those that are shown with the error for a field."""
    for kind, block in re.findall(r"^ *```(sh|console)\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        if "[recipe.field]" in block:  # compared with what the command prints by tests/test_repository.py
            continue
        yield from _commands(block if kind == "sh" else "\n".join(re.findall(r"^\$ (.*)", block, flags=re.MULTILINE)))


def _in_text(page: Path) -> Iterator[list[str]]:
    """Yields the commands that are mentioned in the page's text, without placeholders and groups of commands."""
    for line in re.findall(r"(?<!`)`(llmtrain [^`]+)`", page.read_text()):
        yield from (one for one in _commands(line) if "…" not in one and one[0] != "COMMAND" and one not in GROUPS)


def _refusal(words: list[str]) -> str:
    """Returns why the program refuses a command line while it parses it; empty if it does not."""
    command = PROGRAM
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"No such command: {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if {"--help", "--version"} & {*words}:  # these end the program while it parses
        return ""
    try:
        command.make_context("llmtrain", list(words))
    except USAGE_ERROR as error:
        return str(error)
    return ""


def _unknown_fields(recipe: Recipe, words: list[str]) -> list[str]:
    """Returns the fields that a command line sets and no recipe has."""
    if words[:1] == ["lint"]:  # sets arguments of the Trainer
        return []
    try:
        recipe.with_(**parse_assignments([after for option, after in pairwise(words) if option == "--set"]))
    except RecipeError as error:
        return [one.field for one in error.problems if one.rule == "recipe.field"]
    return []


def _of_pages(kind: Any) -> Any:
    found = [(page.stem, words) for page in PAGES for words in kind(page)]
    return pytest.mark.parametrize("words", [words for _, words in found], ids=[" ".join([p, *w]) for p, w in found])


@_of_pages(_in_blocks)
def test_a_command_of_a_page_is_accepted(words, tiny):
    assert _refusal(words) == ""
    assert _unknown_fields(tiny, words) == []


@_of_pages(_in_text)
def test_a_command_in_a_text_has_known_options_and_fields(words, tiny):
    assert _refusal(words).partition(":")[0] in ("", "Missing parameter")
    assert _unknown_fields(tiny, words) == []


def test_unknown_commands_and_options_are_found():
    assert _refusal(["plan", "recipes/tiny.py", "--no-such-option"]) == "No such option: --no-such-option"
    assert _refusal(["checkpoint", "no-such"]) == "No such command: no-such"
    assert _refusal(["train"]) == "Missing parameter: recipe"


def test_unknown_fields_are_found(tiny):
    words = ["train", "mine.py", "--set", "optim.no_such_field=1", "--set", "optim.lr=0.1"]
    assert _unknown_fields(tiny, words) == ["optim.no_such_field"]


COMING_FROM = (ROOT / "docs/guides/coming_from.md").read_text(encoding="utf-8")
PAGES_OF_PROGRAMS = {
    page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs/guides/coming_from").glob("*.md")
}
ROW = re.compile(r"^\| (`.*?) \| (.*?) \| (.*) \|$", re.MULTILINE)
WITH_OWN_NAMES = ("axolotl", "llama_factory", "ms_swift", "torchtitan")
"""Pages of programs in which a name of the Trainer or of DeepSpeed may mean something else."""


@pytest.mark.parametrize("page", ["", *sorted(PAGES_OF_PROGRAMS)])
def test_settings_of_others_become_fields_that_exist(page, tiny):
    """Those that error messages translate become the same ones on the page."""
    fields = {name.removesuffix("=") for name in assignments("")}
    fields |= {
        f"{sources}.{name}" for sources in ("data.sources", "evaluation.sources") for name in Source.model_fields
    }
    with_adapter = tiny.with_(**{"model.pretrained": "folder", "model.architecture": None, "model.config": {}})
    with_adapter = with_adapter.with_(**{"model.adapter": LoraConfig(rank=8)})
    for theirs, ours, note in ROW.findall(PAGES_OF_PROGRAMS.get(page, COMING_FROM)):
        named = re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+)(?:=([^`]*))?`", ours + note)
        assert {field for field, _ in named} <= fields, theirs
        for field, value in named:
            if value:
                with_adapter.with_(**parse_assignments([f"{field}={value}"]))
        for name in re.findall(r"`(\w+)(?![\w.])", theirs) if page not in WITH_OWN_NAMES else ():
            assert FIELD_OF_ALIAS.get(name, "") in ours + note, theirs


def test_the_recipe_of_the_page_for_others_is_valid(tmp_path):
    [text] = re.findall(r"^```yaml\n(.*?)^```", PAGES_OF_PROGRAMS["axolotl"], re.DOTALL | re.MULTILINE)
    (tmp_path / "sft.yaml").write_text(text)
    recipe, _ = declared(tmp_path / "sft.yaml")
    assert (recipe.model.adapter.rank, recipe.train.epochs, recipe.parallel.precision) == (16, 3, "bf16")
