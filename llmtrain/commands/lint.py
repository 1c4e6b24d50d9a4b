"""The command line of `llmtrain lint`."""

from __future__ import annotations

import difflib
import errno
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmtrain.errors import Exit, Problem, RecipeError, printable, truncate

if TYPE_CHECKING:
    from llmtrain.lint import Result
    from llmtrain.lint.schema import Schema

FOUND = 1
"""Exit code for errors, or for more warnings than are allowed."""


@dataclass(frozen=True, kw_only=True)
class LintRequest:
    """The options of the command line."""

    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE…", help="Files, folders, patterns, or - for standard input: JSON, Hjson or YAML."),
    ] = field(default_factory=list)
    reader: Annotated[
        Literal["trainer", "accelerate", "lightning", "deepspeed"] | None,
        typer.Option("--for", help="The program that reads the files; by default it is guessed for each file."),
    ] = None
    world_size: Annotated[int | None, typer.Option(help="Check the batch sizes for this many ranks.", min=1)] = None
    data_parallel: Annotated[
        int | None, typer.Option(help="Check the batch sizes for this many data parallel ranks.", min=1)
    ] = None
    deepspeed: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Check for this version of DeepSpeed, or for a range such as '>=0.17,<0.19'."
        ),
    ] = None
    assignments: Annotated[
        list[str],
        typer.Option("--set", metavar="ARGUMENT=VALUE", help="Compare with an argument of the Trainer. Repeatable."),
    ] = field(default_factory=list)
    arguments: Annotated[
        Path | None, typer.Option(help="Compare with the Trainer's arguments in this JSON or YAML file.")
    ] = None
    allow: Annotated[
        list[str],
        typer.Option(metavar="RULE[:KEY]", help="Do not report this rule, or this rule for this key. Repeatable."),
    ] = field(default_factory=list)
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")] = False
    max_warnings: Annotated[
        int | None, typer.Option(metavar="N", help="Exit with 1 if there are more than N warnings.", min=0)
    ] = None
    form: Annotated[Literal["text", "json", "sarif", "github"], typer.Option("--format", help="Output format.")] = (
        "text"
    )
    explain: Annotated[str | None, typer.Option(metavar="RULE", help="Describe a rule and exit.")] = None
    diff: Annotated[bool, typer.Option("--diff", help="Show what --fix would change, and change nothing.")] = False
    fix: Annotated[bool, typer.Option("--fix", help="Fix the files where possible, then check them.")] = False


def lint_files(request: LintRequest) -> None:
    """Check DeepSpeed configurations.

    Reports settings that are refused, ignored, changed or misread.

    Exits with 0 if there are no errors, 1 if there are, and 2 if a file cannot be read.
    """
    from llmtrain.lint import RULES, Use, examine, parse_allowed
    from llmtrain.lint.files import settings, sources
    from llmtrain.lint.report import explained, written
    from llmtrain.lint.schema import schema
    from llmtrain.lint.versions import choose_release

    if request.explain is not None:
        [name] = parse_allowed([f"{request.explain}:KEY"], "--explain")
        print(explained(next(one for one in RULES if one.id == name.partition(":")[0])))
        return
    if not request.files:
        raise RecipeError(Problem("lint.files", "FILE…", "no file is given", "name files or folders"))
    project = settings(Path.cwd())
    allow = parse_allowed(request.allow)
    reader = request.reader or project.reader
    release = choose_release(request.deepspeed or project.deepspeed)
    use = Use(reader, request.world_size, request.data_parallel, _arguments(request), release.deepspeed)
    files = sources(request.files)
    if request.diff or request.fix:
        _mend(files, request, schema(release.deepspeed))
    results = [examine(name, text, use, allow | project.allowed_in(name)) for name, text in files]
    if not request.diff:
        print(written(results, request.form, release, guessed=reader is None))
    sys.exit(_exit_code(results, request))


def _exit_code(results: list[Result], request: LintRequest) -> int:
    if not all(one.readable for one in results):
        return Exit.USAGE
    errors = sum(one.errors for one in results)
    warnings = sum(len(one.findings) for one in results) - errors
    most = 0 if request.strict else request.max_warnings
    return FOUND if errors or (most is not None and warnings > most) else Exit.DONE


def _mend(files: list[tuple[str, bytes | Path]], request: LintRequest, known: Schema) -> None:
    """Fixes the files or, with --diff, prints what would change. Raises RecipeError."""
    from llmtrain.lint.document import Unreadable
    from llmtrain.lint.fixing import fixed
    from llmtrain.lint.reading import read_file
    from llmtrain.system.untrusted import is_yaml

    for name, path in files:
        if not isinstance(path, Path):
            raise RecipeError(Problem("lint.fix", name, "standard input cannot be fixed", "name a file"))
        try:
            old = read_file(path)
        except Unreadable:
            continue  # the report mentions it
        new = fixed(old, known, is_yaml(name))
        if request.diff:
            before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(before, after, printable(name), printable(name)))
        elif new != old:
            _replace(name, path, new)


def _replace(name: str, path: Path, text: str) -> None:
    """Replaces a file atomically; keeps links to it and its permissions. Raises RecipeError."""
    from llmtrain.system.durable import write_atomically
    from llmtrain.system.untrusted import file_fault

    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode & 0o777
        if not os.access(real, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only", name)
        write_atomically(real, text)
        real.chmod(mode)
    except OSError as error:
        raise RecipeError(Problem("lint.fix", name, f"cannot be written: {file_fault(error)}")) from None


def _arguments(request: LintRequest) -> dict[str, Any]:
    """Returns the Trainer's arguments from the file and from --set. Raises RecipeError."""
    import yaml

    from llmtrain.lint.document import Unreadable
    from llmtrain.lint.reading import read_file

    given: dict[str, Any] = {}
    if request.arguments:
        try:
            loaded = yaml.safe_load(read_file(request.arguments))  # YAML includes JSON
        except (Unreadable, ValueError, RecursionError, yaml.YAMLError) as error:
            message = truncate(printable(str(error)))
            raise RecipeError(Problem("lint.arguments", str(request.arguments), message)) from None
        if not isinstance(loaded, dict):
            raise RecipeError(Problem("lint.arguments", str(request.arguments), "contains no object"))
        given.update(loaded)
    for one in request.assignments:
        name, equal, value = one.partition("=")
        if not (name and equal):
            raise RecipeError(Problem("lint.set", one, "must be ARGUMENT=VALUE"))
        given[name] = {"True": True, "False": False}.get(value, value)
    return {name: _number(value) for name, value in given.items()}


def _number(value: Any) -> Any:
    """Returns the number that a text contains, or else the value unchanged: YAML 1.1 reads 1e-5 as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
