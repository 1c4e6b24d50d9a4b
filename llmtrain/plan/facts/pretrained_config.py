"""The configuration of pretrained weights, read from a folder, from the cache of the hub, or from the hub."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import Problem, RecipeError, reason, truncate
from llmtrain.plan.facts.images import image_family
from llmtrain.plan.facts.quantization import Quantization, quantization_in, without_quantization
from llmtrain.plan.facts.wrapper import (
    is_wrapper,
    text_configuration,
    whole_configuration,
)
from llmtrain.recipe import ModelConfig
from llmtrain.system.hub import hub_has, is_path
from llmtrain.system.untrusted import expanded, json_fault, read_json, refusing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AUTO_CLASS = "AutoModelForCausalLM"
ADAPTER_CONFIG = "adapter_config.json"
"""The configuration of an adapter of PEFT."""


def has_own_code(model: ModelConfig, declared: dict[str, Any]) -> bool:
    """Whether a `config.json` names a causal LM in the code next to it, and the recipe permits running it."""
    return model.trust_remote_code and AUTO_CLASS in (declared.get("auto_map") or {})


def multimodal_whole(model: ModelConfig) -> PreTrainedConfig | None:
    """Returns the whole configuration of a multimodal model; None for any other model.

    Raises RecipeError if `model.images` asks for a family that is not trained on images.
    """
    if model.pretrained is None:
        return None
    model_type, declared = declared_config(model)
    if model.images:
        image_family(model_type, model.pretrained)
    if not is_wrapper(model_type) or has_own_code(model, declared):
        return None
    return whole_configuration(model_type, declared)


def pretrained_config(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Returns `model_type` and configuration of pretrained weights, from a local folder or by a name on the hub.

    Those of a multimodal model are those of its text model.
    """
    whole = multimodal_whole(model)
    if whole is None:
        return declared_config(model)
    text = text_configuration(whole).to_dict()
    return text.pop("model_type"), text


def quantization_of(model: ModelConfig) -> Quantization | None:
    """Returns how the files of pretrained weights are quantized; None for plain weights."""
    return None if model.pretrained is None else quantization_in(_config_of(model))


def _config_of(model: ModelConfig) -> dict[str, Any]:
    folder = pretrained_folder(model)
    if folder is None:
        return _hub_config(model)
    if (adapter := folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists():
        raise RecipeError(_is_adapter(model, read_config(adapter)))
    return read_config(folder / "config.json")


def _is_adapter(model: ModelConfig, config: dict[str, Any]) -> Problem:
    base = config.get("base_model_name_or_path")
    message = f"'{model.pretrained}' is an adapter of PEFT, not the weights of a model"
    named = base if isinstance(base, str) and not json_fault(base) else "BASE"
    further = [f"model.pretrained={named}", f"model.adapter={json.dumps({'pretrained': model.pretrained})}"]
    settings = " ".join(f"--set {shlex.quote(assignment)}" for assignment in further)
    fix = f"to train it further: {settings}; `llmtrain export ADAPTER OUT --merge` adds it to its base"
    return Problem("model.adapter_folder", "model.pretrained", message, fix)


def declared_config(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Returns `model_type` and the rest of the `config.json` of pretrained weights, of the whole of a multimodal model.

    The quantization is left out: it is that of the files alone. Raises RecipeError as `pretrained_config` does.
    """
    assert model.pretrained is not None
    config = without_quantization(_config_of(model))
    model_type = config.pop("model_type", None)
    if not isinstance(model_type, str):
        message = f"the configuration of '{model.pretrained}' names no model_type"
        raise RecipeError(Problem("model.pretrained", "model.pretrained", message))
    return model_type, config


def pretrained_folder(model: ModelConfig, fix: str = "") -> Path | None:
    """Returns the folder of pretrained weights, or None for a name on the hub.

    fix: what to do if there is no such folder. Raises RecipeError if `pretrained` is a path without a folder.
    """
    assert model.pretrained is not None
    folder = expanded(model.pretrained)
    try:
        if folder.is_dir():
            return folder
    except OSError as error:  # a name that is too long, a folder without permission
        message = f"{truncate(model.pretrained)} cannot be read: {reason(error)}"
        raise RecipeError(Problem("model.pretrained", "model.pretrained", message)) from None
    if is_path(model.pretrained):
        message = f"there is no folder '{model.pretrained}'"
        raise RecipeError(Problem("model.pretrained", "model.pretrained", message, fix))
    return None


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a `config.json`. Raises RecipeError if it cannot be read."""
    with refusing(RecipeError, "model.pretrained", path):
        return read_json(path, dict[str, Any])


def cached_config(model: ModelConfig) -> Path | None:
    """Returns the configuration of a hub model in the local cache, or None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        kept = try_to_load_from_cache(str(model.pretrained), "config.json", revision=model.revision)
    except HFValidationError:  # not a valid name on the hub
        return None
    return Path(kept) if isinstance(kept, str) else None


def _hub_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the configuration of a hub model, from the hub, or from its local cache if the hub does not answer."""
    from huggingface_hub.constants import HF_HUB_CACHE

    name = model.pretrained
    assert name is not None
    fix = (
        f"download it on a machine that reaches the hub (hf download {name}), or name a folder: "
        "--set model.pretrained=FOLDER"
    )
    if hub_has(name, model.revision) is not None:
        from transformers.utils import cached_file

        try:
            return read_config(Path(cached_file(name, "config.json", revision=model.revision)))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            message = f"'{name}' is neither a folder nor a model that the hub or its cache provides: {reason}"
    else:
        kept = cached_config(model)
        if kept is not None:
            return read_config(kept)
        message = f"'{name}' is not a folder and not in the cache of the hub ({HF_HUB_CACHE}), which cannot be reached"
    raise RecipeError(Problem("model.pretrained", "model.pretrained", message, fix))
