"""Compiles operators of DeepSpeed as its engines do when they first use them: `python -m ... NAME cpu|cuda`.

Prints a line of JSON: {"operator", "seconds", "file", "error"}. Compiler output goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time

from llmtrain.system.streams import reserved_stdout

BUILDERS = {"async_io": "AsyncIOBuilder", "pin_memory": "PinMemoryBuilder"}
"""Operator → its builder. `deepspeed.ops.op_builder`, from which engines get theirs, also asks the accelerator.

The Adam operators are missing because llmtrain uses torch's fused Adam, offloaded or not
(`llmtrain.plan.ds_config`). So is the shared-memory collective for CPUs, which `llmtrain.engines.runtime.distributed`
disables.
"""
TAIL_LINES = 20


def main() -> None:
    """Compiles one operator, and prints the result."""
    name, accelerator = sys.argv[1:]
    with reserved_stdout() as output:
        print(json.dumps(build_operator(name, accelerator)), file=output, flush=True)


def build_operator(name: str, accelerator: str) -> dict[str, object]:
    """Loads an operator, and compiles it if torch's cache has no current build.

    accelerator: `cpu` or `cuda`, as the workers will have; it determines what is compiled and how.
    """
    os.environ["DS_ACCELERATOR"] = accelerator
    from deepspeed.accelerator import get_accelerator

    started = time.monotonic()
    file, error = "", ""
    try:
        file = get_accelerator().create_op_builder(BUILDERS[name]).load(verbose=False).__file__
    except Exception as failure:  # the message contains the compiler's output
        error = "\n".join(str(failure).splitlines()[-TAIL_LINES:]) or repr(failure)
    return {"operator": name, "seconds": time.monotonic() - started, "file": file, "error": error}


if __name__ == "__main__":
    main()
