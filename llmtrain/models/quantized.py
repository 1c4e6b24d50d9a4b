"""Quantized weights in files, as the plain weights that they stand for: one of these is in memory at a time.

Which tensors belong together follows from their names. What a folder excludes from quantization is a plain tensor in
its files, too. Values are those that each format defines, in fp32 (MXFP4: bf16, which holds them exactly):

- fp8: element · scale. The scale is that of a tensor, of a row or of a block; at the right and at the bottom, blocks
  may be cut off.
- MXFP4 (gpt-oss): e2m1 · 2^(scale - 127), for each 32 elements of a row; the model has the transpose.
- GPTQ, AWQ, integers of compressed-tensors: (element - zero point) · scale.
- bitsandbytes: in 4 bits table[element] · absmax, where absmax may itself be table[byte] · absmax + offset; in 8 bits
  element · SCB / 127.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.facts.quantization import Quantization

FP8 = "F8_E4M3"
COMPRESSED = "compressed-tensors"
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
"""Names of the scale of an fp8 weight, beside it in its module."""
ACTIVATIONS = (
    *("activation_scale", "input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "output_scale"),
    *("output_zero_point", "qscale_act", "k_scale", "v_scale", "q_scale"),
)
"""Names of what quantizes activations, which plain weights do not need."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the elements of MXFP4."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight neighbouring columns: which 4 bits of a word hold it, from the lowest."""


class Stored(NamedTuple):
    """A tensor of a file."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]


Parts = dict[str, Tensor]
"""The tensors that a weight is made of, by their roles."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that several tensors of files stand for."""

    parts: dict[str, str]
    """Role → name in the files."""
    shape: tuple[int, ...]
    """Shape of the plain weight."""
    value: Callable[[Parts], Tensor]
    """Makes the plain weight."""


class QuantizedFiles:
    """The quantized weights of files: `weights`, by the names of the plain ones."""

    def __init__(self, stored: Mapping[str, Stored], quantization: Quantization, read: Callable[[str], Tensor]) -> None:
        """stored: all tensors of the files. read: returns one of them."""
        self._stored, self._quantization, self._read = stored, quantization, read
        self.weights: dict[str, QuantizedWeight] = {}
        self.faults: list[str] = []
        """What is wrong with the tensors, each with a name."""
        for name, weight in self._found():
            self.weights[name] = weight
        parts = {part for weight in self.weights.values() for part in weight.parts.values()}
        self.left_out = [name for name in stored if name not in parts and name.rpartition(".")[2] in ACTIVATIONS]
        """Names of what quantizes activations."""
        self.plain = [name for name in stored if name not in parts and name not in self.left_out]
        """Names of the tensors that are not quantized."""
        if not self.faults:
            self.faults += [f"{name} has no scale" for name in self.plain if stored[name].dtype == FP8]

    def _found(self) -> Iterator[tuple[str, QuantizedWeight]]:
        method, bits = self._quantization.method, self._quantization.bits
        kind = f"bitsandbytes {bits}" if method == "bitsandbytes" else method
        find: Callable[[str, str], QuantizedWeight | None] = {
            "fp8": self._scaled,
            "fbgemm_fp8": self._scaled,
            COMPRESSED: self._compressed,
            "mxfp4": self._mxfp4,
            "gptq": self._gptq,
            "awq": self._awq,
            "bitsandbytes 4": self._bnb4,
            "bitsandbytes 8": self._bnb8,
        }[kind]
        for name in self._stored:
            module, _, last = name.rpartition(".")
            if (weight := find(name, last)) is not None:
                yield _plain_name(name, module, last), weight

    def _parts(self, name: str, needed: Mapping[str, str], optional: Mapping[str, str]) -> dict[str, str] | None:
        """Returns the names of a weight's parts; None, and a fault, if one that it needs is missing."""
        if lacking := [part for part in needed.values() if part not in self._stored]:
            self.faults.append(f"{name} lacks {', '.join(lacking)}")
            return None
        return {**needed, **{role: part for role, part in optional.items() if part in self._stored}}

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def _scaled(self, name: str, last: str) -> QuantizedWeight | None:
        """Elements of fp8 or int8 with a scale, and maybe a zero point."""
        if self._stored[name].dtype not in ((FP8, "I8") if self._quantization.method == COMPRESSED else (FP8,)):
            return None
        module = name.removesuffix("weight")
        candidates = [module + scale for scale in SCALES] if last == "weight" else []
        scale = next((each for each in (*candidates, f"{name}_scale_inv", f"{name}_scale") if each in self._stored), "")
        if not scale:
            return None  # reported by the caller
        shape, given = self._shape(name), self._shape(scale)
        parts = {"weight": name, "scale": scale}
        for role, part in (("zero", f"{name}_zero_point"), ("index", f"{name}_g_idx")):
            parts |= {role: part} if part in self._stored else {}
        grid = _grid(shape, given, self._quantization.block)
        if grid is None or len(shape) < 2:
            self.faults.append(f"{scale} is {list(given)}, which is no grid of scales of {name}, {list(shape)}")
            return None
        return QuantizedWeight(parts, shape, partial(_scaled, block=grid))

    def _compressed(self, name: str, last: str) -> QuantizedWeight | None:
        if last != "weight_packed":
            return self._scaled(name, last)
        module, bits = name.removesuffix(last), self._quantization.bits
        parts = self._parts(
            name,
            {"weight": name, "scale": f"{module}weight_scale", "shape": f"{module}weight_shape"},
            {"zero": f"{module}weight_zero_point", "index": f"{module}weight_g_idx"},
        )
        if parts is None:
            return None
        rows, words = self._shape(name)
        shape = (rows, words * 32 // bits)
        grid = _grid(shape, self._shape(parts["scale"]), self._quantization.block)
        if grid is None:
            self.faults.append(f"{parts['scale']} is no grid of scales of {name}")
            return None
        return QuantizedWeight(parts, shape, partial(_packed, block=grid, bits=bits, name=name))

    def _mxfp4(self, name: str, last: str) -> QuantizedWeight | None:
        if not last.endswith("_blocks"):
            return None
        parts = self._parts(name, {"weight": name, "scale": name.removesuffix("_blocks") + "_scales"}, {})
        if parts is None:
            return None
        *shape, in_block = self._shape(name)
        if len(shape) != 3 or in_block != 16 or self._shape(parts["scale"]) != tuple(shape):
            self.faults.append(f"{parts['scale']} does not fit {name}")
            return None
        experts, rows, blocks = shape
        return QuantizedWeight(parts, (experts, blocks * 32, rows), _mxfp4)

    def _gptq(self, name: str, last: str) -> QuantizedWeight | None:
        return self._integers(name, last, by_rows=True)

    def _awq(self, name: str, last: str) -> QuantizedWeight | None:
        return self._integers(name, last, by_rows=False)

    def _integers(self, name: str, last: str, by_rows: bool) -> QuantizedWeight | None:
        """Words that hold neighbouring rows, or columns, of the transpose."""
        if last != "qweight":
            return None
        module, bits = name.removesuffix(last), self._quantization.bits
        needed = {"weight": name, "zero": f"{module}qzeros", "scale": f"{module}scales"}
        parts = self._parts(name, needed, {"index": f"{module}g_idx"})
        if parts is None:
            return None
        rows, columns = self._shape(name)
        in_word = 32 // bits
        inputs, outputs = (rows * in_word, columns) if by_rows else (rows, columns * in_word)
        groups, *_ = scales = self._shape(parts["scale"])
        zeros, index = self._shape(parts["zero"]), parts.get("index")
        if (
            scales != (groups, outputs)
            or zeros != (groups, outputs // in_word)
            or inputs % groups
            or (index and self._shape(index) != (inputs,))
        ):
            self.faults.append(f"{parts['scale']}, {parts['zero']} or {index} does not fit {name}")
            return None
        value = partial(_gptq, bits=bits, offset=self._quantization.zero_offset) if by_rows else _awq
        return QuantizedWeight(parts, (outputs, inputs), value)

    def _bnb4(self, name: str, last: str) -> QuantizedWeight | None:
        if last != "weight":
            return None
        absmax, table = f"{name}.absmax", f"{name}.quant_map"
        states = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
        if not {absmax, table, *states} & self._stored.keys():
            return None
        parts = self._parts(
            name,
            {"weight": name, "absmax": absmax, "table": table}
            | {"state": next((state for state in states if state in self._stored), states[0])},
            {"nested_absmax": f"{name}.nested_absmax", "nested_table": f"{name}.nested_quant_map"},
        )
        if parts is None:
            return None
        state = json.loads(bytes(self._read(parts["state"]).tolist()))
        return QuantizedWeight(parts, tuple(state["shape"]), partial(_bnb4, state=state))

    def _bnb8(self, name: str, last: str) -> QuantizedWeight | None:
        if last != "weight" or self._stored[name].dtype != "I8":
            return None
        module = name.removesuffix(last)
        parts = self._parts(name, {"weight": name, "scale": f"{module}SCB"}, {"format": f"{module}weight_format"})
        if parts is None:
            return None
        return QuantizedWeight(parts, self._shape(name), partial(_bnb8, name=name))


def fault_in(message: str) -> RecipeError:
    """Returns the error for quantized weights that cannot be understood."""
    return RecipeError(Problem("model.pretrained_quantized", "model.pretrained", message, "fetch or write it again"))


def _plain_name(name: str, module: str, last: str) -> str:
    if last in ("qweight", "weight_packed"):
        return f"{module}.weight"
    return name.removesuffix("_blocks")


def _grid(shape: Sequence[int], scale: Sequence[int], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns how many rows and columns share a scale; None if the shape of the scales does not fit.

    shape: [..., rows, columns]. scale: a single one, one for each row, or [..., rows of blocks, columns of blocks].
    """
    *stack, rows, columns = shape
    if prod(scale) == 1:
        return rows, columns
    if tuple(scale) in ((*stack, rows), (*stack, rows, 1)):
        return 1, columns
    if block and tuple(scale) == (*stack, ceil(rows / block[0]), ceil(columns / block[1])):
        return block
    return None


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int], index: Tensor | None) -> Tensor:
    """Returns the scale, or zero point, of each element. index: the group of each column, if not in order."""
    *stack, rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(()).expand(shape)
    grid = scale.reshape(*stack, ceil(rows / block[0]), -1)
    tall = grid.repeat_interleave(block[0], -2)[..., :rows, :]
    if index is not None:
        return tall[..., index.long()]
    return tall.repeat_interleave(block[1], -1)[..., :columns]


def _scaled(parts: Parts, block: tuple[int, int]) -> Tensor:
    weight, index = parts["weight"].float(), parts.get("index")
    if (zero := parts.get("zero")) is not None:
        weight -= _spread(zero.float(), weight.shape, block, index)
    return weight.mul_(_spread(parts["scale"].float(), weight.shape, block, index))


def _packed(parts: Parts, block: tuple[int, int], bits: int, name: str) -> Tensor:
    rows, columns = parts["shape"].tolist()
    words, middle = parts["weight"], 2 ** (bits - 1)
    if (rows, ceil(columns * bits / 32)) != tuple(words.shape):
        raise fault_in(f"{name} is {list(words.shape)}, but its weight_shape is {[rows, columns]}")
    elements = _unpack(words, bits).flatten(-2)[:, :columns]
    plain = {"weight": elements.sub_(middle), "scale": parts["scale"]} | (
        {"index": parts["index"]} if "index" in parts else {}
    )
    if "zero" in parts:  # words hold neighbouring rows
        zeros = _unpack(parts["zero"], bits).transpose(-1, -2).flatten(0, 1)
        plain["zero"] = zeros[:rows].sub_(middle)
    return _scaled(plain, block)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Returns the integers in words of 32 bits, from the lowest, as another dimension at the end."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_(2**bits - 1)


def _mxfp4(parts: Parts) -> Tensor:
    values = torch.tensor(E2M1, dtype=torch.bfloat16)
    matrices = []
    for blocks, scales in zip(parts["weight"], parts["scale"], strict=True):  # one expert at a time
        elements = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), -1).flatten(-2)
        matrices.append(torch.ldexp(elements, scales.int().unsqueeze(-1) - 127).flatten(-2).T)
    return torch.stack(matrices)


def _gptq(parts: Parts, bits: int, offset: int) -> Tensor:
    elements = _unpack(parts["weight"], bits).transpose(-1, -2).flatten(0, 1)
    zeros = (_unpack(parts["zero"], bits).flatten(-2) + offset).bitwise_and_(2**bits - 1)
    return _from_groups(elements, zeros, parts)


def _awq(parts: Parts) -> Tensor:
    elements, zeros = (_unpack(parts[role], 4)[..., AWQ_PLACES].flatten(-2) for role in ("weight", "zero"))
    return _from_groups(elements, zeros, parts)


def _from_groups(elements: Tensor, zeros: Tensor, parts: Parts) -> Tensor:
    """elements: [inputs, outputs]. zeros, and the scales: [groups, outputs]."""
    inputs, groups = len(elements), len(zeros)
    index = parts["index"].long() if "index" in parts else torch.arange(inputs) // (inputs // groups)
    return ((elements - zeros[index]).float() * parts["scale"].float()[index]).T.contiguous()


def _bnb4(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    words = parts["weight"].view(torch.uint8).flatten()
    elements = torch.stack((words >> 4, words & 15), -1).flatten()[: prod(state["shape"])]
    scales = parts["absmax"]
    if "nested_absmax" in parts:
        scales = _blocks(parts["nested_table"][scales.int()], parts["nested_absmax"], int(state["nested_blocksize"]))
        scales = scales + state["nested_offset"]
    table = parts["table"].float()[elements.int()]
    return _blocks(table, scales.float(), int(state["blocksize"])).view(state["shape"])


def _blocks(values: Tensor, scales: Tensor, size: int) -> Tensor:
    """Multiplies each block of a flat tensor with its scale."""
    return values * scales.repeat_interleave(size)[: values.numel()]


def _bnb8(parts: Parts, name: str) -> Tensor:
    if "format" in parts and int(parts["format"]):
        raise fault_in(f"{name} is laid out for a GPU (weight_format {int(parts['format'])})")
    return parts["weight"] * parts["scale"].view(-1, 1) * 7.874015718698502e-3  # 1/127, as bitsandbytes rounds
