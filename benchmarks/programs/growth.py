"""Measures how memory grows with a corpus while it is tokenized and packed; prints one line of JSON.

python -m benchmarks.programs.growth CORPUS --cores 2    for a corpus whose tokenizer exists already

It reports the peak memory of the process after tokenizing a hundredth, a tenth, a third and all of the text, and after
packing. If memory does not grow with the corpus, the peak is the same after a third as at the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.programs.data import recipe_of, tokenizer_of, use_cores

SHARES = {"hundredth": 1 / 100, "tenth": 1 / 10, "third": 1 / 3}
MIB, GIB = 2**10, 2**20
"""In KiB, the unit of `ru_maxrss`."""


def peak() -> int:
    """Returns the peak memory of this process in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Peaks:
    """Takes the place of the progress display, and records the peak whenever a given share of the work is done."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def update(self, fraction: float | None, detail: str = "") -> None:
        """Records the peak for each share that has been reached."""
        for name, share in SHARES.items():
            if fraction is not None and fraction >= share:
                self.found.setdefault(name, peak())


def growth(corpus: Path) -> dict[str, float]:
    """Returns the peaks in GiB, the memory added per GB of text after the first third, and the speed."""
    from llmtrain.data.cache import Cache, cache_folder
    from llmtrain.data.progress import Progress
    from llmtrain.data.samples import pack_documents
    from llmtrain.data.tokenize import TokenizeOptions, token_store

    peaks = Peaks()

    class Noted(Progress):
        @contextmanager
        def task(self, name: str) -> Iterator[Any]:
            yield peaks

    data = recipe_of(corpus).data
    opened, tokenizer = tokenizer_of(corpus)
    reading = TokenizeOptions(tokenizer, data.special_tokens, eval_fraction=0.01)
    with tempfile.TemporaryDirectory(dir=cache_folder(data)) as name:
        folder = Path(name)
        started = time.perf_counter()
        store = token_store(opened, "source", reading, Cache(folder, Noted()))
        seconds = time.perf_counter() - started
        end = peak()
        (folder / "packed").mkdir()
        pack_documents(folder / "packed", store, 2048)
        gigabytes = corpus.stat().st_size / 1e9
        return {
            "gigabytes": gigabytes,
            "tokens_per_second": sum(len(stream) for stream in store.streams.values()) / seconds,
            **{f"{name}_gib": found / GIB for name, found in peaks.found.items()},
            "peak_gib": end / GIB,
            "packed_gib": peak() / GIB,
            "mib_per_gb": (end - peaks.found["third"]) / MIB / (gigabytes * (1 - SHARES["third"])),
        }


def main() -> None:
    """Measures the growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    use_cores(options.cores)
    print(json.dumps(growth(options.corpus)))


if __name__ == "__main__":
    main()
