"""Whether a layer is faster in fp8 than in bf16, on this device and at this run's shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.models.fp8 import refused, use_fp8
from llmtrain.models.one_layer import Timer, one_layer, seconds_of_layer
from llmtrain.recipe import Recipe

Prepare = Callable[[PreTrainedModel], None]
"""Puts the other kernels of a run into a model."""


def layer_times(
    config: PreTrainedConfig,
    recipe: Recipe,
    device: torch.device,
    prepare: Prepare = lambda model: None,
    timer: Timer | None = None,
) -> tuple[float, float]:
    """Seconds of a layer's forward and backward pass on a micro-batch: in bf16, and with the recipe's fp8."""
    rows, tokens = recipe.batch.micro_batch_size, recipe.data.sequence_length // recipe.parallel.sequence
    times = []
    for in_fp8 in (False, True):
        model = one_layer(config, recipe.model.attention_kernel, torch.bfloat16, device)
        if in_fp8:
            use_fp8(model, recipe.kernels.fp8)
        prepare(model)
        times.append(seconds_of_layer(model, rows, tokens, timer))
    return times[0], times[1]


def check_faster(kind: str, bf16: float, fp8: float) -> None:
    """Raises RecipeError where a layer takes longer in fp8. bf16, fp8: seconds, as of `layer_times`."""
    if fp8 > bf16:
        why = f"a layer takes {1e3 * fp8:.3g} ms so on this device, and {1e3 * bf16:.3g} ms in bf16"
        raise refused(kind, why)
