"""Checks on a tiny copy of a model that slices of a sequence compute what the whole sequence computes.

A model may mix tokens outside its attention. Parts of its layers that do so gather what they need; elsewhere (positions
that it counts itself, for example) its slices compute something else. No assumptions are made about a family: models
whose results differ are rejected.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data import MicroBatch
from llmtrain.engines.deepspeed.ring import Group
from llmtrain.engines.deepspeed.ulysses import Ulysses
from llmtrain.engines.optim import gradient_of
from llmtrain.engines.runtime.agree import gather
from llmtrain.engines.runtime.distributed import is_alone
from llmtrain.errors import FamilyError
from llmtrain.models import target_loss_sum
from llmtrain.models.classifier import decoder_of
from llmtrain.models.documents import document_masks
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.documents_check import build_kept_apart
from llmtrain.models.tiny.model import MODEL_ERRORS, TOLERANCE, packed_input, relative_deviation

GRADIENT_TOLERANCE = 1e-4
"""Largest deviation of a gradient, relative to the largest entry of its tensor; slices are summed in another order."""
ROUNDING = 2.0**-21
"""Largest deviation relative to the largest entry of all gradients: a sum of 32 tokens' terms, in another order and
rounded at random, deviates by √32 · 2^-24. A gradient whose terms cancel consists of rounding errors; examples are that
of a bias of keys, which moves all logits of a query alike, and that of the decay of a state."""
WAIT = timedelta(seconds=60)
"""Longest time that a rank waits for another rank whose model has failed."""


def check_sequence(config: PreTrainedConfig, attention: str, head_ranks: int = 2, ring: int = 1) -> None:
    """Compares a tiny copy of a model on two ranks with itself on one; called by every rank of the run.

    head_ranks, ring: how many ranks divide heads, and how many form a ring. Two ranks represent any number, because all
    boundaries between slices are treated alike; if there are both kinds, they do each. The check runs on the CPU,
    in fp32, without dropout, with packed documents, and leaves the random state unchanged. Raises FamilyError, on
    every rank, if logits, auxiliary loss or gradients differ.
    """
    if is_alone():
        return  # no other rank to compare with, and nothing is computed
    kinds = [is_ring for is_ring, ranks in ((False, head_ranks), (True, ring)) if ranks > 1]
    reason = ""
    if dist.get_rank() < 2:
        with torch.random.fork_rng(devices=[]):
            reasons = (_try_tiny_copy(config, attention, _pair(), is_ring) for is_ring in kinds)
            reason = next(filter(None, reasons), "")
    if reason := describe(gather(reason)):
        refused = f"sequences of {config.model_type} cannot be cut into slices"
        raise FamilyError("sequence.family", "parallel.sequence", 1, refused, reason)


def describe(reasons: Sequence[str]) -> str:
    """Returns the reason of the last rank that has one, because the first slice has all tokens that it depends on."""
    return next(filter(None, reversed(reasons)), "")


@cache
def _pair() -> Group:
    """Returns the group of ranks 0 and 1, which call this, over gloo, because tiny copies are compared on the CPU.

    Only its members make it. If all ranks did, the others would take part in a split of NCCL's communicator, as for an
    NCCL group, and wait for the members, which do not take part (pytorch/pytorch#145376).
    """
    return dist.new_group([0, 1], timeout=WAIT, backend="gloo", use_local_synchronization=True)


def _try_tiny_copy(config: PreTrainedConfig, attention: str, group: Group, is_ring: bool) -> str:
    try:
        tiny = shrink_configuration(config)
    except (*MODEL_ERRORS, StrictDataclassError) as error:
        return f"no tiny copy can be made to compare with ({error})"
    attention = attention if attention in ("eager", "sdpa") else _with_masks(tiny)
    return compare_sliced_sequences(tiny, attention, group, is_ring=is_ring)


def _with_masks(config: PreTrainedConfig) -> str:
    """Returns the attention that stands for a kernel of documents: `sdpa`, or `eager` if the family does not have it.

    gpt-oss is such a family.
    """
    try:
        with torch.device("meta"):
            decoder_of(config, attn_implementation="sdpa")
    except (ValueError, ImportError):
        return "eager"
    return "sdpa"


def compare_sliced_sequences(
    config: PreTrainedConfig, attention: str, group: Group, batch: MicroBatch | None = None, is_ring: bool = False
) -> str:
    """Returns why the model of `config` differs if the ranks of `group` share its sequences; empty if it does not.

    batch: each tensor [batch, T]; by default two sequences of 16 tokens and three documents. is_ring: whether they
    form a ring instead of dividing heads. Uses torch's generator.
    """
    try:
        whole = build_kept_apart(config, attention).train()
        if batch is None:
            tokens, positions = packed_input(config)
            batch = MicroBatch(tokens, positions, labels=tokens.roll(-1, dims=1))
        split = copy.deepcopy(whole)
        with document_masks(batch):
            expected = _forward(whole, batch)
        _loss(expected, batch).backward()  # type: ignore[no-untyped-call]
    except MODEL_ERRORS as error:
        return f"its tiny copy does not run ({type(error).__name__}: {error})"
    try:
        with document_masks(batch):
            ulysses = Ulysses(split, group, ring=group if is_ring else None)
            return _deviation(split, whole, expected, batch, ulysses)
    except MODEL_ERRORS as error:
        # Any error that a family's forward raises for a slice is a reason to reject the family.
        return f"its forward pass fails on a slice ({type(error).__name__}: {error})"


def _deviation(
    split: PreTrainedModel, whole: PreTrainedModel, expected: tuple[Tensor, ...], batch: MicroBatch, ulysses: Ulysses
) -> str:
    with ulysses.active():
        batch_slice = ulysses.slice(batch)
        result = _forward(split, batch_slice)
        # Each rank has the whole auxiliary loss, and contributes its share.
        _loss((result[0], *(loss / ulysses.size for loss in result[1:])), batch_slice, batch).backward()  # type: ignore[no-untyped-call]
    wrong = _wrong_gradients(split, whole, ulysses.group)  # first, because every rank has to take part
    if relative_deviation(result[0], ulysses.part(expected[0])) > TOLERANCE:
        return "the logits of a slice deviate from those of the whole sequence"
    if any(relative_deviation(*losses) > TOLERANCE for losses in zip(result[1:], expected[1:], strict=True)):
        return "the auxiliary loss of slices deviates from that of the whole sequence"
    return f"gradients of {len(wrong)} parameters deviate, {wrong[0]} among them" if wrong else ""


def _wrong_gradients(split: PreTrainedModel, whole: PreTrainedModel, group: Group) -> list[str]:
    """Returns the parameters whose gradients, summed over the slices, differ from those of the whole sequence."""
    models = (split, whole)
    of_slices, of_whole = ({name: gradient_of(weight) for name, weight in model.named_parameters()} for model in models)
    flat = torch.cat([gradient.flatten() for gradient in of_slices.values()])
    dist.all_reduce(flat, group=group)
    least = ROUNDING / GRADIENT_TOLERANCE * max(float(gradient.abs().max()) for gradient in of_whole.values())
    summed = torch.split_with_sizes(flat, [gradient.numel() for gradient in of_slices.values()])
    return [
        name
        for gradient, (name, expected) in zip(summed, of_whole.items(), strict=True)
        if relative_deviation(gradient.view_as(expected), expected, least) > GRADIENT_TOLERANCE
    ]


def _forward(model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, ...]:
    """Returns the logits, and the auxiliary loss of the routers if there is one."""
    output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    auxiliary = getattr(output, "aux_loss", None)
    return (output.logits,) if auxiliary is None else (output.logits, auxiliary)


def _loss(result: tuple[Tensor, ...], batch: MicroBatch, whole: MicroBatch | None = None) -> Tensor:
    logits, *auxiliary = result
    return sum(auxiliary, target_loss_sum(logits, batch.labels) / (whole or batch).labels.numel())
