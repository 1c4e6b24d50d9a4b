"""Multimodal models, the wrappers, of which the text model is trained: its configuration, and its names in the wrapper.

`WRAPPERS` lists those whose text model alone computes what the whole computes from texts; `tools/families.py` tries
each. All else is what `transformers` knows of a wrapper: its class builds it without memory, and the text model is the
module in it that the part of its configuration for texts builds by itself.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from llmtrain.errors import Problem, RecipeError, reason
from llmtrain.plan.facts.families import WRAPPERS
from llmtrain.plan.facts.images import reads_images
from llmtrain.plan.facts.model import TextPart

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def is_wrapper(model_type: str) -> bool:
    """Whether the text model of a multimodal model is trained by itself."""
    return model_type in WRAPPERS


def whole_configuration(model_type: str, declared: dict[str, Any]) -> PreTrainedConfig:
    """Returns the configuration of a wrapper. declared: the content of its `config.json`, without `model_type`.

    Raises RecipeError if its class refuses it.
    """
    from transformers import CONFIG_MAPPING

    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(dict(declared))
    except Exception as error:  # what a configuration's class raises depends on the fault
        message = f"transformers cannot read its configuration of '{model_type}': {type(error).__name__}"
        raise RecipeError(Problem("model.config", "model.pretrained", f"{message}: {reason(error)}")) from None
    return config


def text_configuration(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of a wrapper's text model, with what the wrapper declares for all of its parts."""
    text: PreTrainedConfig = deepcopy(whole.get_text_config(decoder=True))
    text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    text.dtype = text.dtype or whole.dtype
    return text


def text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of the text model of a multimodal model that is trained on images; any other as it is.

    What is tried on a tiny copy of a model is tried on that of its text model, since a tower reads no tokens.
    """
    return text_configuration(config) if reads_images(config) else config


def with_text(whole: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of a wrapper with another one of its text model."""
    changed = deepcopy(whole)
    part = changed.get_text_config(decoder=True)
    field = next(name for name, value in vars(changed).items() if value is part)
    setattr(changed, field, deepcopy(text))
    if hasattr(changed, "tie_word_embeddings"):
        changed.tie_word_embeddings = text.tie_word_embeddings
    return changed


def declare_causal_lm(kind: type[PreTrainedConfig]) -> None:
    """Lets `AutoModelForCausalLM` build the text model of a configuration's class, if `transformers` has no such class.

    Raises ValueError if it has no decoder either.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoModelForCausalLM

    if MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None) is None:
        decoder = MODEL_MAPPING.get(kind, None)
        if decoder is None:
            raise ValueError(f"transformers has no decoder of '{kind.model_type}'")
        AutoModelForCausalLM.register(kind, _causal_lm(decoder), exist_ok=True)


def has_causal_lm(text: PreTrainedConfig) -> bool:
    """Whether `transformers` itself has a causal LM of a configuration."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@cache
def _causal_lm(decoder: Any) -> Any:
    """Returns the class of a decoder with a head, as the causal LMs of `transformers` are."""
    from torch import nn
    from transformers import GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast

    # The name of the cache changed in 5.24.
    cache = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
    base: Any = next(kind for kind in decoder.__mro__[1:] if kind.__name__.endswith("PreTrainedModel"))

    class CausalLM(base, GenerationMixin):  # type: ignore[misc]
        config_class = decoder.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> CausalLMOutputWithPast:
            output = self.model(input_ids=input_ids, **kwargs)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(output.last_hidden_state[:, kept])
            return CausalLMOutputWithPast(logits=logits, **{cache: getattr(output, cache)})

    CausalLM.__name__ = CausalLM.__qualname__ = decoder.__name__.removesuffix("Model") + "ForCausalLM"
    CausalLM.__module__ = decoder.__module__  # where transformers, and llmtrain, look for the functions of a family
    return CausalLM


class Wrapper:
    """A multimodal model without memory, and the place of its text model in it."""

    def __init__(self, whole: PreTrainedConfig, text: PreTrainedConfig, dtype: Any = None) -> None:
        """text: the configuration of the text model as it is trained. dtype: of all weights; default: fp32.

        Raises ValueError if the text model is not one module and one head.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

        declare_causal_lm(type(text))
        with torch.device("meta"):
            config = with_text(whole, text)
            self.model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=dtype or torch.float32)
            alone: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(text), dtype=torch.float32)
        self.model.tie_weights()
        alone.tie_weights()
        prefixes = self._prefixes(alone)
        self._check(alone, TextPart(wrapper=whole.model_type, prefixes=prefixes, untouched=()))
        taken = tuple(whole_name for _, whole_name in prefixes)
        beside: dict[str, int] = {}
        for name, parameter in self.model.named_parameters():
            if not name.startswith(taken):
                part = name.removeprefix("model.").partition(".")[0]
                beside[part] = beside.get(part, 0) + parameter.numel()
        self.part = TextPart(wrapper=whole.model_type, prefixes=prefixes, untouched=tuple(beside.items()))
        """Where the text model is."""

    def _prefixes(self, alone: PreTrainedModel) -> tuple[tuple[str, str], ...]:
        """Returns the beginnings of names of the decoder and of the head, in the text model and in the wrapper."""
        head, whole_head = alone.get_output_embeddings(), self.model.get_output_embeddings()
        name, decoder = next((name, module) for name, module in alone.named_children() if module is not head)
        found = [where for where, module in self.model.named_modules() if type(module) is type(decoder)]
        if len(found) != 1 or whole_head is None:
            raise ValueError(f"it has {len(found)} modules of the class {type(decoder).__name__}, not one with a head")
        own_head = next(where for where, module in alone.named_modules() if module is head)
        its_head = next(where for where, module in self.model.named_modules() if module is whole_head)
        return (f"{name}.", f"{found[0]}."), (f"{own_head}.", f"{its_head}.")

    def _check(self, alone: PreTrainedModel, part: TextPart) -> None:
        shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        for name, tensor in alone.state_dict().items():
            if shapes.get(part.whole(name)) != tensor.shape:
                raise ValueError(f"'{part.whole(name)}' is not like '{name}' of its text model")
        if len({id(parameter) for parameter in alone.parameters()}) != len(
            {id(tensor) for name, tensor in self.model.named_parameters() if part.whole(part.own(name) or "") == name}
        ):
            raise ValueError("its embedding and its head are tied in only one of the wrapper and its text model")
