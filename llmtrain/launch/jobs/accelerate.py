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
from llmtrain.system.untrusted import UNREADABLE, expanded, read_text

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
    """Returns the processes that `accelerate launch` was asked for if it started only this one, else None.

    On a CPU its simple launcher starts one process and does not pass the number on (accelerate/commands/launch.py), so
    it is read where accelerate reads it: from the parent's command line, from the configuration file named there, or
    from the user's default configuration.

    parent: the parent's command line; by default it is read from /proc.
    """
    env = os.environ if env is None else env
    if "ACCELERATE_MIXED_PRECISION" not in env or env.get("RANK"):
        return None
    parent = _parent_command() if parent is None else parent
    if (named := _option(parent, "num_processes")) is not None:
        return _positive(named)
    file = _option(parent, "config_file")
    return _processes_in(Path(file) if file else _default_configuration(env))


def _option(command: Sequence[str], name: str) -> str | None:
    """Returns the value of an option of accelerate, which may be written with dashes or underscores."""
    for index, argument in enumerate(command):
        option, equals, value = argument.partition("=")
        if option.startswith("--") and option[2:].replace("-", "_") == name:
            return value if equals else "".join(command[index + 1 : index + 2])
    return None


def _default_configuration(env: Mapping[str, str]) -> Path:
    """Returns the file that `accelerate config` writes (accelerate/commands/config/config_args.py)."""
    cache = env.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(env.get("HF_HOME") or f"{cache}/huggingface") / "accelerate" / "default_config.yaml"


def _processes_in(configuration: Path) -> int | None:
    """Reads the number of processes from a configuration, YAML or JSON; in both it has a line of its own."""
    try:
        text = read_text(configuration)
    except UNREADABLE:
        return None
    match = re.search(r'^\s*"?num_processes"?\s*:\s*([0-9]+)', text, flags=re.MULTILINE)
    return _positive(match[1]) if match else None


def _positive(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _parent_command() -> list[str]:
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(part) for part in raw.split(b"\0") if part]
