"""Writes docs/reference/rules.md: the rules of legality.

python tools/render_rules.py
"""

from __future__ import annotations

from pathlib import Path

from llmtrain.plan.rules import ENGINE, RULES

PAGE = Path(__file__).parents[1] / "docs/reference/rules.md"
EVIDENCE = {
    "run": "run, and compared with plain torch",
    "read": "read in its source",
    "arithmetic": "arithmetic",
}

HEAD = f"""# Rules of legality

Generated from `llmtrain/plan/rules/` by `python tools/render_rules.py`; do not edit.

A plan that breaks a rule is refused before anything starts. The message contains the rule's id, the given value and a
fix. A rule marked *note* does not refuse the plan but prints a note. The engine's behaviour was observed on
{ENGINE}. Rules whose names begin with `precision`, `zero`, `pipeline`, `tensor` or `expert` apply only to
DeepSpeed; they are not checked for other backends.

| Rule | Why | Evidence |
|---|---|---|
"""


def render() -> str:
    """Returns the whole page."""
    rows = (
        f"| `{rule.id}`{'' if rule.refuses else ' (note)'} | {rule.reason} | {EVIDENCE[rule.evidence]} |"
        for rule in RULES
    )
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
