"""Runs torchrun on one of several nodes with our launcher's signals and exit codes: `python -m ... ARGUMENT...`.

The arguments are torchrun's. torchrun itself exits with 1 whatever happened, gives workers half a minute to save, and
dies of SIGUSR1; but batch systems and Kubernetes treat a job by its exit code.
"""

from __future__ import annotations

import sys

from llmtrain.errors import Exit
from llmtrain.launch.failure import exit_code_before_first_step
from llmtrain.launch.tools import TORCHRUN, ToolEnd, run_tool
from llmtrain.system.stops import STOP_SIGNALS

USER_ERROR_CODES = (Exit.USAGE, Exit.DATA, Exit.CHECKPOINT)
"""Exit codes of mistakes that another attempt would repeat."""
MODULE = ["-m", "llmtrain"]


def main() -> None:
    """Runs torchrun. Exits with 0, 75 if stopped and saved, 2, 3 or 4 for a user's mistake, else 5."""
    options, script = split_arguments(sys.argv[1:])
    if not script:
        print("usage: python -m llmtrain.launch.torchrun [OPTIONS OF TORCHRUN] SCRIPT [ARGUMENTS]", file=sys.stderr)
        sys.exit(Exit.USAGE)
    end = run_tool([*TORCHRUN, *options], script)
    sys.exit(Exit.INTERRUPTED if end.was_interrupted else node_exit_code(end))


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits torchrun's options from the script with its arguments.

    The script is the first word that ends in `.py`, or `-m llmtrain`, which trains a recipe in YAML.
    """
    starts = (at for at, word in enumerate(arguments) if word.endswith(".py") or arguments[at : at + 2] == MODULE)
    at = next(starts, len(arguments))
    return arguments[:at], arguments[at:]


def node_exit_code(end: ToolEnd) -> int:
    """Returns the exit code of the node."""
    failed = sorted((worker for worker in end.exits if worker.failed), key=lambda worker: worker.order(None))
    if end.code == 0 and not failed:
        return Exit.RESUME if any(worker.code == Exit.RESUME for worker in end.exits) else Exit.DONE
    mistake = next((worker.code for worker in failed if worker.code in USER_ERROR_CODES), None)
    if mistake is not None:
        return mistake
    if end.stopped_by is not None and (not failed or -failed[0].code in STOP_SIGNALS):
        return exit_code_before_first_step(end.stopped_by)  # it did not handle signals yet
    return Exit.WORKER


if __name__ == "__main__":
    main()
