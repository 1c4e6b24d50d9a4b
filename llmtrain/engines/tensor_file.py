"""Writes safetensors one tensor at a time; the library's own writer wants all bytes of a file at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"} | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Words of the format (https://github.com/huggingface/safetensors) for what a model may be made of."""


def write_tensors(
    stream: BinaryIO, like: Mapping[str, Tensor], tensor: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes the header, then asks for each tensor in its turn.

    like: by name, what has the shape and type of the tensor, maybe without memory. Those with wide elements come
    first, so that all are aligned.
    """
    names = sorted(like, key=lambda name: -like[name].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        size = size_of(like[name])
        header[name] = {
            "dtype": DTYPES[like[name].dtype],
            "shape": list(like[name].shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little"))
    stream.write(text)
    for name in names:
        value = tensor(name)
        if value.shape != like[name].shape or value.dtype != like[name].dtype:
            raise ValueError(f"'{name}' is {value.dtype} {list(value.shape)}, and was to be {like[name]}")
        stream.write(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor in a file."""
    return tensor.numel() * tensor.element_size()
