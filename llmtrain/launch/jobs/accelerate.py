"""Hugging Face Accelerate's launcher: the number of processes requested, and a plan as its configuration file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain.launch.jobs import render_template
from llmtrain.plan.draft import COMPUTE_DTYPE
from llmtrain.plan.plan import Plan
from llmtrain.recipe import Precision

MIXED_PRECISION: dict[Precision, str] = {
    precision: "no" if computed == "fp32" else computed for precision, computed in COMPUTE_DTYPE.items()
}
"""Our precision → Accelerate's.

Under DistributedDataParallel `bf16` is autocast, under FSDP2 bf16 copies of fp32 weights.
"""
DISTRIBUTED_TYPE = {"deepspeed": "DEEPSPEED", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}
"""Strategy → Accelerate's name. `MULTI_GPU` also starts workers on CPUs; `MULTI_CPU` starts only one there."""


def has_configuration(plan: Plan) -> bool:
    """Whether accelerate supports the plan's strategy; it does not support Horovod and `nn.DataParallel`."""
    return plan.recipe.parallel.strategy in DISTRIBUTED_TYPE


def render_configuration(plan: Plan, ds_config: Path) -> str:
    """Renders `accelerate.yaml`, for `accelerate launch --config_file accelerate.yaml recipes/NAME.py`.

    ds_config: the plan's DeepSpeed configuration. Its settings are not repeated, since accelerate refuses duplicates.
    """
    strategy = plan.recipe.parallel.strategy
    return render_template(
        "accelerate.yaml.j2",
        plan=plan,
        ds_config=str(ds_config),
        distributed_type=DISTRIBUTED_TYPE[strategy],
        mixed_precision=None if strategy == "deepspeed" else MIXED_PRECISION[plan.recipe.parallel.precision],
    )


def requested_processes(env: Mapping[str, str] | None = None, parent: Sequence[str] | None = None) -> int | None:
    """Returns the processes that `accelerate launch --num_processes` asks for if it started only this one, else None.

    On a CPU its simple launcher starts one process and does not pass the number on (accelerate/commands/launch.py), so
    it is read from the parent's command line.

    parent: the parent's command line; by default it is read from /proc.
    """
    env = os.environ if env is None else env
    if "ACCELERATE_MIXED_PRECISION" not in env or env.get("RANK"):
        return None
    if parent is None:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")
    match = re.search(r"--num[-_]processes[= ]([1-9][0-9]*)\b", " ".join(parent))
    return int(match[1]) if match else None
