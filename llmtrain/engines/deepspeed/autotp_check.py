"""Checks on a tiny copy that a family computes the same if AutoTP splits it.

AutoTP splits what a family's `tp_plan` names, or else what its modules' names suggest, and does not check whether the
result is the same. Therefore every family is compared: its logits, one step's gradients, and the weights when joined
again. A family whose results differ is rejected.
"""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.engines.deepspeed.autotp_split import gather_whole, split_of
from llmtrain.engines.optim import gradient_of
from llmtrain.errors import FamilyError
from llmtrain.models.tiny.configuration import SIZES, shrink_configuration
from llmtrain.models.tiny.model import MODEL_ERRORS, build_tiny_model, packed_input, relative_deviation
from llmtrain.overrides.deepspeed import skip_input_check, tensor_group

TOLERANCE = 1e-4
"""Largest deviation of a logit or a gradient, relative to the largest entry of its tensor.

A row-parallel product adds its parts in another order, which changes an fp32 result by about 1e-6; a wrongly split
layer is off by about 1.
"""
NOISE = 1e-2
"""Gradients below this fraction of the model's largest one are compared relative to that fraction. The true gradient of
some weights, such as a bias of attention's keys, is zero, and the computed one consists of rounding errors.
"""
_SHARED = (
    *("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "num_query_groups"),
)
"""Numbers that must be divisible among the ranks of a group."""


def cannot_split(config: PreTrainedConfig, reason: str) -> FamilyError:
    """Returns the refusal of a family that AutoTP does not split correctly."""
    refused = f"{config.model_type} cannot be trained tensor parallel"
    return FamilyError("tensor.family", "parallel.tensor", 1, refused, reason)


def check_autotp(config: PreTrainedConfig, block: dict[str, Any], attention: str, device: torch.device) -> None:
    """Compares a tiny copy of the model of `config`, split over this rank's tensor parallel group, with a whole one.

    block: `tensor_parallel` of the DeepSpeed configuration. Called by all ranks, after their groups were made. Leaves
    the random state unchanged. Raises FamilyError, on every rank, if the copies differ or the split fails.
    """
    degree = dist.get_world_size(tensor_group())
    try:
        values = config.to_dict()
        # The sizes of a tiny copy are divisible by two.
        heads = {name: SIZES[name] * max(degree // 2, 1) for name in _SHARED if values.get(name)}
        tiny = shrink_configuration(config, **heads)
    except (*MODEL_ERRORS, StrictDataclassError) as error:
        raise cannot_split(config, f"no tiny copy can be made to compare with ({_short(error)})") from error
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            whole = build_tiny_model(tiny, attention if attention in ("eager", "sdpa") else "eager").eval().to(device)
            inputs = tuple(value.to(device) for value in packed_input(tiny))
            parts = _split(copy.deepcopy(whole), block)
            expected, logits = (_forward_and_backward(model, inputs) for model in (whole, parts))
            reason = _agree(_first_difference(whole, parts, expected, logits))
    except MODEL_ERRORS as error:
        raise cannot_split(config, f"AutoTP, or the model that it produces, fails ({_short(error)})") from error
    if reason:
        raise cannot_split(config, reason)


def _split(model: PreTrainedModel, block: dict[str, Any]) -> PreTrainedModel:
    """Lets DeepSpeed split a model, in place, exactly as it will split the trained one."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
        "tensor_parallel": dict(block),
    }
    skip_input_check(deepspeed.initialize(model=model, config=config)[0])
    return model


def _forward_and_backward(model: PreTrainedModel, inputs: tuple[Tensor, ...]) -> Tensor:
    """Returns the logits; leaves the gradients of a loss in the model."""
    logits: Tensor = model(input_ids=inputs[0], position_ids=inputs[1], use_cache=False).logits
    targets = torch.arange(logits[..., 0].numel(), device=logits.device) % logits.shape[-1]
    torch.autograd.backward(nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets))
    return logits.detach()


def _first_difference(whole: PreTrainedModel, parts: PreTrainedModel, expected: Tensor, logits: Tensor) -> str:
    """Returns what differs on this rank; empty if nothing does."""
    cut = dict(parts.named_parameters())
    if cut.keys() != dict(whole.named_parameters()).keys():
        return "AutoTP renames its weights"
    if not _cuts_layers(parts):
        return "AutoTP finds nothing in its layers to cut"
    differences = (
        ["its logits differ from the whole model's"] if relative_deviation(logits, expected) > TOLERANCE else []
    )
    least = NOISE * max(float(gradient_of(parameter).abs().max()) for parameter in whole.parameters())
    for name, parameter in whole.named_parameters():
        part = cut[name]
        split = split_of(part)
        # Every rank has to gather every weight, even after it has found a difference.
        gradient = gather_whole(gradient_of(part), split, tensor_group())
        if not torch.equal(gather_whole(part.detach(), split, tensor_group()), parameter):
            differences.append(f"{name} cannot be gathered")
        if relative_deviation(gradient, gradient_of(parameter), least) > TOLERANCE:
            differences.append(f"the gradient of {name} differs from the whole model's")
    return differences[0] if differences else ""


def _cuts_layers(model: PreTrainedModel) -> bool:
    """Returns whether any weight between embedding and head is split among ranks."""
    ends = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    layers = (weight for weight in model.parameters() if not any(weight is end for end in ends))
    return any(map(split_of, layers))


def _agree(reason: str) -> str:
    """Returns the first reason of any rank of the group, on all of them."""
    reasons = [""] * dist.get_world_size(tensor_group())
    dist.all_gather_object(reasons, reason, group=tensor_group())
    return next(filter(None, reasons), "")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.split('. ')[0][:160]}"
