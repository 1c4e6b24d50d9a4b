"""Measures each part of the data preparation separately; prints one line of JSON.

python -m benchmarks.programs.data ours CORPUS --cores 2       our tokenizing, from the file to the token store
python -m benchmarks.programs.data batch|fast CORPUS --cores 2 `tokenizers` alone, on texts in memory
python -m benchmarks.programs.data pack CORPUS --length 2048   packing of the output of `ours`, and its statistics
python -m benchmarks.programs.data tokenizer CORPUS            trains the tokenizer that the others use
python -m benchmarks.programs.data seek CORPUS                 the batch at sample 10^9, the first one requested
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
"""Number of texts per call, as in the examples of `tokenizers` and by default in `datasets.map`."""
VOCABULARY = 16384


def recipe_of(corpus: Path, length: int = 2048) -> Any:
    """Returns a recipe, which is only used to prepare data."""
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
    """Returns the corpus and its tokenizer, which is trained only once."""
    from llmtrain.data.cache import Cache, cache_folder
    from llmtrain.data.progress import Progress
    from llmtrain.data.sources.corpus import open_corpora
    from llmtrain.data.tokenizer import prepare_tokenizer

    recipe = recipe_of(corpus)
    cache = Cache(cache_folder(recipe.data), Progress())
    (opened,) = open_corpora(recipe.data.sources, cache)
    return opened, prepare_tokenizer(recipe.data, [opened], recipe.held_out_fraction, cache)


def ours(corpus: Path) -> dict[str, float]:
    """Reads, splits, tokenizes and writes the file; nothing is reused from an earlier run."""
    from llmtrain.data.cache import Cache, cache_folder
    from llmtrain.data.progress import Progress
    from llmtrain.data.tokenize import TokenizeOptions, token_store

    data = recipe_of(corpus).data
    opened, tokenizer = tokenizer_of(corpus)
    reading = TokenizeOptions(tokenizer, data.special_tokens, eval_fraction=0.01)
    with tempfile.TemporaryDirectory(dir=cache_folder(data)) as folder:
        clock = Clock()
        store = token_store(opened, "source", reading, Cache(Path(folder), Progress()))
        tokens = sum(len(stream) for stream in store.streams.values())
        return clock.speed(tokens)


def raw(corpus: Path, method: str) -> dict[str, float]:
    """Tokenizes texts in memory with `encode_batch` or a variant; token ids are extracted and discarded."""
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
    """Computes the index of sequences, without reusing an earlier one."""
    import numpy as np

    from llmtrain.data import prepare
    from llmtrain.data.samples import pack_documents

    prepared = prepare(recipe_of(corpus, length))
    source = prepared.sources[0]
    folder = Path(tempfile.mkdtemp())
    started = time.perf_counter()
    meta = pack_documents(folder, source.store, length)
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
    """Requests a distant batch and the batches after it from a schedule that has not returned any batch yet."""
    from llmtrain.data import BatchLoader, prepare

    prepared = prepare(recipe_of(corpus))
    import torch  # noqa: F401 - a worker has imported it by then

    times = []
    for cursor in (10**9, 10**12):
        schedule = BatchLoader(
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
    """Limits this process to this number of cores, and `tokenizers` to as many threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    os.environ.update(RAYON_NUM_THREADS=str(cores), TOKENIZERS_PARALLELISM="true")


class Clock:
    """Measures wall time and the CPU time of all threads of this process from its creation."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def speed(self, tokens: int) -> dict[str, float]:
        """Returns the speed for this number of tokens."""
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
