"""Checks whether a legal plan can be started here: with the installed packages and the started processes."""

from __future__ import annotations

from importlib.util import find_spec

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.plan import Plan

PACKAGES = {
    "accelerate": ("accelerate", "pip install accelerate"),
    "horovod": ("horovod", "scripts/install_horovod.sh"),
}
"""Backend → the package that it imports, and the command that installs it."""
_LIGER = (("liger_kernel",), ("triton",)), "pip install llmtrain[liger]"
_FP8 = (("torchao",),), "pip install llmtrain[fp8]"
PACKAGES_OF_KERNELS = {
    ("model.attention", "flash_attention_2"): ((("flash_attn", "kernels"),), "pip install kernels"),
    ("model.attention", "flash_attention_3"): ((("flash_attn_interface", "kernels"),), "pip install kernels"),
    ("kernels.blocks", "liger"): _LIGER,
    ("kernels.loss", "liger"): _LIGER,
    ("kernels.fp8", "tensorwise"): _FP8,
    ("kernels.fp8", "rowwise"): _FP8,
}
"""Field of the recipe and its value → the packages that it imports, each with its alternatives, and the install
command."""
INSTEAD = {"model.attention": "varlen", "kernels.blocks": "auto", "kernels.loss": "auto", "kernels.fp8": "off"}
"""The value of each field that needs no package."""


def is_installed(backend: str) -> bool:
    """Whether the package that a backend imports is installed; does not import it."""
    return backend not in PACKAGES or find_spec(PACKAGES[backend][0]) is not None


def missing_packages(plan: Plan) -> list[Problem]:
    """Returns the packages that the plan's backend and its kernels import but that are not installed."""
    problems, backend = [], plan.recipe.parallel.backend
    if not is_installed(backend):
        package, command = PACKAGES[backend]
        message = f"'{backend}' needs the package {package}, which is not installed"
        problems.append(Problem("backend.installed", "parallel.backend", message, command))
    for (field, value), (packages, command) in PACKAGES_OF_KERNELS.items():
        missing = [" or ".join(any_of) for any_of in packages if not any(map(find_spec, any_of))]
        part, _, name = field.partition(".")
        if getattr(getattr(plan.recipe, part), name) == value and missing:
            message = f"'{value}' needs packages that are not installed: {' and '.join(missing)}"
            fix = f"{command}, or --set {field}={INSTEAD[field]}"
            problems.append(Problem("kernels.installed", field, message, fix))
    return problems


def check_runnable(plan: Plan, workers: int | None = None) -> None:
    """Raises RecipeError if a package of the plan's backend is missing, or a launcher has started other workers.

    workers: number of processes that a launcher has started; None if llmtrain starts those of the plan itself.
    """
    problems = missing_packages(plan)
    if workers is not None and workers != plan.workers:
        backend = plan.recipe.parallel.backend
        message = f"the launcher started {workers} processes, but '{backend}' drives all devices from {plan.workers}"
        problems.append(Problem("launch.workers", "parallel.backend", message, "start it with `llmtrain train`"))
    if problems:
        raise RecipeError(problems)
