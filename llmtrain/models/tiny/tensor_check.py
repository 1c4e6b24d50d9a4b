"""Verifies on a tiny copy that a family split by its plan computes the same logits and gradients.

The ranks are threads of one process, so the check needs no process group and runs anywhere.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.errors import FamilyError
from llmtrain.models.hub_names import empty_model
from llmtrain.models.own import OwnConfig
from llmtrain.models.tensor.split import DeclaredSplit, Part, TensorParallel, no_split, plan_split
from llmtrain.models.tiny.compare import SUM_TOLERANCE, Outcome, deviation, logits_outcome
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import COPY_ERRORS, MODEL_ERRORS, build_tiny_model, packed_input

RANKS = 2
"""Ranks of the tiny copy. Whether sums over ranks are correct does not depend on their number."""
VOCABULARY = 100
"""A multiple of the number of ranks, so that the head is split."""
_TIMEOUT_S = 60.0


class ThreadCommunicator:
    """A `Communicator` of threads of this process."""

    def __init__(self, rank: int, places: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(places)
        self._places = places
        self._barrier = barrier

    @classmethod
    def alone(cls) -> Self:
        """Returns a group of one thread."""
        return cls(0, [None], threading.Barrier(1))

    def all_reduce(self, value: Tensor) -> Tensor:
        """Returns the sum in the order of the ranks."""
        return torch.stack(self.all_gather(value)).sum(0)

    def reduce_scatter(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the sum in the order of the ranks."""
        return self.all_reduce(torch.stack(tuple(values)))[self.rank]

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """Stores this thread's value, waits for the others and returns all values."""
        self._places[self.rank] = value.detach()
        self._barrier.wait()
        values = [place for place in self._places if place is not None]
        self._barrier.wait()  # no thread stores its next value before all have read these
        return values

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Reads this thread's part of the rows of all threads."""
        lengths = [counts.tolist() for counts in self.all_gather(torch.tensor(sent))]
        parts = [torch.split(whole, own) for whole, own in zip(self.all_gather(rows), lengths, strict=True)]
        return torch.cat([part[self.rank] for part in parts])


def check_tensor_split(
    config: PreTrainedConfig, degree: int, attention: str = "eager", sequence_parallel: bool = False
) -> DeclaredSplit:
    """Returns how `degree` ranks split the model of `config`, after comparing a tiny split model with a whole one.

    Runs on the CPU, in fp32, without dropout. The random state is preserved. sequence_parallel: whether the ranks shard
    the residual stream, unless this gives other results. Raises FamilyError with the reason if logits or gradients
    differ, or if the family declares no plan.
    """
    model, tiny, attention = with_tiny_copy(config, attention, no_split)
    with torch.random.fork_rng(devices=[]):
        if sequence_parallel and supports_sequence_parallel(tiny, attention):
            return replace(plan_split(model, degree), sequence_parallel=True)
        return plan_split(model, degree, whole_part(tiny, attention))


def with_tiny_copy(
    config: PreTrainedConfig, attention: str, refusal: Callable[[PreTrainedConfig, str], FamilyError]
) -> tuple[PreTrainedModel, PreTrainedConfig, str]:
    """Returns the model of `config` without memory, the configuration of its tiny copy, and attention for the CPU.

    refusal: makes the error to raise, given the reason, if no copy can be made.
    """
    try:
        model = empty_model(config, torch.float32)
        tiny = shrink_configuration(config, vocab_size=VOCABULARY)
    except COPY_ERRORS as error:
        raise refusal(config, f"no tiny copy can be made to compare with ({error})") from error
    return model, tiny, attention if attention in ("eager", "sdpa") else "eager"


def supports_sequence_parallel(config: PreTrainedConfig, attention: str = "eager") -> bool:
    """Whether the model of `config` computes the same with sequence parallelism between two ranks."""
    try:
        compare_tensor_split(config, attention, sequence_parallel=True)
    except FamilyError:
        return False
    return True


def whole_part(config: PreTrainedConfig, attention: str = "eager") -> Part:
    """Returns the part of the layers that has to stay whole for the model of `config` to compute the same.

    Some attention cannot be split by heads, and some feed-forwards not by their inner width. Raises FamilyError if the
    other part cannot be split either, and for a plan of the user's own (`model.tp_plan`), of which nothing is dropped.
    """
    try:
        compare_tensor_split(config, attention)
        return ""
    except FamilyError as error:
        refusal = error
    if isinstance(config, OwnConfig):
        raise refusal
    parts: tuple[Part, Part] = ("attention", "feed-forward")
    for part in parts:
        try:
            compare_tensor_split(config, attention, whole=part)
        except FamilyError:
            continue
        return part
    raise refusal


def compare_tensor_split(
    config: PreTrainedConfig, attention: str = "eager", sequence_parallel: bool = False, whole: Part = ""
) -> DeclaredSplit:
    """Splits the model of `config` itself between two ranks and returns how. Raises FamilyError if results differ.

    whole: the part of each layer that is left unsplit.
    """
    try:
        model = build_tiny_model(config, attention)
        expected = outcome_of(model)
    except MODEL_ERRORS as error:
        raise no_split(config, f"its tiny copy does not run ({type(error).__name__}: {error})") from error
    split = replace(plan_split(model, RANKS, whole), sequence_parallel=sequence_parallel)
    try:
        outcomes = _run_split(model, split)
    except MODEL_ERRORS as error:
        # Whatever makes the family's forward fail with a part of its heads is the reason to reject the family.
        raise no_split(config, f"its forward pass fails when split ({type(error).__name__}: {error})") from error
    for rank, outcome in enumerate(outcomes):
        shards = {
            name: split.shards[name].part(gradient, rank, RANKS) if name in split.shards else gradient
            for name, gradient in expected.gradients.items()
            if gradient is not None
        }
        difference = deviation(outcome, Outcome(expected.output, shards))
        if difference.output > SUM_TOLERANCE:
            raise no_split(config, f"its logits deviate from the whole model's by {difference.output:.0e}")
        if difference.gradient > SUM_TOLERANCE:
            reason = f"its gradients deviate from the whole model's by {difference.gradient:.0e} {difference.parameter}"
            raise no_split(config, reason)
    return split


def _run_split(whole: PreTrainedModel, split: DeclaredSplit) -> list[Outcome]:
    def shard(group: ThreadCommunicator) -> PreTrainedModel:
        model = copy.deepcopy(whole)
        tensor_parallel = TensorParallel(split, group)
        for name, parameter in model.named_parameters():
            tensor_parallel.shard(name, parameter)
        tensor_parallel.install(model, {name: name for name, _ in model.named_parameters()})
        return model

    return run_in_threads(shard)


def run_in_threads(build: Callable[[ThreadCommunicator], PreTrainedModel]) -> list[Outcome]:
    """Returns what each rank of a group computes; each is a thread, and builds its part of a model first."""
    places: list[Tensor | None] = [None] * RANKS
    barrier = threading.Barrier(RANKS, timeout=_TIMEOUT_S)
    models = [build(ThreadCommunicator(rank, places, barrier)) for rank in range(RANKS)]

    def run(model: PreTrainedModel) -> Outcome:
        try:
            return outcome_of(model)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        tasks = [pool.submit(run, model) for model in models]
    # A rank that waited for a failed one reports only a broken barrier, so other errors are raised first.
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [task.result() for task in tasks]


def outcome_of(model: PreTrainedModel) -> Outcome:
    """Returns what a tiny model computes for packed documents."""
    tokens, positions = packed_input(model.config)
    output = model(input_ids=tokens, position_ids=positions, use_cache=False)
    return logits_outcome(model, output.logits, getattr(output, "aux_loss", None), zeros=True)
