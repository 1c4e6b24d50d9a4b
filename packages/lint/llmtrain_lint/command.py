"""The command `llmtrain lint`, and `llmtrain-lint` without llmtrain."""

from __future__ import annotations

import difflib
import errno
import json
import os
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmtrain_lint import RULES, Result, Use, examine, parse_allowed
from llmtrain_lint.document import Unreadable
from llmtrain_lint.errors import Problem, UsageError, printable, truncate
from llmtrain_lint.reading import is_yaml, read_file
from llmtrain_lint.schema import Schema, schema
from llmtrain_lint.versions import choose_release

CLEAN, FOUND, UNREADABLE = 0, 1, 2
"""Exit codes: FOUND for errors, or for more warnings than are allowed; UNREADABLE for a file that cannot be read."""


def lint_files(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE…", help="Files, folders, patterns, or - for standard input: JSON, Hjson or YAML."),
    ] = [],  # noqa: B006  (typer copies it)
    reader: Annotated[
        Literal["trainer", "accelerate", "lightning", "deepspeed"] | None,
        typer.Option("--for", help="The program that reads the files; by default it is guessed for each file."),
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="Check the batch sizes for this many ranks.", min=1)] = None,
    data_parallel: Annotated[
        int | None, typer.Option(help="Check the batch sizes for this many data parallel ranks.", min=1)
    ] = None,
    deepspeed: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Check for this version of DeepSpeed, or for a range such as '>=0.17,<0.19'."
        ),
    ] = None,
    assignments: Annotated[
        list[str],
        typer.Option("--set", metavar="ARGUMENT=VALUE", help="Compare with an argument of the Trainer. Repeatable."),
    ] = [],  # noqa: B006
    arguments: Annotated[
        Path | None, typer.Option(help="Compare with the Trainer's arguments in this JSON or YAML file.")
    ] = None,
    allow: Annotated[
        list[str],
        typer.Option(metavar="RULE[:KEY]", help="Do not report this rule, or this rule for this key. Repeatable."),
    ] = [],  # noqa: B006
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")] = False,
    max_warnings: Annotated[
        int | None, typer.Option(metavar="N", help="Exit with 1 if there are more than N warnings.", min=0)
    ] = None,
    form: Annotated[
        Literal["text", "json", "sarif", "github"], typer.Option("--format", help="Output format.")
    ] = "text",
    explain: Annotated[str | None, typer.Option(metavar="RULE", help="Describe a rule and exit.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show what --fix would change, and change nothing.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Fix the files where possible, then check them.")] = False,
) -> None:
    """Check DeepSpeed configurations.

    Reports settings that are refused, ignored, changed or misread.

    Exits with 0 if there are no errors, 1 if there are, and 2 if a file cannot be read.
    """
    from llmtrain_lint.files import find_files, load_settings, named_by_accelerate
    from llmtrain_lint.report import describe_rule, format_results

    if explain is not None:
        [name] = parse_allowed([f"{explain}:KEY"], "--explain")
        print(describe_rule(next(rule for rule in RULES if rule.id == name.partition(":")[0])))
        return
    if not files:
        raise UsageError(Problem("lint.files", "FILE…", "no file is given", "name files or folders"))
    project = load_settings(_working_directory())
    allowed = parse_allowed(allow)
    chosen_reader = reader or project.reader
    release = choose_release(deepspeed or project.deepspeed)
    use = Use(chosen_reader, world_size, data_parallel, _arguments(arguments, assignments), release.deepspeed)
    found = find_files(files)
    if diff or fix:
        _fix_files(found, schema(release.deepspeed), diff)
    named = named_by_accelerate(found)
    uses = {path: replace(use, reader="accelerate", world_size=world_size or ranks) for path, ranks in named.items()}
    found += [(str(path), path) for path in named if all(path != other for _, other in found)]
    results = [
        examine(name, text, uses.get(text, use) if isinstance(text, Path) else use, allowed | project.allowed_in(name))
        for name, text in found
    ]
    if not diff:
        print(format_results(results, form, release, guessed=chosen_reader is None))
    sys.exit(_exit_code(results, 0 if strict else max_warnings))


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        message = f"does not exist or cannot be read ({error.strerror})"
        fix = "cd to an existing directory that you may read"
        raise UsageError(Problem("python.folder", "working directory", message, fix)) from None


def _exit_code(results: list[Result], max_warnings: int | None) -> int:
    if not all(result.readable for result in results):
        return UNREADABLE
    errors = sum(result.errors for result in results)
    warnings = sum(len(result.findings) for result in results) - errors
    return FOUND if errors or (max_warnings is not None and warnings > max_warnings) else CLEAN


def _fix_files(files: list[tuple[str, bytes | Path]], known: Schema, diff: bool) -> None:
    """Fixes the files or, with `diff`, prints what would change. Raises UsageError."""
    from llmtrain_lint.fixing import fix_text

    for name, path in files:
        if not isinstance(path, Path):
            raise UsageError(Problem("lint.fix", name, "standard input cannot be fixed", "name a file"))
        try:
            old = read_file(path)
        except Unreadable:
            continue  # the report mentions it
        new = fix_text(old, known, is_yaml(name))
        if diff:
            before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
            print(*difflib.unified_diff(before, after, printable(name), printable(name)), sep="", end="")
        elif new != old:
            _replace(name, path, new)


def _replace(name: str, path: Path, text: str) -> None:
    """Replaces a file atomically; keeps links to it and its permissions. Raises UsageError."""
    try:
        real = path.resolve(strict=True)
        if not os.access(real, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only", name)
        temporary = real.with_name(f".{real.name}.{uuid.uuid4().hex[:8]}")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(real, temporary)
            temporary.replace(real)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(Problem("lint.fix", name, f"cannot be written: {error.strerror or error}")) from None


def _arguments(file: Path | None, assignments: Sequence[str]) -> Mapping[str, Any]:
    """Returns the Trainer's arguments from a file and from assignments, which take precedence. Raises UsageError."""
    import yaml

    given: dict[str, Any] = {}
    if file:
        try:
            loaded = yaml.safe_load(read_file(file))  # YAML includes JSON
        except (Unreadable, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UsageError(Problem("lint.arguments", str(file), truncate(printable(str(error))))) from None
        if not isinstance(loaded, dict):
            raise UsageError(Problem("lint.arguments", str(file), "contains no object"))
        given.update(loaded)
    for assignment in assignments:
        name, equal, value = assignment.partition("=")
        if not (name and equal):
            raise UsageError(Problem("lint.set", assignment, "must be ARGUMENT=VALUE"))
        given[name] = {"True": True, "False": False}.get(value, value)
    return {name: _number(value) for name, value in given.items()}


def _number(value: Any) -> Any:
    """Returns the number that a text contains, or else the value unchanged: YAML 1.1 reads 1e-5 as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
