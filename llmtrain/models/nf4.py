"""Frozen layers and experts in 4 bits: NF4 with double quantization, the format of QLoRA (arXiv 2305.14314).

A weight is divided into blocks of 64 elements. Each element is one of 16 quantiles of a normal distribution, times the
block's largest magnitude. The mean of these magnitudes is subtracted, and the rest is rounded to 8 bits in blocks of
256. This takes 4 + 8/64 + 32/(64·256) = 4.127 bits per element. The numbers are those of bitsandbytes' `quantize_4bit`,
so an adapter that was trained here fits the base that `transformers` loads through bitsandbytes.

The packed weight is held in buffers, and not in a parameter as in bitsandbytes and in torchao: ZeRO and DDP cast,
broadcast, flatten and split whatever is a parameter. No buffer is of a floating type, which a cast of the model to bf16
would round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from llmtrain.errors import Problem, RecipeError
from llmtrain.models.stages import decoder_layers
from llmtrain.overrides.transformers import use_experts_function
from llmtrain.plan.facts.built_model import STACKS, has_fused_experts
from llmtrain.plan.facts.weights import BLOCK, BLOCKS

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of NF4 (appendix E of the paper)."""


class Nf4Linear(nn.Linear):
    """A frozen linear layer with a weight of 4 bits per element, which is unpacked only while it is used."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, tables: Tensor) -> None:
        """dtype: type of `weight` if it is read as a whole. tables: those of `make_tables`, which layers share."""
        nn.Module.__init__(self)  # without the weight of nn.Linear
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.register_parameter("bias", bias)
        for name, buffer in zip(("packed", "scales", "ranges"), quantize(weight), strict=True):
            self.register_buffer(name, buffer, persistent=False)
        self.register_buffer("tables", tables, persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight that the packed one stands for."""
        return dequantize(self._buffers_in_order(), (self.out_features, self.in_features), self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies in the type of the input, or of autocast."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        product: Tensor = _Product.apply(input, self.bias, self.out_features, *self._buffers_in_order())  # type: ignore[no-untyped-call]
        return product

    def _buffers_in_order(self) -> list[Tensor]:
        return list(self.buffers(recurse=False))


class _Product(torch.autograd.Function):
    """input · weightᵀ + bias. The whole weight is made again for the backward pass, and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, outputs: int, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.shape = (outputs, input.shape[-1])
        weight = dequantize(stored, ctx.shape, input.dtype)
        return linear(input, weight, None if bias is None else bias.to(input.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return gradient @ dequantize(ctx.saved_tensors, ctx.shape, gradient.dtype), *[None] * 6


class Nf4Stack(nn.Module):
    """The frozen matrices of a layer's experts with 4 bits per element, each of which is unpacked while it is used."""

    def __init__(self, stack: Tensor, dtype: torch.dtype, tables: Tensor) -> None:
        """stack: [experts, ...]. dtype: type of the products. tables: those of `make_tables`, which layers share."""
        super().__init__()
        self.shape, self.dtype = stack.shape, dtype
        parts = zip(*(quantize(matrix) for matrix in stack), strict=True)
        for name, buffers in zip(("packed", "scales", "ranges"), parts, strict=True):
            self.register_buffer(name, torch.stack(buffers), persistent=False)
        self.register_buffer("tables", tables, persistent=False)

    @property
    def device(self) -> torch.device:
        """Where it is held."""
        return self.get_buffer("packed").device

    @property
    def weight(self) -> Tensor:
        """The stack that the packed one stands for."""
        return torch.stack([_matrix(tuple(self.buffers()), self.shape, n, self.dtype) for n in range(self.shape[0])])

    def multiply(self, inputs: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        """Returns the product of each row with the matrix of its expert.

        inputs: [rows, width], sorted by expert. ends: [experts], the end of each expert's rows. transposed: whether
        matrices are [inputs, outputs].
        """
        inputs = inputs.to(self.dtype)
        product: Tensor = _StackProduct.apply(inputs, ends, self.shape, transposed, *self.buffers())  # type: ignore[no-untyped-call]
        return product


class _StackProduct(torch.autograd.Function):
    """Products of groups of rows with a matrix each. Matrices are made again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, ends: Tensor, shape: torch.Size, transposed: bool, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.arguments = (bounds := [0, *ends.tolist()], shape, transposed)
        return _multiply_groups(inputs, bounds, shape, stored, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        bounds, shape, transposed = ctx.arguments
        return _multiply_groups(gradients[0], bounds, shape, ctx.saved_tensors, not transposed), *[None] * 7


def _multiply_groups(
    inputs: Tensor, bounds: Sequence[int], shape: torch.Size, stored: Sequence[Tensor], by_rows: bool
) -> Tensor:
    """Multiplies each group of rows with its matrix, or, unless by_rows, with the transpose.

    In the type of the rows: autocast does not apply to grouped products either.
    """
    product = inputs.new_zeros(len(inputs), shape[-1] if by_rows else shape[-2])
    with torch.autocast(inputs.device.type, enabled=False):
        for number, (first, end) in enumerate(pairwise(bounds)):
            if first < end:
                matrix = _matrix(stored, shape, number, inputs.dtype)
                product[first:end] = inputs[first:end] @ (matrix if by_rows else matrix.T)
    return product


def _matrix(stored: Sequence[Tensor], shape: torch.Size, number: int, dtype: torch.dtype) -> Tensor:
    """Returns a matrix of a stack, given its buffers."""
    *own, tables = stored
    return dequantize((*(buffer[number] for buffer in own), tables), (shape[1], shape[2]), dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a weight as (elements, two in a byte; scales of blocks, one byte each; scales of these scales).

    The last one contains the largest deviation from the mean in each 256 blocks, then the mean: fp32, as int32.
    """
    blocks = _in_blocks(weight.detach().float().flatten(), BLOCK)
    largest = blocks.abs().amax(1)
    codes = _nearest(blocks / _divisor(largest).unsqueeze(1), torch.tensor(LEVELS)).flatten()[: weight.numel()]
    codes = pad(codes, (0, len(codes) % 2)).to(torch.uint8)
    mean = largest.mean()
    deviations = _in_blocks(largest - mean, BLOCKS)
    ranges = deviations.abs().amax(1)
    scales = _nearest(deviations / _divisor(ranges).unsqueeze(1), _eight_bit()).flatten()[: len(largest)]
    return codes[::2] << 4 | codes[1::2], scales.to(torch.uint8), torch.cat([ranges, mean[None]]).view(torch.int32)


def make_tables(device: torch.device) -> Tensor:
    """Returns the lookup tables of `dequantize`, concatenated: a pair of elements, and a scale, for each byte.

    They are fp32 numbers, viewed as int32: [256 * 2 + 256].
    """
    levels = torch.tensor(LEVELS)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    return torch.cat([pairs.flatten(), _eight_bit()]).view(torch.int32).to(device)


def dequantize(stored: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Returns a weight, computed in fp32 and rounded once. stored: the results of `quantize` and `make_tables`."""
    packed, scales, ranges, tables = stored
    limits, values = ranges.view(torch.float32), tables.view(torch.float32)
    pairs, steps = values[:512].view(256, 2), values[512:]
    largest = steps[scales.int()] * limits[:-1].repeat_interleave(BLOCKS)[: len(scales)] + limits[-1]
    elements = _in_blocks(pairs[packed.int()].flatten(), BLOCK).mul_(largest.unsqueeze(1)).flatten()
    return elements[: shape[0] * shape[1]].view(shape).to(dtype)


def round_trip(weight: Tensor) -> Tensor:
    """Returns a weight or a stack, in fp32, as training reads it: quantized and dequantized."""
    if weight.ndim == 3:
        return torch.stack([round_trip(matrix) for matrix in weight])
    rows, columns = weight.shape
    return dequantize((*quantize(weight), make_tables(weight.device)), (rows, columns), torch.float32)


def packed_names(model: PreTrainedModel, trained: frozenset[str]) -> frozenset[str]:
    """Returns the names of the weights that are held in 4 bits: of frozen linear layers and experts of the decoder.

    trained: names of the weights that are not frozen. Raises RecipeError if there are none.
    """
    prefix, layers = decoder_layers(model)
    linear = (name for name, module in layers.named_modules(prefix=prefix) if type(module) is nn.Linear)
    stacks = {
        f"{name}.{stack}"
        for name, module in layers.named_modules(prefix=prefix)
        if has_fused_experts(module)
        for stack, _ in module.named_parameters(recurse=False)
        if stack in STACKS
    }
    names = frozenset({f"{name}.weight" for name in linear} | stacks) - trained
    if not names:
        message = f"the decoder layers of {model.config.model_type} have no frozen nn.Linear, and no fused experts"
        raise RecipeError(Problem("model.quantize", "model.quantize", message, "--set model.quantize=none"))
    return names


def pack_weights(
    model: nn.Module, names: Mapping[str, str], read: Callable[[str], Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """Replaces linear layers and stacks of experts by packed ones, one at a time.

    names: name of each weight in `model` → the name under which `read` returns it.
    """
    tables = make_tables(device)
    for name, whole in names.items():
        path, _, attribute = name.removesuffix(".weight").rpartition(".")
        parent = model.get_submodule(path)
        layer: Any = getattr(parent, attribute)
        if not isinstance(layer, nn.Parameter):
            setattr(parent, attribute, Nf4Linear(read(whole).to(device), layer.bias, dtype, tables))
            continue
        delattr(parent, attribute)
        setattr(parent, attribute, Nf4Stack(read(whole).to(device), dtype, tables))
        use_experts_function(parent)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of a model, and the weights that are held in 4 bits."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            yield f"{name}.weight", module.weight
        elif isinstance(module, Nf4Stack):
            weight: Any = module.weight
            weight.is_distributed_expert = hasattr(model.get_submodule(name.rpartition(".")[0]), "expert_groups")
            yield name, weight


def _in_blocks(values: Tensor, size: int) -> Tensor:
    return pad(values, (0, -len(values) % size)).view(-1, size)


def _divisor(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest, 1.0)


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Returns the index of the nearest level of each value; the lower one of two equally near levels."""
    return torch.bucketize(values, ((levels[1:] + levels[:-1]) / 2).to(values.device))


def _eight_bit() -> Tensor:
    """Returns the values of a signed 8-bit float with as many bits of fraction as its exponent leaves.

    (arXiv 1511.04561; `bitsandbytes.functional.create_dynamic_map`.)
    """
    bounds = [torch.linspace(0.1, 1, 2**exponent + 1) for exponent in range(7)]
    positive = torch.cat([10.0 ** (i - 6) * ((edges[1:] + edges[:-1]) / 2) for i, edges in enumerate(bounds)])
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values
