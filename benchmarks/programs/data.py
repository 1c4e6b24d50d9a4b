"""Preparing data, each part for itself; prints one line of JSON.

python -m benchmarks.programs.data ours CORPUS --cores 2       our tokenizing, from the file to the token store
python -m benchmarks.programs.data batch|fast CORPUS --cores 2 `tokenizers` alone, on texts that are in memory
python -m benchmarks.programs.data pack CORPUS --length 2048   packing of what `ours` has made, and what is in it
python -m benchmarks.programs.data tokenizer CORPUS            the tokenizer that the others find
python -m benchmarks.programs.data seek CORPUS                 the batch at sample 10^9, the first that is asked for
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH = 1000
"""Texts at once, as in the examples of `tokenizers` and the default of `datasets.map`."""
VOCABULARY = 16384


def recipe_of(corpus: Path, length: int = 2048) -> Any:
    """Trains nothing here."""
    from llmtrain import (
        BatchConfig,
        DataConfig,
        ModelConfig,
        OptimConfig,
        Recipe,
        Source,
        TrainConfig,
        TrainedTokenizer,
    )

    return Recipe(
        name="data",
        model=ModelConfig(architecture="llama", config={"hidden_size": 64, "num_attention_heads": 4}),
        data=DataConfig(
            sources=(Source(str(corpus)),), tokenizer=TrainedTokenizer(vocab_size=VOCABULARY), sequence_length=length
        ),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=512, micro_batch_size=8),
        train=TrainConfig(max_steps=10),
    )


def tokenizer_of(corpus: Path) -> tuple[Any, Any]:
    """The corpus, and its tokenizer, which is made once."""
    from llmtrain.data.cache import Cache, cache_folder
    from llmtrain.data.corpus import open_corpora
    from llmtrain.data.progress import Progress
    from llmtrain.data.tokenizer import prepare_tokenizer

    recipe = recipe_of(corpus)
    cache = Cache(cache_folder(recipe.data), Progress())
    (opened,) = open_corpora(recipe.data.sources, cache)
    return opened, prepare_tokenizer(recipe.data, [opened], recipe.held_out_fraction, cache)


def ours(corpus: Path) -> dict[str, float]:
    """The file read, split, tokenized and written, anew each time."""
    from llmtrain.data.cache import Cache, cache_folder
    from llmtrain.data.progress import Progress
    from llmtrain.data.store import Reading, token_store

    data = recipe_of(corpus).data
    opened, tokenizer = tokenizer_of(corpus)
    reading = Reading(tokenizer, data.special_tokens, eval_fraction=0.01)
    with tempfile.TemporaryDirectory(dir=cache_folder(data)) as folder:
        clock = Clock()
        store = token_store(opened, "source", reading, Cache(Path(folder), Progress()))
        tokens = sum(len(stream) for stream in store.streams.values())
        return clock.speed(tokens)


def raw(corpus: Path, method: str) -> dict[str, float]:
    """`encode_batch` of texts that lie in memory; their ids are taken, and dropped."""
    from tokenizers import Tokenizer

    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    tokenizer = Tokenizer.from_file(str(tokenizer_of(corpus)[1].folder / "tokenizer.json"))
    encode = getattr(tokenizer, method)
    tokens = 0
    clock = Clock()
    for first in range(0, len(texts), BATCH):
        for encoding in encode(texts[first : first + BATCH], add_special_tokens=False):
            tokens += len(encoding.ids)
    return clock.speed(tokens)


def pack(corpus: Path, length: int) -> dict[str, float]:
    """The index of sequences, made anew."""
    import numpy as np

    from llmtrain.data import packing, prepare

    prepared = prepare(recipe_of(corpus, length))
    source = prepared.sources[0]
    folder = Path(tempfile.mkdtemp())
    started = time.perf_counter()
    meta = packing.pack(folder, source.store, length)
    seconds = time.perf_counter() - started
    placed = int(np.fromfile(folder / "train_targets.bin", np.uint32).sum(dtype=np.int64))
    starts = np.fromfile(folder / "train_starts.bin", np.uint64)
    lengths = np.fromfile(folder / "train_lengths.bin", np.uint32)
    shutil.rmtree(folder)
    bounds = source.store.streams["train"].documents.astype(np.int64)
    inputs = np.diff(bounds) - 1
    order = np.argsort(starts)
    whole = dict(zip(starts[order].tolist(), lengths[order].tolist(), strict=True))
    short = [
        (begin, size) for begin, size in zip(bounds[:-1].tolist(), inputs.tolist(), strict=True) if 0 < size <= length
    ]
    return {
        "seconds": seconds,
        "of_tokenizing": seconds / source.store.seconds,
        "fill": placed / (meta["train"]["sequences"] * length),
        "fill_possible": placed / (-(-placed // length) * length),
        "documents_split": sum(whole[begin] != size for begin, size in short),
        "documents": len(short),
        "sequences": meta["train"]["sequences"],
    }


def seek(corpus: Path) -> dict[str, float]:
    """A schedule that has given nothing yet is asked for a batch far away, and for the next one."""
    from llmtrain.data import Schedule, prepare

    prepared = prepare(recipe_of(corpus))
    import torch  # noqa: F401 - a worker has it by then

    times = []
    for cursor in (10**9, 10**12):
        schedule = Schedule(
            prepared,
            seed=1,
            global_batch_size=512,
            micro_batch_size=8,
            gradient_accumulation_steps=1,
            dp_rank=3,
            dp_size=64,
        )
        started = time.perf_counter()
        schedule.train_batch(cursor)
        times.append(time.perf_counter() - started)
    started = time.perf_counter()
    for step in range(20):
        schedule.train_batch(10**9 + 512 * step)
    next_s = (time.perf_counter() - started) / 20
    return {"seek_ms": times[0] * 1000, "seek_10_12_ms": times[1] * 1000, "batch_ms": next_s * 1000}


def use_cores(cores: int) -> None:
    """Leaves this process so many cores, and `tokenizers` as many threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    os.environ.update(RAYON_NUM_THREADS=str(cores), TOKENIZERS_PARALLELISM="true")


class Clock:
    """Wall time, and the time that all threads of this process computed, from now on."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def speed(self, tokens: int) -> dict[str, float]:
        """Of so many tokens until now."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {
            "tokens_per_second": tokens / wall,
            "tokens_per_cpu_second": tokens / cpu,
            "seconds": wall,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }


def main() -> None:
    """Measures one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ours", "batch", "fast", "pack", "tokenizer", "seek"))
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    use_cores(options.cores)
    corpus = options.corpus
    parts = {
        "ours": lambda: ours(corpus),
        "batch": lambda: raw(corpus, "encode_batch"),
        "fast": lambda: raw(corpus, "encode_batch_fast"),
        "pack": lambda: pack(corpus, options.length),
        "tokenizer": lambda: {"vocabulary": tokenizer_of(corpus)[1].vocab_size},
        "seek": lambda: seek(corpus),
    }
    print(json.dumps(parts[options.part]()))


if __name__ == "__main__":
    main()
