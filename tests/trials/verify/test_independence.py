"""The reference shares no code with the engines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "llmtrain"
PARTS = ("reference", "reference_adapters", "reference_model", "reference_multimodal", "reference_optimizers")
PROOF = (*(f"{name}.py" for name in PARTS), "documents.py")
VERIFY = PACKAGE / "trials" / "verify"
DECLARATIONS = {"llmtrain.recipe", "llmtrain.recipe.own_code", "llmtrain.plan.facts.families"}
LIBRARIES = {"torch", "transformers", "numpy", "peft"}
STANDARD = {"__future__", "collections", "contextlib", "dataclasses", "fnmatch", "inspect", "math", "sys", "typing"}
OWN = {f"llmtrain.trials.verify.{name}" for name in PARTS}


MADE_OF = OWN | {"llmtrain.trials.verify.documents"}


def _imported(path: Path) -> dict[str, set[str]]:
    """Module → the names taken from it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name: set() for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
    return found


@pytest.mark.parametrize("name", PROOF)
def test_the_reference_imports_declarations_only(name):
    for module, names in _imported(VERIFY / name).items():
        known = module in DECLARATIONS | OWN or module.split(".")[0] in LIBRARIES | STANDARD
        assert known, f"{name} imports {module}"
        if module == "llmtrain.plan.facts.families":
            assert names <= {"MIXES_DOCUMENTS", "WRAPPERS"}


def test_no_other_module_uses_the_parts_of_the_reference():
    names = ("train.py", "batches.py", "documents.py", "reference.py", "reference_model.py", "reference_multimodal.py")
    allowed = {VERIFY / name for name in names}
    for path in set(PACKAGE.rglob("*.py")) - allowed:
        assert not _imported(path).keys() & MADE_OF, path
