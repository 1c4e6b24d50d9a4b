"""Writes docs/design/overrides.md: what llmtrain replaces in other libraries.

python tools/render_overrides.py
"""

from __future__ import annotations

from pathlib import Path

from llmtrain.overrides import OVERRIDES, TRIED, Override

PAGE = Path(__file__).parents[1] / "docs/design/overrides.md"
HEAD = """# What llmtrain replaces in other libraries

Generated from `llmtrain/overrides/` by `python tools/render_overrides.py`; do not edit.

llmtrain replaces or reads the following private parts of other libraries. They may change with any release, so
`pyproject.toml` bounds the versions from above. If an installed version lacks one of these parts, or has a function
with other parameters than those in parentheses, llmtrain refuses to build an engine. `...` stands for further
parameters with defaults. With an untested version that has all of the parts, a run reports this when it starts.
[Reports](../upstream/README.md) of faults that have no issue come with a program that shows them.
"""


def render() -> str:
    """Returns the whole page."""
    lines = [HEAD]
    for package, version in TRIED.items():
        lines += [
            f"## {package} {version}\n",
            f"In [`llmtrain/overrides/{package}.py`](../../llmtrain/overrides/{package}.py).\n",
            "| Part | Without it | Test | Upstream |",
            "|---|---|---|---|",
        ]
        for one in (one for one in OVERRIDES if one.package == package):
            parts = "<br>".join(f"`{place.replace(':.', ':')}`" for place in one.places)
            lines.append(f"| {parts} | {one.why} | `{one.test}` | {_links(one)} |")
        lines.append("")
    return "\n".join(lines)


def _links(one: Override) -> str:
    repository, _, number = one.upstream.partition("#")
    issue = f"[{one.upstream}](https://github.com/{repository}/issues/{number})" if one.upstream else ""
    report = f"[report](../upstream/{one.report}.md)" if one.report else ""
    return ", ".join(filter(None, (issue, report))) or "none known"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
