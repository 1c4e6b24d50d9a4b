"""The process of a case: `python -m benchmarks.gpu.process NAME --work FOLDER [--small]`.

It imports what the case needs, and waits for a line on standard input: the file of the measured rates, or nothing. Then
it measures, and prints one line of JSON. Everything else goes to standard error. When standard input ends, the process
that started it is gone, and it ends with all that it has started.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.case import FailedError, NotHereError, Situation
from benchmarks.gpu.cases import CASES
from benchmarks.gpu.steps import told
from llmtrain.errors import RecipeError


def answer(name: str, given: Situation) -> dict[str, Any]:
    """Runs a case; returns its status, the reason if it is not `done`, and what was found."""
    try:
        return {"status": "done", "found": CASES[name].measure(given)}
    except FailedError as error:
        return {"status": "failed", "reason": str(error), "found": error.found}
    except NotHereError as error:
        return {"status": "skipped", "reason": str(error)}
    except RecipeError as error:
        return {"status": "refused", "reason": told(error)}
    except Exception as error:  # of any library
        traceback.print_exc()
        return {"status": "failed", "reason": told(error)}


def main() -> None:
    """Runs the case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not part of the answer
    orders = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what the case starts must not read from it
    for module in CASES[options.name].imports:
        try:
            importlib.import_module(module)
        except Exception:  # of any library; the case will say so
            traceback.print_exc()
    if not (order := orders.readline()):
        return
    threading.Thread(target=_end_with, args=(orders,), daemon=True).start()
    rates = Path(order.strip()) if order.strip() else None
    found = answer(options.name, Situation(options.small, options.work, rates))
    print(json.dumps(found), file=output, flush=True)
    sys.stderr.flush()
    os._exit(0)  # threads of gloo or NCCL may abort a process that ends in the usual way


def _end_with(orders: IO[str]) -> None:
    orders.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
