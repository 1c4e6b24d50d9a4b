"""The program `llmtrain-lint`, also as `python -m llmtrain_lint`."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

import typer

from llmtrain_lint.command import CLEAN, UNREADABLE, lint_files
from llmtrain_lint.errors import UsageError, printable


def main() -> None:
    """Runs the command. A user's mistake, or a failure of the machine, becomes a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    program.command()(lint_files)
    try:
        try:
            program()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except UsageError as error:
        _refuse(str(error))
    except (BrokenPipeError, SystemExit) as end:
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        # The program that reads the output has exited (`llmtrain-lint … | head`). Typer would exit with 1.
        _drop_output(1)
        sys.exit(CLEAN)
    except OSError as error:
        _drop_output(1)
        _refuse(f"{error.filename or 'the output'}: {error.strerror or error}")


def _refuse(message: str) -> NoReturn:
    """Prints an error, if that is possible, and exits."""
    if sys.stderr is not None:  # None if it is closed
        try:
            print(printable(f"error: {message}", kept="\n\t"), file=sys.stderr, flush=True)
        except OSError:
            _drop_output(2)
    sys.exit(UNREADABLE)


def _drop_output(descriptor: int) -> None:
    """Redirects a stream that has failed to /dev/null, so that flushing the rest at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


if __name__ == "__main__":
    main()
