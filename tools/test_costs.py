"""The page with the cost of each test file, and the faults that it would show.

pytest --junitxml default.xml
pytest -m "slow and not breadth" --junitxml slow.xml
python tools/test_costs.py default.xml slow.xml      adds up the times, and keeps them for the page
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from tools.page import Files, filled, table  # noqa: E402

TIMES = "tests/times.json"
"""For each file, [number of tests, their seconds] of each report."""
Times = dict[str, list[list[float]]]


def files() -> Files:
    """Returns the page: a row for each file, the most expensive first."""
    times: Times = json.loads((ROOT / TIMES).read_text(encoding="utf-8"))
    rows = []
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        name = str(path.relative_to(ROOT))
        by_report = times.get(name, [])
        description = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
        cells = [f"{seconds:.0f} ({number:.0f})" if number else "" for number, seconds in by_report] or ["", ""]
        link = f"[{name.removeprefix('tests/')}](../../{name})"
        rows.append((sum(seconds for _, seconds in by_report), [link, " ".join(description.split()), *cells]))
    rows.sort(key=lambda row: -row[0])
    columns = ("File", "What it shows", "Default", "Slow")
    return filled("docs/design/test_costs.md", test_costs=table(columns, (cells for _, cells in rows)))


def times_of(reports: list[Path]) -> Times:
    """Returns the times of all files in the reports that pytest has written as JUnit XML."""
    times: defaultdict[str, list[list[float]]] = defaultdict(lambda: [[0, 0.0] for _ in reports])
    for index, report in enumerate(reports):
        for case in ElementTree.parse(report).iter("testcase"):
            entry = times[case.attrib["classname"].replace(".", "/") + ".py"][index]
            entry[0] += 1
            entry[1] += float(case.attrib["time"])
    return {
        name: [[number, round(seconds, 1)] for number, seconds in entries] for name, entries in sorted(times.items())
    }


if __name__ == "__main__":
    measured = times_of([*map(Path, sys.argv[1:])])
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in measured.items()]
    (ROOT / TIMES).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
