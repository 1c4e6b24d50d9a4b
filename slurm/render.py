"""Renders the job scripts of this folder from llmtrain/launch/jobs/templates.

python slurm/render.py            writes the files
python slurm/render.py --check    exits with 1 if a file differs from what its template gives
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmtrain.launch.jobs.slurm import example_scripts

HERE = Path(__file__).parent


def main() -> int:
    """Writes or checks the files and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    texts = example_scripts()
    present = {file.name: file.read_text(encoding="utf-8") for file in HERE.glob("*.sbatch")}
    stale = sorted(name for name in {*texts, *present} if texts.get(name) != present.get(name))
    for name in stale:
        if check:
            print(f"{name} is not what its template says", file=sys.stderr)
        elif name in texts:
            (HERE / name).write_text(texts[name], encoding="utf-8")
        else:
            (HERE / name).unlink()
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
