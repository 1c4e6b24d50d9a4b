"""The page about DeepSpeed's behaviour names existing rules and tests."""

from __future__ import annotations

import re
from pathlib import Path

from llmtrain.plan.rules import RULES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/design/engine_facts.md").read_text()
CELLS = re.findall(r"`([^`]+)`", TEXT)


def test_rules_and_files_exist():
    areas = {rule.id.partition(".")[0] for rule in RULES} | {"lint"}
    lint = set(re.findall(r"^## (lint\.\w+)$", (ROOT / "docs/reference/lint.md").read_text(), re.M))
    named = {cell for cell in CELLS if re.fullmatch(rf"({'|'.join(areas)})\.[a-z0-9_]+", cell)}
    assert named <= {rule.id for rule in RULES} | lint
    files = {cell for cell in CELLS if cell.endswith(".py")}
    assert len(files) > 10
    assert not [file for file in files if not (ROOT / file).is_file()]
