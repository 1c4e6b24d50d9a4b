"""`llmtrain completion`: shell completion of commands, options, recipes, variants, fields and their values."""

from __future__ import annotations

import ast
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from llmtrain.errors import UserError

VARIABLE = "_LLMTRAIN_COMPLETE"
"""Environment variable set by the shell scripts: the process then prints candidates instead of running a command."""
_ASK = "_TYPER_COMPLETE_FISH_ACTION={action} _LLMTRAIN_COMPLETE=complete_fish _TYPER_COMPLETE_ARGS={line}"
"""Command prefix that asks Typer for candidates. For `get-args`, it prints one per line, with its help after a tab."""
SCRIPTS = {
    "bash": r"""_llmtrain() {
    local line=${COMP_LINE:0:COMP_POINT} found
    local word=${line##*[[:space:]]}
    # bash replaces only what follows the last = or : of a word.
    local kept=${word%"${word##*[=:]}"}
    mapfile -t found < <(ASK "$1" 2> /dev/null)
    [[ -z $found ]] && return  # then bash completes files
    found=("${found[@]%%$'\t'*}")
    COMPREPLY=("${found[@]#"$kept"}")
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]]; then compopt -o nospace; fi
}
complete -o default -F _llmtrain llmtrain
""".replace("ASK", _ASK.format(action="get-args", line='"$line"')),
    "zsh": r"""#compdef llmtrain
_llmtrain() {
    local -a found
    found=("${(@f)$(ASK llmtrain 2> /dev/null)}")
    found=("${(@)found%%$'\t'*}")
    [[ -z $found ]] && _files && return
    compadd -S '' -- "${(@M)found:#*[=/]}"
    compadd -- "${(@)found:#*[=/]}"
}
compdef _llmtrain llmtrain
""".replace("ASK", _ASK.format(action="get-args", line='"${words[1,$CURRENT]}"')),
    "fish": "complete -c llmtrain -f -n 'env {has} llmtrain' -a '(env {get} llmtrain)'\n".format(
        has=_ASK.format(action="is-args", line="(commandline -cp)"),
        get=_ASK.format(action="get-args", line="(commandline -cp)"),
    ),
}
Shell = Literal["bash", "zsh", "fish"]


def print_completion(
    shell: Annotated[Shell, typer.Argument(help="Shell that you use.")],
) -> None:
    """Print a script that enables completion in a shell.

    The shell then completes commands, options, recipes, fields and their values.

    To load it: source <(llmtrain completion bash) in bash, source <(llmtrain completion zsh) in zsh,
    llmtrain completion fish | source in fish.
    """
    print(SCRIPTS[shell], end="")


def prepare_completion() -> None:
    """Prepares Typer to answer if a shell asks for candidates."""
    if VARIABLE in os.environ:
        from typer.completion import get_completion_inspect_parameters

        get_completion_inspect_parameters()


def recipes(incomplete: str) -> list[str]:
    """Returns the recipes, files and folders that complete a text; after a colon, the variants of the file."""
    from llmtrain.plan.load.file import SUFFIXES, located, shipped_recipes

    path, colon, variant = incomplete.partition(":")
    try:
        if colon:
            return [f"{path}:{name}" for name in variants(Path(located(path))) if name.startswith(variant)]
        folder, _, beginning = path.rpartition("/")
        shown = f"{folder}/" if folder or path.startswith("/") else ""
        entries = sorted(Path(shown or ".").iterdir())
        files = [entry.name for entry in entries if entry.suffix in SUFFIXES and entry.is_file()]
        folders = [f"{entry.name}/" for entry in entries if entry.is_dir()]
        hidden = beginning.startswith(".")
        names = [name for name in files + folders if name.startswith(beginning) and (hidden or name[0] != ".")]
        named = [] if shown else [name for name in shipped_recipes() if name.startswith(beginning)]
        return [*named, *(shown + name for name in names)]
    except (OSError, ValueError, SyntaxError, TypeError, UserError):  # an incomplete word is no error
        return []


def variants(path: Path) -> list[str]:
    """Returns the variants that a file defines, without running the recipe or reading what it extends."""
    from llmtrain.system.untrusted import is_yaml, read_text

    if is_yaml(str(path)):
        from llmtrain.plan.load.yaml_file import read_with_places

        return list(read_with_places(path)[0].get("variants") or ())
    functions = (node.name for node in ast.parse(read_text(path)).body if isinstance(node, ast.FunctionDef))
    return [name.removeprefix("recipe_") for name in functions if name.startswith("recipe_")]


def assignments(incomplete: str) -> list[str]:
    """Returns the recipe fields that complete a text; after `=`, the values of the field if they can be listed."""
    from llmtrain.recipe import Recipe

    fields = dict(_fields(Recipe))
    name, equals, value = incomplete.partition("=")
    if equals:
        return [f"{name}={choice}" for choice in _values(fields.get(name)) if choice.startswith(value)]
    return [f"{field}=" for field in fields if field.startswith(name)]


def _fields(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted names and types of all fields. A list of parts is one field, without its elements."""
    from llmtrain.recipe import part_in

    for name, field in part.model_fields.items():
        inner = part_in(field.annotation)
        if inner is None or get_origin(field.annotation) not in (None, Union, types.UnionType):
            yield prefix + name, field.annotation
        else:
            if inner is not field.annotation:
                yield prefix + name, field.annotation
            yield from _fields(inner, f"{prefix}{name}.")


def _values(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if annotation is type(None):
        return ["null"]
    if get_origin(annotation) is Literal:
        return [value if isinstance(value, str) else str(value).lower() for value in get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType):
        return [value for member in get_args(annotation) for value in _values(member)]
    return []
