"""Renders the rules as a document: `python -m llmtrain.plan.rules.table > docs/reference/rules.md`."""

from __future__ import annotations

from llmtrain.plan.rules import ENGINE, RULES

_SEEN = {
    "run": "run, and compared with plain torch",
    "read": "read in its source",
    "arithmetic": "arithmetic",
}

_HEAD = f"""# Rules of legality

Generated from `llmtrain/plan/rules/` by `python -m llmtrain.plan.rules.table`; do not edit.

A plan that breaks a rule is refused before anything starts, with the rule's id, what was given and what
to do; a rule marked *note* lets the plan pass and says so. What the engine does was seen on {ENGINE}. Rules whose
names begin with `precision`, `zero`, `pipeline`, `tensor` or `expert` are DeepSpeed's: they are not asked about other
backends.

| Rule | Why | Seen |
|---|---|---|
"""


def markdown() -> str:
    """Returns the table of all rules."""
    rows = (
        f"| `{rule.id}`{'' if rule.refuses else ' (note)'} | {rule.reason} | {_SEEN[rule.seen]} |" for rule in RULES
    )
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
