"""Times a new process's first request for a sample, in a corpus of more than 10⁹ sequences; prints one line of JSON.

python -m benchmarks.programs.seek make FOLDER              the corpus
python -m benchmarks.programs.seek read FOLDER              sample 10⁹, as tensors
python -m benchmarks.programs.seek read FOLDER --batch      this rank's part of the global batch that begins there
python -m benchmarks.programs.seek read FOLDER --cold       with nothing of the corpus in the page cache

The process first imports what a worker imports and opens the corpus. The measured time is that from its first request
to the tensors. The corpus has a packed index with three pieces per sequence and would take 4.4 TB. Its files are
therefore sparse: only what the sequences at 10⁹ need is written. The amount read from disk is reported with the time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.data.arrays import CHUNK_BYTES, HASHES, chunk_hashes

SEQUENCES = 2**30 + 1
LENGTH = 2048
PIECES = (1024, 700, 324)
SAMPLE = 10**9
BATCH, MICRO, RANKS, RANK = 512, 8, 64, 3


def opened(folder: Path, sequences: int) -> Any:
    """Returns the corpus of a folder in the form that `prepare` returns."""
    from llmtrain.data import Prepared, PreparedSource, TokenStore
    from llmtrain.data.cache import Entry
    from llmtrain.data.samples import packed_samples
    from llmtrain.data.tokenizer import PreparedTokenizer

    splits = {"train": {"tokens": sequences * LENGTH + 1, "documents": 1}, "eval": {"tokens": 0, "documents": 0}}
    store = TokenStore(Entry(folder, {"dtype": "uint16", "splits": splits}, made=False))
    pieces = {
        "train": {"sequences": sequences, "pieces": sequences * len(PIECES)},
        "eval": {"sequences": 0, "pieces": 0},
    }
    train, held_out = (
        packed_samples(folder, pieces, split, store.streams[split], LENGTH, mask=True, pad_id=0)
        for split in ("train", "eval")
    )
    source = PreparedSource("large", 1.0, "large", store, train, held_out, made=False, folders=(folder,))
    tokenizer = PreparedTokenizer(folder, "none", 2**16, eos_id=0, bos_id=None, made=False)
    return Prepared(tokenizer, (source,), (), LENGTH, made=False, seconds=0.0)


def schedule_of(folder: Path, sequences: int, batch: bool) -> Any:
    """Returns a schedule of single samples or, with `batch`, of the batches of one rank of many."""
    from llmtrain.data import BatchLoader

    sizes = (BATCH, MICRO, RANK, RANKS) if batch else (1, 1, 0, 1)
    return BatchLoader(
        opened(folder, sequences),
        seed=1,
        global_batch_size=sizes[0],
        micro_batch_size=sizes[1],
        gradient_accumulation_steps=1,
        dp_rank=sizes[2],
        dp_size=sizes[3],
    )


def make(folder: Path, sequences: int = SEQUENCES, sample: int = SAMPLE) -> dict[str, float]:
    """Writes the sequences of the batch at `sample`.

    Their pieces have the lengths `PIECES` and lie at random positions in the tokens.
    """
    folder.mkdir(parents=True)
    sizes = {
        "train_tokens": 2 * (sequences * LENGTH + 1),
        "train_documents": 16,
        "train_starts": 8 * len(PIECES) * sequences,
        "train_lengths": 4 * len(PIECES) * sequences,
        "train_offsets": 8 * (sequences + 1),
        "train_targets": 4 * sequences,
        **{f"eval_{name}": size for name, size in (("documents", 8), ("offsets", 8))},
        **{f"eval_{name}": 0 for name in ("tokens", "starts", "lengths", "targets")},
    }
    files = {name: os.open(folder / f"{name}.bin", os.O_RDWR | os.O_CREAT) for name in sizes}
    hashes = {name: os.open((folder / name).with_suffix(HASHES), os.O_RDWR | os.O_CREAT) for name in sizes}
    for name, size in sizes.items():
        os.truncate(files[name], size)
        os.truncate(hashes[name], 8 * -(-size // CHUNK_BYTES))
    written = {(name, 0) for name, size in sizes.items() if 0 < size <= CHUNK_BYTES}
    """(file, index of a chunk)."""

    def write(name: str, index: int, values: Any) -> None:
        first = index * values.itemsize
        os.pwrite(files[f"train_{name}"], values.tobytes(), first)
        chunks = range(first // CHUNK_BYTES, (first + values.nbytes - 1) // CHUNK_BYTES + 1)
        written.update((f"train_{name}", chunk) for chunk in chunks)

    random = np.random.default_rng(1)
    for number in schedule_of(folder, sequences, batch=True).sample_ids(sample, BATCH)[1].tolist():
        first = len(PIECES) * number
        starts = random.integers(0, sequences * LENGTH - max(PIECES), len(PIECES)).astype(np.uint64)
        write("targets", number, np.array([LENGTH], np.uint32))
        write("offsets", number, np.array([first, first + len(PIECES)], np.uint64))
        write("starts", first, starts)
        write("lengths", first, np.array(PIECES, np.uint32))
        for start, length in zip(starts.tolist(), PIECES, strict=True):
            write("tokens", start, random.integers(1, 2**16, length + 1, np.uint16))
    for name, chunk in sorted(written):
        content = os.pread(files[name], CHUNK_BYTES, chunk * CHUNK_BYTES)
        os.pwrite(hashes[name], chunk_hashes(content).tobytes(), 8 * chunk)
    for file in (*files.values(), *hashes.values()):
        os.fsync(file)
        os.close(file)
    return {"sequences": sequences}


def read(folder: Path, batch: bool, cold: bool, sequences: int = SEQUENCES, sample: int = SAMPLE) -> dict[str, float]:
    """Makes the first request of this process. Raises DataError if it reads data that were not written."""
    import torch  # noqa: F401 - a worker has imported it by then

    schedule = schedule_of(folder, sequences, batch)
    (forget if cold else load)(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    started, computed = time.perf_counter(), time.thread_time()
    found = schedule.train_batch(sample)
    seconds, computed = time.perf_counter() - started, time.thread_time() - computed
    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before
    (rows,) = found.micro_batches
    assert found.target_tokens == LENGTH * (BATCH if batch else 1)
    assert rows.input_ids.all()
    assert rows.labels.all()
    return {"seek_ms": seconds * 1000, "seek_cpu_ms": computed * 1000, "read_kib": blocks / 2}


def forget(folder: Path) -> None:
    """Removes the files of a folder, which are on disk, from the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def load(folder: Path) -> None:
    """Reads the written parts of a folder's files into the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        end = 0
        with suppress(OSError):  # raised at the end of the data
            while True:
                begin = os.lseek(file, end, os.SEEK_DATA)
                end = os.lseek(file, begin, os.SEEK_HOLE)
                os.pread(file, end - begin, begin)
        os.close(file)


def main() -> None:
    """Writes the corpus, or times one request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("make", "read"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", action="store_true")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    found = make(options.folder) if options.part == "make" else read(options.folder, options.batch, options.cold)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
