"""Computes feed-forward layers in tiles along the sequence (ALST, arXiv 2506.13996).

The activations and gradients within a feed-forward layer then take the memory of one tile, however long the sequence
is. Only its input and output are of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.errors import FamilyError
from llmtrain.models.stages import Placeholder, decoder_layers
from llmtrain.models.tiny.compare import SUM_TOLERANCE, deviation_of
from llmtrain.models.tiny.model import COPY_ERRORS

NAMES = ("mlp", "feed_forward", "ffn")
"""Names of the feed-forward part of a layer in the families."""


def no_tiles(config: PreTrainedConfig, reason: str) -> FamilyError:
    """Returns the refusal of a family whose feed-forward layers cannot be computed in tiles."""
    refused = f"is not supported for {config.model_type}"
    return FamilyError("recompute.tiles", "parallel.tiled_mlp", "false", refused, reason)


def use_tiles(model: PreTrainedModel, tile: int) -> None:
    """Lets the feed-forward part of each layer of a model, or of a stage of it, compute `tile` tokens at a time.

    Raises FamilyError for layers without such a part, or with dropout in it, which would draw other numbers.
    """
    for layer in decoder_layers(model)[1]:
        if isinstance(layer, Placeholder):
            continue
        module = next((part for name in NAMES if (part := getattr(layer, name, None)) is not None), None)
        if not isinstance(module, nn.Module):
            raise no_tiles(model.config, f"its layers have no {', '.join(NAMES)}")
        if any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.modules()):
            raise no_tiles(model.config, "the feed-forward part of its layers has dropout, which would be drawn again")
        module.forward = _in_tiles(module, module.forward, tile)


def _in_tiles(module: nn.Module, forward: Callable[[Tensor], Tensor], tile: int) -> Callable[[Tensor], Tensor]:
    def run(hidden: Tensor) -> Tensor:
        if hidden.size(1) <= tile:
            return forward(hidden)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        output: Tensor = _Tiles.apply(forward, tile, hidden, *trained)  # type: ignore[no-untyped-call]
        return output

    return run


class _Tiles(torch.autograd.Function):
    """A function of each token, [batch, T, width] → [batch, T, width], in tiles of some tokens."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], tile: int, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.tile, ctx.weights = run, tile, weights
        ctx.save_for_backward(hidden)
        device = hidden.device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
        return torch.cat([run(part.contiguous()) for part in torch.split(hidden, tile, dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Sums the gradients of the weights in fp32; in bf16, each of many tiles would round the sum."""
        (hidden,) = ctx.saved_tensors
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]
        hidden_gradient = torch.empty_like(hidden)
        tiles = (torch.split(tensor, ctx.tile, dim=1) for tensor in (hidden, gradient, hidden_gradient))
        for part, output_gradient, input_gradient in zip(*tiles, strict=True):
            tile_input = part.detach().contiguous().requires_grad_()
            with torch.enable_grad(), torch.autocast(hidden.device.type, **ctx.autocast):
                output = ctx.run(tile_input)
            gradients = torch.autograd.grad(output, (tile_input, *ctx.weights), output_gradient)
            input_gradient.copy_(gradients[0])
            for total, weight_gradient in zip(sums, gradients[1:], strict=True):
                total.add_(weight_gradient)
        return (
            None,
            None,
            hidden_gradient,
            *(total.to(weight.dtype) for total, weight in zip(sums, ctx.weights, strict=True)),
        )


def check_tiles(config: PreTrainedConfig) -> None:
    """Compares a tiny copy of the model in tiles of a few tokens with the plain one, in fp32 on the CPU.

    Raises FamilyError if they deviate, or if the family has no feed-forward part that computes each token alone.
    """
    try:
        deviation = deviation_of(lambda model: use_tiles(model, 5), config)
    except COPY_ERRORS as error:
        raise no_tiles(config, f"its tiny copy fails ({type(error).__name__}: {error})") from error
    if deviation > SUM_TOLERANCE:
        raise no_tiles(config, f"its loss or gradients would deviate by {deviation:.0e}")
