"""Pretrained configurations, those included whose model is code of its own (`trust_remote_code` of `transformers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmtrain.recipe import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AUTO_CLASS = "AutoModelForCausalLM"


def has_own_code(model: ModelConfig, declared: dict[str, Any]) -> bool:
    """Whether a `config.json` names a causal LM in code beside it, which the recipe lets run."""
    return model.trust_remote_code and AUTO_CLASS in (declared.get("auto_map") or {})


def pretrained_configuration(model: ModelConfig, fields: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a recipe's pretrained model, with some fields replaced.

    Where the recipe trusts the code that comes with it, that code's class is from now on what
    `transformers` builds of such a configuration in this process: so a tiny copy or a stage of it is
    built like that of any other family. Raises what `transformers` raises: OSError, ValueError, ….
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config: PreTrainedConfig = AutoConfig.from_pretrained(
        model.pretrained, revision=model.revision, trust_remote_code=model.trust_remote_code, **fields
    )
    if has_own_code(model, vars(config)):
        own = get_class_from_dynamic_module(config.auto_map[AUTO_CLASS], model.pretrained, revision=model.revision)
        own.register_for_auto_class(AUTO_CLASS)  # an export takes the code along
        AutoModelForCausalLM.register(type(config), own, exist_ok=True)
    return config
