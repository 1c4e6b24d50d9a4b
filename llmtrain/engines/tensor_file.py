"""Safetensors files that are written in parts; the library's own writer needs all bytes of a file at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from llmtrain.engines.writer import on_host, size_of
from llmtrain.errors import CheckpointError, Problem
from llmtrain.untrusted import UNREADABLE, read_bytes, why

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"} | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names (https://github.com/huggingface/safetensors) for the dtypes that a model may have."""


def head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the beginning of a file, which the tensors follow in their order.

    tensors: only their shapes and dtypes are used, so they may be on the meta device.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        size = size_of(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stream_tensors(stream: BinaryIO, like: Mapping[str, Tensor], tensor: Callable[[str], Tensor]) -> None:
    """Writes a file in the form that `transformers` uses, requesting one tensor after the other.

    like: by name, a tensor of the same shape and dtype without memory. Tensors with wide elements come first, so that
    all are aligned. Raises ValueError if a tensor has another shape or dtype.
    """
    ordered = {name: like[name] for name in sorted(like, key=lambda name: -like[name].element_size())}
    stream.write(head(ordered, {"format": "pt"}))
    for name, expected in ordered.items():
        value = tensor(name)
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            raise ValueError(f"'{name}' is {value.dtype} {list(value.shape)}, and was to be {expected}")
        stream.write(on_host(value.contiguous().view(-1)))


def read_tensors(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a small file. Raises CheckpointError if it cannot be read, or lacks one of `like`.

    like: by name, a tensor of the same dtype and shape; only the first dimension may have another length.
    """
    try:
        tensors: dict[str, Tensor] = load(read_bytes(path))
        for name, expected in like.items():
            if name not in tensors:
                raise ValueError(f"has no tensor '{name}'")
            found = tensors[name]
            if (found.dtype, found.ndim, found.shape[1:]) != (expected.dtype, expected.ndim, expected.shape[1:]):
                told = f"{found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
                raise ValueError(f"'{name}' is {told}")
        return tensors
    except (*UNREADABLE, SafetensorError) as error:
        raise CheckpointError(Problem("checkpoint.content", str(path), why(error))) from None
