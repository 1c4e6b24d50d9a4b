"""Compiles operators of DeepSpeed as its engines do when they first use them: `python -m ... NAME cpu|cuda`.

Told as a line of JSON: {"operator", "seconds", "file", "error"}. What compilers say goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time

BUILDERS = {"async_io": "AsyncIOBuilder", "pin_memory": "PinMemoryBuilder"}
"""Operator → what builds it. Engines take theirs from `deepspeed.ops.op_builder`, which asks the accelerator as here.

Those of Adam are not among them: ours is torch's own, fused, offloaded or not (`llmtrain.ds_config`). Neither is the
shared-memory collective for CPUs, which `llmtrain.engines.distributed` switches off.
"""
TAIL_LINES = 20


def main() -> None:
    """One operator."""
    name, accelerator = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as told:
        os.dup2(2, 1)
        print(json.dumps(build(name, accelerator)), file=told, flush=True)


def build(name: str, accelerator: str) -> dict[str, object]:
    """Loads an operator, which compiles it where torch's cache has none that is up to date.

    accelerator: `cpu` or `cuda`, the one that workers will have: it decides what is compiled, and how.
    """
    os.environ["DS_ACCELERATOR"] = accelerator
    from deepspeed.accelerator import get_accelerator

    started = time.monotonic()
    file, error = "", ""
    try:
        file = get_accelerator().create_op_builder(BUILDERS[name]).load(verbose=False).__file__
    except Exception as failure:  # a compiler's output is in the message
        error = "\n".join(str(failure).splitlines()[-TAIL_LINES:]) or repr(failure)
    return {"operator": name, "seconds": time.monotonic() - started, "file": file, "error": error}


if __name__ == "__main__":
    main()
