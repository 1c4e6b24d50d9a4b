"""Rules for the three batch sizes: train = micro × accumulation × data parallel ranks."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator

from llmtrain_lint.document import LARGEST_NUMBER, Configuration, Effect
from llmtrain_lint.rules.rule import Fault, error, warning

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_KEYS = (TRAIN, MICRO, STEPS)


def _sizes(document: Configuration) -> tuple[int | None, int | None, int | None]:
    return document.count(TRAIN), document.count(MICRO), document.count(STEPS)


@error("batch_value", "refuses", "A batch size that is not a positive integer.")
def batch_value(document: Configuration) -> Iterator[Fault]:
    """Reports batch sizes that are not positive integers."""
    for key in _KEYS:
        value = document.at(key)
        if value is not None and value != "auto" and not (type(value) is int and 0 < value < LARGEST_NUMBER):
            effect: Effect = "misreads" if value is True else "refuses"  # as 1
            yield (key,), f"{reprlib.repr(value)} is not a positive integer", "a positive integer", effect


@error("batch_missing", "refuses", "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu.")
def batch_missing(document: Configuration) -> Iterator[Fault]:
    """Reports a missing batch size."""
    if document.at(TRAIN) is None and document.at(MICRO) is None and document.reader != "lightning":
        yield (TRAIN,), f"it is missing, and so is {MICRO}", f"set {MICRO}"


@error(
    "batch_triangle",
    "refuses",
    "train = micro × accumulation × data parallel ranks, which DeepSpeed asserts after the launch.",
)
def batch_triangle(document: Configuration) -> Iterator[Fault]:
    """Checks the equation, as far as it is determined with or without a world size."""
    total, micro, steps = _sizes(document)
    if total is None or document.tensor_parallel > 1:
        return
    ranks = _data_ranks(document)
    per_step = (micro or 1) * (steps or 1) * (ranks or 1)
    complete = bool(micro and steps and ranks)
    if total != per_step if complete else total % per_step:
        known = f"{micro or 'micro'} × {steps or 'accumulation'} × {ranks or 'data parallel'} data parallel ranks"
        fix = str(per_step) if complete else f"a multiple of {per_step}"
        yield (TRAIN,), f"{total} ≠ {known.replace('data parallel data', 'data')}", fix


def _data_ranks(document: Configuration) -> int | None:
    """Returns the number of ranks with samples of their own, or None if it is unknown."""
    if document.data_parallel:
        return document.data_parallel
    alone = document.count("data_parallel_size") is None and not document.since("0.17.0")
    shared = 1 if alone else document.count("sequence_parallel_size") or 1
    world = document.world_size
    return world // shared if world and world % shared == 0 else None


@error(
    "batch_tensor",
    "misreads",
    "DeepSpeed counts tensor parallel ranks as data parallel, so train_batch_size is not the real batch size.",
)
def batch_tensor(document: Configuration) -> Iterator[Fault]:
    """Reports train_batch_size under AutoTP (DeepSpeed issue 7298)."""
    tensor = document.tensor_parallel
    if tensor == 1 or document.at(TRAIN) in (None, "auto"):
        return
    _, micro, steps = _sizes(document)
    message = f"it counts the {tensor} tensor parallel ranks as data parallel, and requires {tensor} times the batch"
    if micro and steps and document.world_size and document.world_size % tensor == 0:
        message += f", which is {micro} × {steps} × {document.world_size // tensor} = "
        message += str(micro * steps * document.world_size // tensor)
    yield (TRAIN,), message, f"remove it, and set {MICRO} and {STEPS}"


_DEGREES = (
    (("sequence_parallel_size",), "sequence parallel"),
    (("data_parallel_size",), "data parallel"),
    (("tensor_parallel", "autotp_size"), "tensor parallel"),
    (("expert_parallel", "autoep_size"), "expert parallel"),
    (("zero_optimization", "zero_hpz_partition_size"), "hpZ"),
)


@error("world_divides", "refuses", "A degree of parallelism that does not divide the number of ranks.")
def world_divides(document: Configuration) -> Iterator[Fault]:
    """Checks the degrees against the world size."""
    world = document.world_size
    for where, name in _DEGREES if world else ():
        degree = document.count(*where)
        if degree and world and world % degree:
            yield where, f"{degree} {name} ranks do not divide {world}", ""


@error("mesh", "refuses", "data_parallel_size × sequence_parallel_size must be the number of ranks.")
def mesh(document: Configuration) -> Iterator[Fault]:
    """Checks the mesh of data and sequence parallelism."""
    data, sequence = document.count("data_parallel_size"), document.count("sequence_parallel_size")
    world = document.world_size
    if sequence and not data and not document.since("0.17.0"):
        message = "before DeepSpeed 0.17.0, it is only read together with data_parallel_size"
        yield ("sequence_parallel_size",), message, "remove it, or set data_parallel_size", "ignores"
    elif data and not sequence:
        message = "it is only read together with sequence_parallel_size"
        yield ("data_parallel_size",), message, "remove it, or set sequence_parallel_size", "ignores"
    elif data and sequence and world and data * sequence != world:
        yield ("data_parallel_size",), f"{data} × {sequence} sequence parallel ranks ≠ {world}", ""


@warning(
    "sequence_path",
    "ignores",
    "sequence_parallel_size is read from a configuration object, but not from a file whose path is given to DeepSpeed.",
)
def sequence_path(document: Configuration) -> Iterator[Fault]:
    """Warns about sequence_parallel_size in a file."""
    if (document.count("sequence_parallel_size") or 1) > 1:
        message = "if the path of this file is given to deepspeed.initialize, it is not read"
        yield ("sequence_parallel_size",), message, "load the file, and pass the object"
