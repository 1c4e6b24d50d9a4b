"""Loads pretrained configurations, including models with their own code (`trust_remote_code` of `transformers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmtrain.recipe import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AUTO_CLASS = "AutoModelForCausalLM"


def has_own_code(model: ModelConfig, declared: dict[str, Any]) -> bool:
    """Whether a `config.json` names a causal LM in code beside it, and the recipe permits running it."""
    return model.trust_remote_code and AUTO_CLASS in (declared.get("auto_map") or {})


def pretrained_configuration(model: ModelConfig, fields: dict[str, Any]) -> PreTrainedConfig:
    """Returns the configuration of a recipe's pretrained model, with some fields replaced.

    If the recipe trusts the code that comes with it, `transformers` builds that code's class from such a configuration
    from now on in this process. A tiny copy or a stage of it is thus built like that of any other family. Raises what
    `transformers` raises: OSError, ValueError, ….
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config: PreTrainedConfig = AutoConfig.from_pretrained(
        model.pretrained, revision=model.revision, trust_remote_code=model.trust_remote_code, **fields
    )
    if has_own_code(model, vars(config)):
        own = get_class_from_dynamic_module(config.auto_map[AUTO_CLASS], model.pretrained, revision=model.revision)
        own.register_for_auto_class(AUTO_CLASS)  # an export includes the code
        AutoModelForCausalLM.register(type(config), own, exist_ok=True)
    return config
