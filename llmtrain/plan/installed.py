"""Which backends and kernels need a package that may not be there."""

from __future__ import annotations

from importlib.util import find_spec

from llmtrain.errors import Problem
from llmtrain.plan.plan import Plan

PACKAGES = {
    "accelerate": ("accelerate", "pip install accelerate"),
    "horovod": ("horovod", "scripts/install_horovod.sh"),
}
"""Backend → the package that it imports, and the command that installs it."""
ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Attention → the package that has it; `kernels` has any of them."""


KERNELS = {
    ("blocks", "liger"): (("liger_kernel", "triton"), "pip install llmtrain[liger]"),
    ("loss", "liger"): (("liger_kernel", "triton"), "pip install llmtrain[liger]"),
    ("fp8", "tensorwise"): (("torchao",), "pip install llmtrain[fp8]"),
    ("fp8", "rowwise"): (("torchao",), "pip install llmtrain[fp8]"),
}
"""Field of `kernels` and its value → the packages that it imports, and the command that installs them."""


def is_installed(backend: str) -> bool:
    """Whether the package that a backend imports is there; found without importing it."""
    return backend not in PACKAGES or find_spec(PACKAGES[backend][0]) is not None


def missing_packages(plan: Plan) -> list[Problem]:
    """The packages that the plan's backend, its attention and its kernels import, where they are not installed."""
    problems = []
    backend, attention = plan.recipe.parallel.backend, plan.recipe.model.attention_kernel
    if not is_installed(backend):
        package, command = PACKAGES[backend]
        message = f"'{backend}' was given, but the package {package} is not installed"
        problems.append(Problem("backend.installed", "parallel.backend", message, command))
    package = ATTENTION.get(attention, "")
    if package and not any(map(find_spec, (package, "kernels"))):
        message = f"'{attention}' was given, but neither the package {package} nor kernels is installed"
        fix = "pip install kernels, or --set model.attention=varlen"
        problems.append(Problem("model.attention_installed", "model.attention", message, fix))
    for (field, value), (packages, command) in KERNELS.items():
        missing = [package for package in packages if find_spec(package) is None]
        if getattr(plan.recipe.kernels, field) == value and missing:
            message = f"{value} was given, but not installed: {' and '.join(missing)}"
            instead = "off" if field == "fp8" else "auto"
            fix = f"{command}, or --set kernels.{field}={instead}"
            problems.append(Problem("kernels.installed", f"kernels.{field}", message, fix))
    return problems
