"""How the weights in the files of a pretrained model are quantized, as the `quantization_config` of its folder says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

QUANTIZATION_KEYS = frozenset({"quantization_config", "compression_config"})
"""Fields of a configuration that describe the quantization; the second one is of old compressed-tensors."""
PACKED_BITS = (2, 4, 8)
"""Widths of integers that fill a word of 32 bits."""


@dataclass(frozen=True)
class Quantization:
    """A method of quantization with its settings."""

    method: str
    """The method, as `quantization_config` names it."""
    details: str = ""
    """Its settings, for a reader."""
    fault: str = ""
    """Why weights of this kind are not read; empty if they are."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, if not all of a tensor or a row do."""
    bits: int = 8
    """Bits of an element."""
    zero_offset: int = 0
    """What was subtracted from the zero points in the files."""

    def __str__(self) -> str:
        return f"{self.method} ({self.details})" if self.details else self.method


def quantization_in(declared: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantization of a folder, given its `config.json`; None for plain weights."""
    text = declared.get("text_config")
    places = (declared, text if isinstance(text, Mapping) else {})
    settings = next((part[key] for part in places for key in sorted(QUANTIZATION_KEYS) if part.get(key)), None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        return Quantization("unknown", fault=f"its quantization_config is {settings!r}, not a set of fields")
    is_old = "load_in_4bit" in settings or "load_in_8bit" in settings  # bitsandbytes did not name itself
    method = str(settings.get("quant_method") or ("bitsandbytes" if is_old else "unknown"))
    read = METHODS.get(method)
    if read is None:
        return Quantization(method, fault=f"of the methods, only {', '.join(METHODS)} are read")
    try:
        return read(method, settings)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError):
        return Quantization(method, fault=f"its quantization_config cannot be understood: {dict(settings)!r}"[:300])


def without_quantization(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `config.json` as that of plain weights."""
    plain = {key: value for key, value in declared.items() if key not in QUANTIZATION_KEYS}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = without_quantization(text)
    return plain


def _fp8(method: str, settings: Mapping[str, Any]) -> Quantization:
    size = settings.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None
    kind = str(settings.get("fmt") or "e4m3")
    fault = "" if kind in ("e4m3", "float8_e4m3fn") else f"its elements are {kind}, not e4m3"
    return Quantization(method, f"blocks of {block[0]}×{block[1]}" if block else "a scale per tensor", fault, block)


def _fp8_rows(method: str, settings: Mapping[str, Any]) -> Quantization:
    return Quantization(method, "a scale per row")


def _mxfp4(method: str, settings: Mapping[str, Any]) -> Quantization:
    return Quantization(method, "blocks of 32 in each row of the experts", bits=4)


def _gptq(method: str, settings: Mapping[str, Any]) -> Quantization:
    bits, group = int(settings["bits"]), int(settings.get("group_size", -1))
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    fault = ""
    if bits not in PACKED_BITS:
        fault = f"elements of {bits} bits are not read, only those of {', '.join(map(str, PACKED_BITS))}"
    elif layout not in ("gptq", "gptq_v2"):
        fault = f"its files have the layout '{layout}'; 'gptq' and 'gptq_v2' are read"
    details = f"{bits} bits, {_groups(group)}"
    return Quantization(method, details, fault, bits=bits, zero_offset=1 if layout == "gptq" else 0)


def _awq(method: str, settings: Mapping[str, Any]) -> Quantization:
    bits = int(settings.get("bits") or settings.get("w_bit") or 4)
    group = int(settings.get("group_size") or settings.get("q_group_size") or 128)
    layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
    fault = ""
    if bits != 4:
        fault = f"elements of {bits} bits are not read, only those of 4"
    elif layout != "gemm" or settings.get("backend") == "llm-awq":
        fault = f"its files have the layout '{layout}'; 'gemm' is read"
    return Quantization(method, f"{bits} bits, {_groups(group)}", fault, bits=bits)


def _groups(size: int) -> str:
    return f"groups of {size}" if size > 0 else "a scale per row"


def _compressed_tensors(method: str, settings: Mapping[str, Any]) -> Quantization:
    layout, groups = str(settings.get("format")), list((settings.get("config_groups") or {}).values())
    status = settings.get("quantization_status", "compressed")
    weights = [group["weights"] for group in groups if group.get("weights")]
    if not weights:
        return Quantization(method, layout, "it quantizes no weights")
    kinds = {(str(each["type"]), int(each["num_bits"])) for each in weights}
    blocks = {tuple(each.get("block_structure") or (1, each.get("group_size") or 0)) for each in weights}
    name = ", ".join(sorted(f"{'fp' if kind == 'float' else kind}{bits}" for kind, bits in kinds))
    details = f"{name}, {', '.join(sorted({str(each.get('strategy') or 'tensor') for each in weights}))} scales"
    fault = ""
    if len(kinds) > 1 or len(blocks) > 1:
        fault = "it mixes kinds of weights, of which only one in a folder is read"
    elif status != "compressed":
        fault = f"its quantization_status is '{status}'; 'compressed' is read"
    elif settings.get("sparsity_config", {}).get("format", "dense") != "dense":
        fault = "its files leave out zeros (sparsity_config)"
    elif layout not in COMPRESSED or any(kind not in COMPRESSED[layout] for kind in kinds):
        fault = (
            f"its files have the format '{layout}' of {name}; read are {', '.join(COMPRESSED)} of fp8, int8 and int4"
        )
    [(_, bits), *_], [block, *_] = sorted(kinds), sorted(blocks)
    return Quantization(method, details, fault, (int(block[0]), int(block[1])) if block[1] else None, bits)


def _bitsandbytes(method: str, settings: Mapping[str, Any]) -> Quantization:
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        kind = str(settings.get("bnb_4bit_quant_type") or "fp4")
        nested = ", double quantization" if settings.get("bnb_4bit_use_double_quant") else ""
        return Quantization(method, f"{kind}{nested}", bits=4)
    return Quantization(method, "int8")


COMPRESSED = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8),),
    "naive-quantized": (("float", 8), ("int", 8)),
    "pack-quantized": (("int", 4), ("int", 8)),
}
"""Formats of compressed-tensors that are read, with the types and bits of their elements."""
METHODS: dict[str, Callable[[str, Mapping[str, Any]], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8_rows,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}
"""Methods whose weights are read → what returns the settings."""
