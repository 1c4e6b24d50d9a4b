"""Renders the DeepSpeed configuration of every recipe and variant into this folder.

python ds_configs/render.py            writes the files
python ds_configs/render.py --check    exits with 1 if a file differs from what its recipe gives
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from llmtrain.plan.ds_config import render
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import PythonRecipe
from llmtrain.plan.rules import resolve

HERE = Path(__file__).parent
RECIPES = HERE.parent / "recipes"


def rendered() -> Iterator[tuple[str, str]]:
    """Yields the file name and text of every configuration, each for the cluster that its recipe names."""
    for path in sorted(RECIPES.glob("*.py")):
        file = PythonRecipe(path)
        # Published weights are planned from their architecture, so that rendering does not need the hub.
        facts = model_facts(file.module.architecture(), None) if hasattr(file.module, "architecture") else None
        for variant in ("", *file.variants()):
            cluster = file.cluster(variant)
            assert cluster is not None, f"{path} names no cluster"
            config = render(resolve(file.recipe(variant), cluster, facts))
            name = f"{path.stem}-{variant}" if variant else path.stem
            yield f"{name}.json", json.dumps(config, indent=2) + "\n"


def main() -> int:
    """Writes or checks the files and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    texts = dict(rendered())
    stale = {file.name for file in HERE.glob("*.json")} - set(texts)
    stale |= {name for name, text in texts.items() if not _holds(HERE / name, text)}
    for name in sorted(stale):
        if check:
            print(f"{name} is not what its recipe says", file=sys.stderr)
        elif name in texts:
            (HERE / name).write_text(texts[name], encoding="utf-8")
        else:
            (HERE / name).unlink()
    return int(check and bool(stale))


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
