"""Verifies on a tiny copy of a model that attention by document boundaries gives the family's own results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmtrain.data import Documents
from llmtrain.errors import FamilyError
from llmtrain.models.documents import Rows, documents_as_rows
from llmtrain.models.tiny.compare import Outcome, deviation, logits_outcome
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.documents_check import build_kept_apart
from llmtrain.models.tiny.model import COPY_ERRORS, TOLERANCE, packed_input
from llmtrain.models.varlen import VARLEN, pass_boundaries, takes_cu_seq_lens
from llmtrain.overrides.transformers import attention_of

GRADIENT_TOLERANCE = 1e-4
"""Largest allowed deviation of a gradient in fp32, relative to the largest of all. As in the comparison of sequence
slices, the same terms are summed in a different order."""
PROBE = "llmtrain_probe"
_NOISE = ("dropout", "pdrop")


def wrong_attention(config: PreTrainedConfig, attention: str, reason: str) -> FamilyError:
    """Returns the refusal of a family whose attention is not what the kernel computes."""
    refused = f"'{attention}' is not supported for {config.model_type}"
    return FamilyError("model.attention", "model.attention", "auto", refused, reason)


def check_attention(config: PreTrainedConfig, attention: str) -> None:
    """Checks on a tiny copy of a model, on the CPU, that its attention separates documents by their boundaries.

    For `varlen`, logits and gradients are compared. A flash kernel is not available on every machine and is trusted to
    compute what its authors say; the check is that the boundaries reach it. The random state is preserved. Raises
    FamilyError if the check fails.
    """
    if not takes_cu_seq_lens(attention):
        return
    try:
        with torch.random.fork_rng(devices=[]):
            reason = _try_tiny_copy(config, attention)
    except COPY_ERRORS as error:
        raise wrong_attention(config, attention, _describe(error)) from error
    if reason:
        raise wrong_attention(config, attention, reason)


def _try_tiny_copy(config: PreTrainedConfig, attention: str) -> str:
    for layers in (LAYERS, None):  # the layers with attention may come after the first ones
        tiny = shrink_configuration(config, layers)
        if calls := bounds_reach(tiny):
            break
    if not calls:
        return "its attention is not called through the table of transformers, so documents would not be separated"
    if not all(calls):
        return "the document boundaries do not reach its attention"
    if attention != VARLEN:
        return ""
    noise = {name: value for name, value in config.to_dict().items() if any(word in name for word in _NOISE)}
    model = _model(shrink_configuration(config, layers, **noise), VARLEN)
    with torch.no_grad():
        _run(model.train(), packed(model.config))  # in training mode, so that attention dropout is detected
    return varlen_deviation(tiny)


def bounds_reach(config: PreTrainedConfig) -> list[bool]:
    """Returns, for each attention call in a forward pass, whether it received the boundaries.

    The model is that of `config` itself.
    """
    calls = _probe()
    with torch.no_grad():
        model = _model(config, PROBE)
        pass_boundaries(model)
        _run(model, packed(model.config))
    return calls


def _probe() -> list[bool]:
    """Registers an attention function that computes nothing and records whether it received boundaries.

    It stays registered, since `transformers` has no public way to remove a function from all tables of its families.
    """
    calls: list[bool] = []

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
    ) -> tuple[Tensor, None]:
        calls.append(all(named.get(name) is not None for name in Documents.NAMES))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS.register(PROBE, probe)
    return calls


def varlen_deviation(config: PreTrainedConfig) -> str:
    """Returns how `varlen` deviates from `eager` on the model of `config` itself; empty if it does not.

    The result may agree with `eager` on packed documents or on each document alone: in some families, masks that are
    not computed from positions let packed documents attend to each other.
    """
    actual = _outcome(_model(config, VARLEN), _packed_logits)
    reason = ""
    for logits_of in (_packed_logits, _logits_alone):
        difference = _difference(actual, _outcome(_model(config, "eager"), logits_of))
        if not difference:
            return ""
        reason = reason or difference
    return reason


def packed(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the arguments of a forward pass: two sequences, with one and two documents, and their boundaries."""
    tokens, positions = packed_input(config)
    bounds = Documents.of(positions).arguments(tokens.device)
    return {"input_ids": tokens, "position_ids": positions, "use_cache": False, **bounds}


def _model(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Builds a model with its own copy of the configuration, in which `transformers` stores the attention.

    All models have the same weights.
    """
    return build_kept_apart(copy.deepcopy(config), attention).eval()


def _packed_logits(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    if attention_of(model) != VARLEN:
        inputs = {name: value for name, value in inputs.items() if name not in Documents.NAMES}
    logits: Tensor = _run(model, inputs).logits
    return logits.flatten(0, 1)


def _run(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    """Runs a model on packed documents, of which its parts know that compute each on its own."""
    with documents_as_rows(Rows(inputs["position_ids"])):
        return model(**inputs)


def _logits_alone(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    tokens, positions = (inputs[name].flatten() for name in ("input_ids", "position_ids"))
    documents = (slice(*bounds) for bounds in pairwise(inputs["cu_seq_lens_q"].tolist()))
    parts = [
        model(tokens[None, document], position_ids=positions[None, document], use_cache=False).logits
        for document in documents
    ]
    return torch.cat(parts, dim=1)[0]


def _outcome(model: PreTrainedModel, logits_of: Callable[[PreTrainedModel, dict[str, Any]], Tensor]) -> Outcome:
    return logits_outcome(model, logits_of(model, packed(model.config)), None, zeros=True)


def _difference(actual: Outcome, expected: Outcome) -> str:
    difference = deviation(actual, expected)
    if difference.output > TOLERANCE:
        return f"logits deviate from those of 'eager' by {difference.output:.0e}"
    if difference.gradient > GRADIENT_TOLERANCE:
        return f"the gradient of {difference.parameter} deviates from that of 'eager' by {difference.gradient:.0e}"
    return ""


def _describe(error: Exception) -> str:
    """Returns an attention function's reason for rejecting the model, or the error of the model's own code."""
    text = " ".join(str(error).split())[:200]
    if "'NoneType' object" in text:
        return f"its own code reads the mask, which is not made ({type(error).__name__}: {text})"
    if isinstance(error, KeyError) and PROBE in text:
        return "it computes attention itself"
    return text if text.startswith("it ") else f"its tiny copy fails, {type(error).__name__}: {text}"
