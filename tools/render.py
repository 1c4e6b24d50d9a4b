"""Writes the files of the repository that are generated from its code and its measurements.

python tools/render.py              writes all files that take seconds
python tools/render.py NAME...      writes those of some generators
python tools/render.py --list       shows the generators, what each takes and writes
python tools/render.py --check      writes nothing; if files are out of date, names them and exits with 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of tools/, whose modules would hide others of the same name

from tools.page import Files  # noqa: E402

SECONDS = "seconds"


@dataclass(frozen=True)
class Generator:
    """A function that returns generated files."""

    function: str
    """`module:name` of a function without arguments, or with a part as an argument that can be left out."""
    writes: tuple[str, ...]
    """Paths or patterns from the root. A file that matches a pattern and is no longer generated is deleted."""
    takes: str = SECONDS
    """What it costs or needs. Unless this is seconds, it only runs if it is named."""
    part: str = ""
    """What `NAME:PART` restricts it to; empty if it has no parts."""

    def files(self, part: str = "") -> Files:
        """Returns the generated files."""
        module, _, name = self.function.partition(":")
        files: Files = getattr(import_module(module), name)(*filter(None, [part]))
        return files


REFERENCE = "docs/reference"
FAMILIES = "llmtrain/plan/facts/families.json"
DOWNLOADS = "a quarter of an hour, and downloads of DeepSpeed's releases"
GENERATORS = {
    "cli": Generator("tools.reference:cli", (f"{REFERENCE}/cli.md",)),
    "recipe": Generator("tools.reference:recipe", (f"{REFERENCE}/recipe.md",)),
    "rules": Generator("tools.reference:rules", (f"{REFERENCE}/rules.md",)),
    "coming_from": Generator("tools.coming_from:files", ("docs/guides/coming_from/*.md",)),
    "overrides": Generator("tools.reference:overrides", ("docs/design/overrides.md",)),
    "tokens": Generator("tools.tokens:files", (f"{REFERENCE}/tokens.md",)),
    "time": Generator("tools.step_time:files", ("docs/guides/time.md",)),
    "pictures": Generator("tools.pictures:files", ("docs/pictures/*.svg",)),
    "ds_configs": Generator("tools.configurations:ds_configs", ("ds_configs/*.json",)),
    "slurm": Generator("tools.configurations:slurm", ("slurm/*.sbatch",)),
    "benchmarks": Generator("benchmarks.render:files", ("benchmarks/README.md",)),
    "gpu": Generator(
        "benchmarks.gpu.page:files", (f"{REFERENCE}/gpu.md", "README.md", "llmtrain/plan/predict/measured.json")
    ),
    "test_costs": Generator("tools.test_costs:files", ("docs/design/test_costs.md",)),
    "lint": Generator("tools.lint_pages:rules", (f"{REFERENCE}/lint.md",)),
    "lint_schema": Generator(
        "tools.lint_schema:files",
        ("packages/lint/llmtrain_lint/deepspeed.json",),
        part=f"releases, for all of them: {DOWNLOADS}",
    ),
    "lint_corpus": Generator("tools.lint_pages:corpus", (f"{REFERENCE}/lint_corpus.md",), "a minute"),
    "lint_verdicts": Generator(
        "tools.lint_verdicts:files", ("tests/lint/verdicts.json",), DOWNLOADS, part="new, for files without a verdict"
    ),
    "families_defaults": Generator("tools.families:defaults", ("llmtrain/plan/facts/defaults.json",)),
    "families": Generator("tools.families:pipeline", (f"{REFERENCE}/families.md",), "half a minute"),
    "families_multimodal": Generator(
        "tools.families:multimodal", (f"{REFERENCE}/families_multimodal.md", FAMILIES), "a minute"
    ),
    "families_tensor": Generator("tools.families:tensor", (f"{REFERENCE}/families_tensor.md", FAMILIES), "a minute"),
    "families_sequence": Generator("tools.families:sequence", (f"{REFERENCE}/families_sequence.md",), "two minutes"),
    "families_documents": Generator(
        "tools.families:documents", (f"{REFERENCE}/families_documents.md", FAMILIES), "a minute"
    ),
    "families_expert": Generator(
        "tools.families:expert", (f"{REFERENCE}/families_expert.md", FAMILIES), "half a minute"
    ),
    "kernels": Generator(
        "tools.kernels:files", (f"{REFERENCE}/kernels.md",), "half an hour, and g++", part="GROUP, such as fp8"
    ),
    "flash_attn": Generator(
        "tools.flash_attn:files", ("tests/helpers/flash_attn.json",), "seconds, and a download of flash-attn"
    ),
    "benchmark_pictures": Generator(
        "benchmarks.render:pictures", ("benchmarks/pictures/*.svg",), "seconds; versions of matplotlib draw differently"
    ),
}


def stale(name: str, part: str = "") -> Files:
    """Returns the files of a generator that differ from what it returns, with what they should contain.

    Files to be deleted have empty contents.
    """
    generator = GENERATORS[name]
    files = generator.files(part)
    gone = {str(file.relative_to(ROOT)): "" for pattern in generator.writes for file in ROOT.glob(pattern)}
    return {path: content for path, content in {**gone, **files}.items() if _present(ROOT / path) != _bytes(content)}


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _present(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def messages(words: Sequence[str]) -> Iterator[str]:
    """Yields a line for each file that is out of date. words: NAME or NAME:PART."""
    for word in words:
        for path in stale(*word.split(":", 1)):
            yield f"{path} is out of date: run `python tools/render.py {word}`"


def write(words: Sequence[str]) -> None:
    """Writes the files that are out of date, and deletes those that are no longer generated."""
    for word in words:
        for path, content in stale(*word.split(":", 1)).items():
            if content:
                (ROOT / path).write_bytes(_bytes(content))
            else:
                (ROOT / path).unlink()
            print(f"{'wrote' if content else 'deleted'} {path}")


def by_default() -> list[str]:
    """Returns the generators that take seconds."""
    return [name for name, generator in GENERATORS.items() if generator.takes == SECONDS]


def _is_known(name: str, part: str = "") -> bool:
    return name in GENERATORS and bool(GENERATORS[name].part or not part)


def main() -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME[:PART]")
    parser.add_argument("--list", action="store_true", help="show the generators")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    if unknown := [word for word in options.names if not _is_known(*word.split(":", 1))]:
        parser.error(f"unknown: {', '.join(unknown)}; --list shows the names")
    words = options.names or by_default()
    if options.list:
        for name, generator in GENERATORS.items():
            part = f"; {name}:{generator.part}" if generator.part else ""
            print(f"{name:19} {generator.takes}{part}\n{'':19} {', '.join(generator.writes)}")
    elif options.check:
        found = [*messages(words)]
        print(*found, sep="\n", file=sys.stderr)
        return int(bool(found))
    else:
        write(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
