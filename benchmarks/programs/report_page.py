"""Times the page of long runs in Chromium; prints one line of JSON.

python -m benchmarks.programs.report_page write FOLDER --runs 10 --steps 100000     the runs, and their page
python -m benchmarks.programs.report_page open FOLDER                               how long it takes to open
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tests.helpers.browser import chromium
from tests.helpers.recorded_runs import long_run

IS_DRAWN = """
const done = arguments[0];
const look = () => report.charts.some((one) => one.plot)
    ? requestAnimationFrame(() => done(performance.now() / 1000)) : requestAnimationFrame(look);
look();
"""
"""Seconds from the start of the navigation until the frame after the first curves."""
ALL_DRAWN = """
const done = arguments[0], start = performance.now();
report.drawAll();
requestAnimationFrame(() => requestAnimationFrame(() => done((performance.now() - start) / 1000)));
"""


def write(folder: Path, runs: int, steps: int) -> dict[str, float]:
    """Writes runs with a line for each step, and times their page."""
    from llmtrain.report.page import write_report

    folders = [long_run(folder / f"run_{seed}", steps, seed) for seed in range(runs)]
    started = time.perf_counter()
    write_report(folders, folder / "report.html")
    return {"written_s": time.perf_counter() - started}


def opened(folder: Path) -> dict[str, float]:
    """Opens the page in a browser that has just been started."""
    page = folder / "report.html"
    with chromium() as browser:
        browser.get(page.as_uri())
        seconds = browser.execute_async_script(IS_DRAWN)
        whole = browser.execute_async_script(ALL_DRAWN)
    return {"opened_s": seconds, "all_drawn_s": whole, "page_mb": page.stat().st_size / 1e6}


def main() -> None:
    """Measures one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("write", "open"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    if options.part == "write":
        print(json.dumps(write(options.folder, options.runs, options.steps)))
    else:
        print(json.dumps(opened(options.folder)))


if __name__ == "__main__":
    main()
