"""A decoder with a new head of `model.num_labels` outputs for each token, in place of the head over the vocabulary.

It is the family's classifier in `transformers` (`LlamaForSequenceClassification`), with the same modules and names, so
that an export is one. Only its forward differs: the class of `transformers` returns the outputs of the last token of
each row, this one those of all tokens, since a row may hold several documents.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from llmtrain.errors import FamilyError
from llmtrain.models.images import with_images
from llmtrain.models.varlen import pass_boundaries, takes_cu_seq_lens
from llmtrain.plan.facts.classifier import FIELD, is_classifier
from llmtrain.plan.facts.images import reads_images


class _OutputsOfAllTokens:
    """The forward of a classifier, and its head for those who look for the output layer."""

    base_model: Any
    score: nn.Module

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False, **arguments: Any
    ) -> CausalLMOutput:
        """Returns the outputs [batch, T, labels] as logits. arguments: of the family's decoder."""
        output = self.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **arguments)
        return CausalLMOutput(logits=self.score(output.last_hidden_state))

    def get_output_embeddings(self) -> nn.Module:
        """Returns the head."""
        return self.score


_kinds: dict[type, type] = {}


def decoder_of(config: PreTrainedConfig, **named: Any) -> PreTrainedModel:
    """Returns the causal LM or the classifier of a configuration, with weights as the active contexts make them.

    named: further arguments of `from_config`.
    """
    made: Any = AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM
    if reads_images(config) and (attention := named.get("attn_implementation")):
        # Parts for other inputs, which no image reaches, may not have the implementation.
        named["attn_implementation"] = dict.fromkeys(("", "text_config", "vision_config"), attention)
    model: PreTrainedModel = made.from_config(config, **named)
    if reads_images(config):
        return with_images(model)
    if takes_cu_seq_lens(named.get("attn_implementation") or ""):
        pass_boundaries(model)
    if made is AutoModelForCausalLM:
        return model
    kind = type(model)
    if kind not in _kinds:
        # `save_pretrained` writes the name of the class to `config.json`.
        _kinds[kind] = type(kind.__name__, (_OutputsOfAllTokens, kind), {"__module__": kind.__module__})
    model.__class__ = _kinds[kind]
    return model


def declare_head(config: PreTrainedConfig, num_labels: int | None) -> None:
    """Makes a configuration that of a classifier with this many outputs; or, given None, that of a causal LM.

    Raises RecipeError if `transformers` has no classifier of the family.
    """
    if num_labels is None:
        if is_classifier(config):  # of the files that training starts from
            config.architectures = None
        return
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise no_classifier(config, "transformers has no ...ForSequenceClassification of this family")
    config.architectures, config.num_labels = [kind.__name__], num_labels


def no_classifier(config: PreTrainedConfig, why: str) -> FamilyError:
    """Returns the refusal of a family."""
    refused = f"{config.model_type} cannot have another head"
    return FamilyError("model.classifier", FIELD, "null", refused, why)
