"""Which backends need a package that may not be there."""

from __future__ import annotations

from importlib.util import find_spec

from llmtrain.errors import Problem
from llmtrain.plan.plan import Plan

PACKAGES = {"accelerate": ("accelerate", "pip install accelerate")}
"""Backend → the package that it imports, and the command that installs it."""


def missing_packages(plan: Plan) -> list[Problem]:
    """The package that the plan's backend imports, where it is not installed; found without importing it."""
    backend = plan.recipe.parallel.backend
    package, command = PACKAGES.get(backend, ("", ""))
    if not package or find_spec(package) is not None:
        return []
    message = f"'{backend}' was given, but the package {package} is not installed"
    return [Problem("backend.installed", "parallel.backend", message, command)]
