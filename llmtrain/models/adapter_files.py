"""The files of adapters as PEFT writes and reads them: names, layouts, configuration and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from llmtrain.errors import Problem, RecipeError, abbreviate, format_value, reason
from llmtrain.models.pretrained import is_finite
from llmtrain.plan.facts.model import TextPart
from llmtrain.recipe import LoraConfig
from llmtrain.system.hub import stored_file

if TYPE_CHECKING:
    import peft

ADAPTER_FILE = "adapter_model.safetensors"
"""File of the weights in a folder of PEFT."""
OLD_ADAPTER_FILE = "adapter_model.bin"
"""The same in folders of earlier versions of PEFT."""
FILE_PREFIX = "base_model.model."
"""Prefix of the names of all weights in the file of an adapter."""
DORA = "lora_magnitude_vector"
"""DoRA's vector of magnitudes: a parameter in PEFT's files, and a module with a parameter in its models."""
CHANGES_MORE = (
    *("layer_replication", "trainable_token_indices", "alora_invocation_tokens", "use_qalora"),
    *("lora_bias", "megatron_config", "use_bdlora", "arrow_config", "velora_config", "kasa_config"),
    *("monteclora_config",),
)
"""Fields of PEFT's configuration with which an adapter is more than two matrices per layer or parameter."""
LEAVES_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Ways of drawing initial adapters that leave the weights of the base unchanged."""

_Rank = Annotated[int, Field(strict=True, gt=0)]
_Factor = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_KINDS: dict[str, TypeAdapter[Any]] = {
    "r": TypeAdapter(_Rank),
    "lora_alpha": TypeAdapter(_Factor),
    "rank_pattern": TypeAdapter(dict[str, _Rank] | None),
    "alpha_pattern": TypeAdapter(dict[str, _Factor] | None),
    "target_modules": TypeAdapter(str | set[str] | list[str] | None),
    "target_parameters": TypeAdapter(list[str] | None),
    "modules_to_save": TypeAdapter(set[str] | list[str] | None),
}
"""Types of the fields of PEFT's configuration that determine what is adapted, and how much."""


def is_adapter(name: str) -> bool:
    """Returns whether a parameter belongs to an adapter."""
    return ".lora_" in name


def stored_modules(parameters: Iterable[str]) -> dict[str, str]:
    """Returns where PEFT's files have the adapters of parameters: name, without `.weight`, → name of a module.

    PEFT wraps the module of a parameter. If it has several, the wrapper of the last one is the outermost.
    """
    of_modules: dict[str, list[str]] = {}
    for name in parameters:
        of_modules.setdefault(name.rpartition(".")[0], []).append(name.removesuffix(".weight"))
    return {
        name: module + ".base_layer" * depth
        for module, names in of_modules.items()
        for depth, name in enumerate(reversed(names))
    }


def stored_name(name: str, stored: Mapping[str, str]) -> str:
    """Returns the name in an adapter's file, without its prefix, of a weight that `weight_name` gives this name.

    stored: of `stored_modules`.
    """
    module, lora, matrix = name.partition(".lora_")
    return stored.get(module, module) + lora + matrix


def file_name(name: str, stored: Mapping[str, str], part: TextPart | None = None) -> str:
    """Returns the name in an adapter's file of a weight that `weight_name` gives this name; the rest as above.

    part: the place of the model in the multimodal one that the adapter is of.
    """
    plain = stored_name(name.removesuffix(".weight") if name.endswith(f"{DORA}.weight") else name, stored)
    return FILE_PREFIX + (part.whole(plain) if part else plain)


def to_file(name: str, value: Tensor) -> Tensor:
    """Returns a weight as PEFT's files have it: A as [experts · rank, inputs], and B as [outputs, rank · experts]."""
    if value.ndim < 3 or not is_adapter(name):
        return value
    return value.flatten(0, 1) if ".lora_A." in name else value.permute(1, 2, 0).flatten(1)


def from_file(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a weight of PEFT's files in the model's `shape`: the inverse of `to_file`."""
    if len(shape) < 3 or not is_adapter(name):
        return value
    experts, rows, columns = shape
    return value.view(shape) if ".lora_A." in name else value.view(rows, columns, experts).permute(2, 0, 1)


def read_adapter(adapter: LoraConfig, part: TextPart | None = None) -> dict[str, Tensor]:
    """Returns the weights of a pretrained adapter by the names of `weight_name`. Raises RecipeError.

    part: the place of the adapted model in a multimodal one, whose names the file may have.
    """
    from peft.utils.save_and_load import load_peft_weights

    assert adapter.pretrained is not None
    files = (stored_file(adapter.pretrained, name, adapter.revision) for name in (ADAPTER_FILE, OLD_ADAPTER_FILE))
    file = next(filter(None, files), None)
    if file is None:
        raise _unreadable(adapter, f"it has neither {ADAPTER_FILE} nor {OLD_ADAPTER_FILE}")
    try:
        stored = load_peft_weights(str(file.parent), device="cpu")
    except Exception as error:  # what torch and safetensors raise depends on the damage
        raise _unreadable(adapter, f"{type(error).__name__}: {reason(error)}") from error
    if wrong := [name for name, value in stored.items() if not (value.is_floating_point() and is_finite(value))]:
        raise _unreadable(adapter, f"{abbreviate(wrong)} is not of finite floating point numbers")
    plain = {name: name.removeprefix(FILE_PREFIX) for name in stored}
    return {
        ((part and part.own(plain[name])) or plain[name]) + (".weight" if name.endswith(DORA) else ""): value
        for name, value in stored.items()
    }


def pretrained_adapter(adapter: LoraConfig) -> peft.LoraConfig:
    """Returns the configuration in the files of an adapter. Raises RecipeError if it is not one of LoRA."""
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(adapter.pretrained, revision=adapter.revision)
    except Exception as error:  # likewise; PEFT raises KeyError for an unknown kind of adapter
        raise _unreadable(adapter, f"{type(error).__name__}: {reason(error)}") from error
    field = "model.adapter.pretrained"
    if not isinstance(config, peft.LoraConfig):
        message = f"{adapter.pretrained} is an adapter of the kind {config.peft_type}, and only LoRA is supported"
        raise RecipeError(Problem("adapter.kind", field, message))
    if wrong := wrong_values(config):
        raise RecipeError(Problem("adapter.kind", field, f"{adapter.pretrained} has {wrong}"))
    more = [name for name in CHANGES_MORE if getattr(config, name, None) not in (None, False)]
    more += ["bias"] * (config.bias != "none")
    more += ["init_lora_weights"] * (config.init_lora_weights not in LEAVES_BASE)
    if more:
        values = ", ".join(f"{name} = {getattr(config, name)}" for name in more)
        raise RecipeError(Problem("adapter.kind", field, f"{adapter.pretrained} has {values}, which is not supported"))
    if config.target_parameters and (adapter.dropout or config.use_dora):
        message = f"{adapter.pretrained} has target_parameters, for which neither dropout nor DoRA is defined"
        raise RecipeError(Problem("adapter.parameters", field, message, "--set model.adapter.dropout=0"))
    config.lora_dropout = adapter.dropout
    return config


def wrong_values(lora: peft.LoraConfig) -> str:
    """Returns which fields of an adapter's configuration are no such values, for a message; empty if all are.

    PEFT does not check them.
    """
    wrong = []
    for name, kind in _KINDS.items():
        try:
            kind.validate_python(getattr(lora, name))
        except ValidationError as error:
            wrong.append(f"{name} = {format_value(getattr(lora, name))} ({error.errors()[0]['msg']})")
    return "; ".join(wrong)


def _unreadable(adapter: LoraConfig, why: str) -> RecipeError:
    message = f"{adapter.pretrained} is not a readable adapter: {why}"
    fix = "name a folder that PEFT has written"
    return RecipeError(Problem("adapter.pretrained", "model.adapter.pretrained", message, fix))
