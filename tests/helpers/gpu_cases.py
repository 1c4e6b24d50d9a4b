"""Cases without torch for `benchmarks.gpu.run`, and the process that runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.gpu import cases, process
from benchmarks.gpu.case import Case, FailedError, NotHereError, Numbers, Situation
from llmtrain.errors import Problem, RecipeError


def fine(given: Situation) -> Numbers:
    print("a library's output")
    print("a log line", file=sys.stderr)
    return {"number": 1.5, "rates": given.rates.read_text() if given.rates else None}


def measures_rates(given: Situation) -> Numbers:
    return {"measured": {"device": "h100"}}


def raises(given: Situation) -> Numbers:
    raise ValueError("no such kernel")


def finds_a_fault(given: Situation) -> Numbers:
    raise FailedError("1 of 2 plans", {"certified": 1})


def is_refused(given: Situation) -> Numbers:
    raise RecipeError([Problem("kernels.fp8", "kernels.fp8", "needs a newer GPU", "leave it out")])


def is_not_here(given: Situation) -> Numbers:
    raise NotHereError("all tests were skipped")


def dies(given: Situation) -> Numbers:
    print("Segmentation fault", file=sys.stderr, flush=True)
    os._exit(11)


def hangs(given: Situation) -> Numbers:
    """With a child in another session, whose process ID it writes."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (given.work.parent / "hanging").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return {}


CASES = {
    "self-test": Case("measures rates", 1, measures_rates),
    "fine": Case("works", 1, fine, imports=("json", "no_such_module")),
    "raises": Case("raises", 1, raises),
    "faulty": Case("finds a fault", 1, finds_a_fault),
    "refused": Case("is refused", 1, is_refused),
    "not here": Case("has nothing to do", 1, is_not_here),
    "dies": Case("dies", 1, dies),
    "hangs": Case("hangs", 1, hangs),
    "later": Case("works, too", 1, fine),
    "long": Case("takes long", 3600, fine),
}

if __name__ == "__main__":
    cases.CASES = process.CASES = CASES
    process.main()
