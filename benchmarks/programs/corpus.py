"""Writes a corpus of any size from the source text of the standard library: `corpus FILE.jsonl MEGABYTES`.

Documents are runs of lines from random files. Their lengths are distributed as on the web: log-normal with a mean of
3,000 characters. The same size always gives the same corpus.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
from pathlib import Path

import numpy as np

MEAN, SIGMA = 3000, 1.2
SHORTEST, LONGEST = 40, 200_000


def write(path: Path, size: int) -> None:
    """Writes about `size` bytes of documents."""
    text = "".join(
        file.read_text(encoding="utf-8", errors="ignore")
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    random = np.random.default_rng(1)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            lengths = random.lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, 1000).clip(SHORTEST, LONGEST).astype(int)
            starts = random.integers(0, len(text) - LONGEST, 1000)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                # Every document begins differently; otherwise the measurement would mainly show a cache of words.
                written += file.write(
                    json.dumps({"text": f"{random.integers(2**40):x} {text[start : start + length]}"}) + "\n"
                )
                if written >= size:
                    break


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(float(sys.argv[2]) * 1e6))
