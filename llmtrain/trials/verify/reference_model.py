"""The model of the reference: that of `transformers`, or a user's own, with its initial or its pretrained weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmtrain.plan.facts.families import WRAPPERS
from llmtrain.recipe import Recipe
from llmtrain.recipe.own_code import import_object
from llmtrain.trials.verify.reference_adapters import add_rows, round_base
from llmtrain.trials.verify.reference_multimodal import TextOfWhole

WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Data type of the weights that the model reads, if it is not fp32."""


def own_reference_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """Returns a user's own model, as the user's function builds it."""
    model, fields = recipe.model, dict(recipe.model.config)
    build = import_object(str(model.build), recipe.code_dir)
    if recipe.vocab_size is not None and "vocab_size" in inspect.signature(build).parameters:
        fields.setdefault("vocab_size", recipe.vocab_size)
    module: nn.Module = build(**fields)
    if "head" in model.parts:
        apply_uncalled(module, module.get_submodule(model.parts["head"]))
    return module.to(device, WEIGHTS.get(recipe.parallel.precision, torch.float32))


def apply_uncalled(module: nn.Module, head: nn.Module) -> None:
    """Applies the head to the result of a module that does not call it, and so returns hidden states."""
    calls: list[None] = []
    head.register_forward_hook(lambda *_: calls.append(None))

    def applied(_: nn.Module, given: Any, output: Any) -> Any:
        hidden, auxiliary = own_output(output)
        result = None if calls else (head(hidden), auxiliary)
        calls.clear()
        return result

    module.register_forward_hook(applied)


def reference_model(recipe: Recipe, device: torch.device) -> Any:
    """Returns the recipe's model, as `transformers` builds or loads it, with plain attention instead of kernels."""
    if recipe.model.build is not None:
        return own_reference_model(recipe, device)
    model, fields = recipe.model, dict(recipe.model.config)
    named: dict[str, Any] = {
        "attn_implementation": model.attention_kernel if model.attention_kernel == "sdpa" else "eager",
        "dtype": WEIGHTS.get(recipe.parallel.precision, torch.float32),
    }
    if model.pretrained is not None:
        origin = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        size = fields.pop("vocab_size", None) if model.kept_rows else None
        whole = dequantizing(AutoConfig.from_pretrained(model.pretrained, **origin))
        replace_positions(fields, whole)
        if whole.model_type in WRAPPERS:
            return TextOfWhole.read(model, whole, fields, size, named).to(device)
        config = dequantizing(AutoConfig.from_pretrained(model.pretrained, **origin, **fields))
        if model.num_labels is not None:
            config.num_labels = model.num_labels
            classifier = AutoModelForSequenceClassification.from_pretrained(model.pretrained, config=config, **named)
            return cast(PreTrainedModel, classifier.to(device))
        read = AutoModelForCausalLM.from_pretrained(model.pretrained, config=config, **origin, **named)
        with torch.device("meta"):
            declared = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        for name, weight in declared.named_parameters():
            if not weight.requires_grad:  # loading the weights has unfrozen it
                read.get_parameter(name).requires_grad_(False)
        if model.quantize == "nf4":
            exact = {**named, "dtype": torch.float32}
            round_base(
                read, AutoModelForCausalLM.from_pretrained(model.pretrained, config=config, **origin, **exact), model
            )
        if model.kept_rows:
            add_rows(read, size or config.vocab_size, model.kept_rows)
        return cast(PreTrainedModel, read.to(device))
    if recipe.vocab_size is not None:
        fields["vocab_size"] = recipe.vocab_size
    config = AutoConfig.for_model(model.architecture, **fields)
    kind: Any = AutoModelForCausalLM
    if model.num_labels is not None:
        config.num_labels, kind = model.num_labels, AutoModelForSequenceClassification
    made = kind.from_config(config, **named)
    return cast(PreTrainedModel, made.to(device))


def replace_positions(fields: dict[str, Any], config: PreTrainedConfig) -> None:
    """Replaces `rope_theta` and `rope_scaling` among changes of a configuration by what `transformers` reads now."""
    given = {name: fields.pop(name) for name in ("rope_theta", "rope_scaling") if name in fields}
    if given:
        own = config.get_text_config(decoder=True).rope_parameters
        if "rope_scaling" in given:
            scaling = dict(given.pop("rope_scaling") or {})
            kind = {"rope_type": scaling.pop("type", "default")}
            common = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
            own = {name: own[name] for name in common if name in own} | kind | scaling
        fields["rope_parameters"] = {**own, **given}


def dequantizing(config: PreTrainedConfig) -> PreTrainedConfig:
    """Lets `transformers` dequantize the weights of a configuration, if they are quantized."""
    if settings := getattr(config, "quantization_config", None):
        config.quantization_config = {**settings, "dequantize": True}
    return config


def own_output(output: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the logits and the auxiliary loss that a user's own model has returned."""
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, tuple | list):
        return output[0], output[1] if len(output) > 1 else None
    named = output if isinstance(output, Mapping) else vars(output)
    return named["logits"], named.get("aux_loss")
