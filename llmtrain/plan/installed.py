"""Which backends need a package that may not be there."""

from __future__ import annotations

from importlib.util import find_spec

from llmtrain.errors import Problem
from llmtrain.plan.plan import Plan

PACKAGES = {
    "accelerate": ("accelerate", "pip install accelerate"),
    "horovod": ("horovod", "scripts/install_horovod.sh"),
}
"""Backend → the package that it imports, and the command that installs it."""


def is_installed(backend: str) -> bool:
    """Whether the package that a backend imports is there; found without importing it."""
    return backend not in PACKAGES or find_spec(PACKAGES[backend][0]) is not None


def missing_packages(plan: Plan) -> list[Problem]:
    """The package that the plan's backend imports, where it is not installed."""
    backend = plan.recipe.parallel.backend
    if is_installed(backend):
        return []
    package, command = PACKAGES[backend]
    message = f"'{backend}' was given, but the package {package} is not installed"
    return [Problem("backend.installed", "parallel.backend", message, command)]
