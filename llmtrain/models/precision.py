"""Number formats: the torch types of a precision, and matrix products of the decoder layers in fp8 by torchao.

In fp8, weights keep their names, types and identities: each product rounds its operands again, with one scale per
tensor or per row (arXiv 2209.05433). The head and all modules that are not linear layers are unchanged.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from llmtrain.errors import Problem, RecipeError
from llmtrain.models.adapter_files import is_adapter
from llmtrain.models.stages import decoder_layers
from llmtrain.plan.draft import COMPUTE_DTYPE, WEIGHT_DTYPE
from llmtrain.recipe import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def weight_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype of the weights that the forward pass reads."""
    return DTYPES[WEIGHT_DTYPE[precision]]


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """Returns the context for the forward pass: autocast if it computes in a lower type than that of its weights."""
    computed = DTYPES[COMPUTE_DTYPE[precision]]
    if computed == weight_dtype(precision):
        return nullcontext()
    return torch.autocast(device_type, computed)


INSTALL = "pip install llmtrain[fp8]"
MIN_CAPABILITY = (8, 9)
"""Compute capability of NVIDIA's first GPUs with fp8 products (Ada; Hopper is 9.0)."""
SIDE = 16
"""The dimensions of a weight must be multiples of this number (`torch._scaled_mm`)."""


def fp8_unavailable(device: torch.device) -> str:
    """Returns why a device cannot compute products in fp8; empty if it can."""
    if find_spec("torchao") is None:
        return f"it needs torchao ({INSTALL})"
    if device.type != "cuda":
        return f"products in fp8 need a GPU, and this is a {device.type}"
    if torch.version.hip is not None:
        return "torchao's conversion has only been checked for NVIDIA's fp8"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        least = _version(MIN_CAPABILITY)
        return f"products in fp8 need compute capability {least}, and this GPU has {_version(capability)}"
    return ""


def check_fp8(kind: str, device: torch.device) -> None:
    """Raises RecipeError if the device cannot compute products in fp8."""
    if why := fp8_unavailable(device):
        raise _refused(kind, why)


def use_fp8(model: PreTrainedModel, kind: str) -> None:
    """Makes the linear layers of a model's decoder, or of one stage of it, multiply in fp8.

    kind: `tensorwise` or `rowwise`, torchao's names for one scale per tensor or per row. Raises RecipeError if no
    linear layer has suitable dimensions.
    """
    layers = decoder_layers(model)[1]
    if not any(_fits(module) for module in layers.modules()):
        raise _refused(
            kind, f"no linear layer of this {model.config.model_type} has dimensions that are multiples of {SIDE}"
        )
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(layers, config=_config(kind), module_filter_fn=_is_converted)


def refuse_slower(kind: str, bf16: float, fp8: float) -> None:
    """Raises RecipeError if the same passes take longer in fp8 than in bf16. Both times are in seconds."""
    if fp8 > bf16:
        times = f"{1000 * fp8:.4g} ms in fp8, but only {1000 * bf16:.4g} ms in bf16"
        raise _refused(kind, f"on this device, a micro-batch through some layers takes {times}")


def _refused(kind: str, why: str) -> RecipeError:
    message = f"'{kind}' cannot be used: {why}"
    return RecipeError(Problem("kernels.fp8", "kernels.fp8", message, "--set kernels.fp8=off"))


def _is_converted(module: nn.Module, name: str) -> bool:
    # An adapter's matrices are so narrow that scaling costs more than the product in fp8 saves.
    return _fits(module) and not is_adapter(name)


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.in_features % SIDE == module.out_features % SIDE == 0


def _config(kind: str) -> Any:
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig.from_recipe_name(kind)


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
