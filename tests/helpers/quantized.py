"""Quantizes the layers of a saved model, written from the definition of each format, element by element."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def pack_words(integers: np.ndarray, bits: int) -> torch.Tensor:
    """Packs the last dimension, from the lowest bits of a word on. integers: unsigned."""
    grouped = integers.astype(np.uint32).reshape(*integers.shape[:-1], -1, 32 // bits)
    words = sum(grouped[..., place] << np.uint32(bits * place) for place in range(32 // bits))
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def _per_element(scale: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    rows, columns = np.indices(shape)
    return scale[rows // block[0], columns // block[1]]


def fp8(
    weight: torch.Tensor, name: str, block: tuple[int, int], suffix: str = "_scale_inv"
) -> tuple[Tensors, torch.Tensor]:
    """Returns the tensors of files and the values that these stand for."""
    rows, columns = weight.shape
    grid = np.zeros((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    for row, column in np.ndindex(grid.shape):
        part = weight[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
        grid[row, column] = part.abs().max() / 448
    scale = torch.from_numpy(_per_element(grid, (rows, columns), block))
    elements = (weight / scale).to(torch.float8_e4m3fn)
    return {name: elements, f"{name}{suffix}": torch.from_numpy(grid)}, elements.float() * scale


def gptq(weight: torch.Tensor, name: str, bits: int, group: int, stored_less: int) -> tuple[Tensors, torch.Tensor]:
    """stored_less: what is subtracted from zero points. Columns belong to groups in a random order."""
    inputs, module = weight.shape[1], name.removesuffix("weight")
    order = np.random.default_rng(0).permutation(inputs) // group
    elements, zeros, scales = _integers(weight.numpy(), order, bits)
    values = scales[:, order] * (elements - zeros[:, order])
    tensors = {
        f"{module}qweight": pack_words(elements, bits).T.contiguous(),
        f"{module}qzeros": pack_words((zeros.T - stored_less) % 2**bits, bits),
        f"{module}scales": torch.from_numpy(scales.T.copy()).half(),
        f"{module}g_idx": torch.from_numpy(order.astype(np.int32)),
    }
    return tensors, torch.from_numpy(values)


def awq(weight: torch.Tensor, name: str, group: int) -> tuple[Tensors, torch.Tensor]:
    inputs, module = weight.shape[1], name.removesuffix("weight")
    order = np.arange(inputs) // group
    elements, zeros, scales = _integers(weight.numpy(), order, 4)
    values = scales[:, order] * (elements - zeros[:, order])

    def pack(integers: np.ndarray) -> torch.Tensor:
        eights = integers.reshape(len(integers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]  # AWQ_ORDER of autoawq
        return pack_words(eights.reshape(len(integers), -1), 4)

    tensors = {
        f"{module}qweight": pack(np.ascontiguousarray(elements.T)),
        f"{module}qzeros": pack(np.ascontiguousarray(zeros.T)),
        f"{module}scales": torch.from_numpy(scales.T.copy()).half(),
    }
    return tensors, torch.from_numpy(values)


def _integers(weight: np.ndarray, order: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns unsigned elements, and for each row and group the zero point and the scale, which fp16 holds."""
    groups = order.max() + 1
    zeros, scales = np.zeros((len(weight), groups), np.int64), np.zeros((len(weight), groups), np.float32)
    for group in range(groups):
        part = weight[:, order == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, group] = ((high - low) / (2**bits - 1)).astype(np.float16)
        zeros[:, group] = np.rint(-low / scales[:, group])
    zeros[0], zeros[1] = 0, 2**bits - 1  # the ends of the range
    elements = np.clip(np.rint(weight / scales[:, order]) + zeros[:, order], 0, 2**bits - 1).astype(np.int64)
    return elements, zeros, scales


def packed(weight: torch.Tensor, name: str, group: int) -> tuple[Tensors, torch.Tensor]:
    """Signed integers of 4 bits with zero points, as compressed-tensors packs them."""
    order = np.arange(weight.shape[1]) // group
    elements, zeros, scales = _integers(weight.numpy(), order, 4)
    tensors = {
        f"{name}_packed": pack_words(elements, 4),
        f"{name}_shape": torch.tensor(weight.shape),
        f"{name}_scale": torch.from_numpy(scales),
        f"{name}_zero_point": pack_words(np.ascontiguousarray(zeros.T), 4).T.contiguous(),
    }
    return tensors, torch.from_numpy(scales[:, order] * (elements - zeros[:, order]))


def int8(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    """Integers of 8 bits with a scale for each row, as compressed-tensors stores them."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    elements = (weight / scale).round().to(torch.int8)
    return {name: elements, f"{name}_scale": scale}, elements.float() * scale


def bnb8(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    largest, module = weight.abs().amax(1), name.removesuffix("weight")
    elements = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {name: elements, f"{module}SCB": largest, f"{module}weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, elements * largest[:, None] * (1 / 127)


def bnb4(weight: torch.Tensor, name: str, double: bool) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 64 elements; with double quantization, their scales in blocks of 256."""
    blocks = weight.reshape(-1, 64)
    absmax, table = blocks.abs().amax(1), torch.tensor(NF4)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {f"{name}.absmax": absmax, f"{name}.quant_map": table}
    if double:
        offset, codes = absmax.mean(), torch.linspace(-1, 1, 256)
        rest = absmax - offset
        nested = torch.stack([part.abs().max() for part in rest.split(256)])
        bytes_ = torch.tensor([int((codes - value / nested[n // 256]).abs().argmin()) for n, value in enumerate(rest)])
        absmax = torch.tensor([codes[byte] * nested[n // 256] for n, byte in enumerate(bytes_)]) + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        tensors |= {f"{name}.nested_absmax": nested, f"{name}.nested_quant_map": codes}
        tensors[f"{name}.absmax"] = bytes_.to(torch.uint8)
    indices = (blocks[..., None] / absmax[:, None, None] - table).abs().argmin(-1).flatten()
    tensors[name] = ((indices[::2] << 4) | indices[1::2]).to(torch.uint8)[:, None]
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, (table[indices].view(-1, 64) * absmax[:, None]).view(weight.shape)


def mxfp4(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    """weight: [experts, inputs, outputs], as in gpt-oss."""
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    indices = (blocks[..., None] / 2 ** exponents[..., None, None] - levels).abs().argmin(-1)
    values = (levels[indices] * 2 ** exponents[..., None]).flatten(-2).transpose(1, 2)
    tensors = {
        f"{name}_blocks": (indices[..., ::2] | (indices[..., 1::2] << 4)).to(torch.uint8),
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }
    return tensors, values


def _compressed(layout: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        **{"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"]},
    }


BLOCK = (48, 32)
"""Does not divide the tiny model's sizes: the last blocks are cut off."""
Quantizer = Callable[[torch.Tensor, str], tuple[Tensors, torch.Tensor]]
FORMATS: dict[str, tuple[dict[str, object], Quantizer]] = {
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": list(BLOCK)}, lambda w, n: fp8(w, n, BLOCK)),
    "fp8 tensors": (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        lambda w, n: _with_activations(n, fp8(w, n, tuple(w.shape))),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda w, n: fp8(w, n, (1, w.shape[1]), "_scale")),
    "compressed fp8": (
        _compressed("float-quantized", type="float", num_bits=8, strategy="channel", symmetric=True),
        lambda w, n: fp8(w, n, (1, w.shape[1]), "_scale"),
    ),
    "compressed int8": (
        _compressed("int-quantized", type="int", num_bits=8, strategy="channel", symmetric=True),
        int8,
    ),
    "compressed int4": (
        _compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32, symmetric=False),
        lambda w, n: packed(w, n, 32),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda w, n: gptq(w, n, 4, 32, 1),
    ),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
        lambda w, n: gptq(w, n, 8, 32, 0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, lambda w, n: awq(w, n, 32)),
    "bnb nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda w, n: bnb4(w, n, double=False),
    ),
    "bnb nf4 twice": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda w, n: bnb4(w, n, double=True),
    ),
    "bnb int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
}
"""Name → `quantization_config`, and what quantizes a weight."""


def _with_activations(name: str, made: tuple[Tensors, torch.Tensor]) -> tuple[Tensors, torch.Tensor]:
    return {**made[0], f"{name.removesuffix('weight')}activation_scale": torch.tensor(0.1)}, made[1]


def quantize_folder(
    folder: Path, settings: dict[str, object], quantizer: Quantizer, part: str = "_proj.weight"
) -> Tensors:
    """Quantizes the weights of a saved model whose names contain `part`; returns the values of all weights in files."""
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for name in [name for name in tensors if part in name]:
        made, values[name] = quantizer(tensors.pop(name).float(), name)
        tensors |= made
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    declare(folder, settings)
    return values


def declare(folder: Path, settings: object) -> None:
    """Writes a `quantization_config`."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
