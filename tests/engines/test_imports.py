"""What a rank need not import, it does not: importing is most of the time from the command to the first step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TRAINED = """
import sys
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import plan_of, trace_plan

def imported(rank):
    trace_plan(plan_of(tiny_recipe(**{"parallel.zero_stage": 1}), 1), 1, rank)
    return [name for name in ("torch._inductor.codegen.cpp", "torch._inductor.compile_fx") if name in sys.modules]

if __name__ == "__main__":
    import multiprocessing
    multiprocessing.get_context("forkserver").set_forkserver_preload([])
    print(run_ranks(1, imported))
"""


@pytest.mark.slow
def test_training_under_zero_does_not_import_inductor(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TRAINED)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=os.environ, check=False)
    assert done.stdout == "[[]]\n", done.stdout + done.stderr
