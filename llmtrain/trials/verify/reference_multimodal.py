"""The reference's text model of a multimodal model: its decoder and head, computed by the forward of the whole."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from llmtrain.recipe import ModelConfig
from llmtrain.trials.verify.reference_adapters import add_rows, round_base


class TextOfWhole(nn.Module):
    """The modules that texts reach. The other parts of the whole are read, but not among the parameters."""

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__()
        vars(self)["whole"] = whole  # not as a module, whose parameters would be this module's, too
        decoder, head = whole.get_decoder(), whole.get_output_embeddings()
        # Llama 4 has a causal LM inside, others a decoder. In transformers 5.24 its whole does not read texts alone.
        has_causal_lm = any(part is head for part in decoder.modules())
        vars(self)["reads_texts"] = decoder if has_causal_lm else whole
        self.model = decoder.model if has_causal_lm else decoder
        self.lm_head = head  # the second name of a tied weight

    @classmethod
    def read(
        cls,
        model: ModelConfig,
        config: PreTrainedConfig,
        fields: Mapping[str, Any],
        size: int | None,
        named: Mapping[str, Any],
    ) -> TextOfWhole:
        """Returns the text model of a recipe's pretrained weights.

        config: of the whole. fields: of the text model's configuration. size: number of rows of the vocabulary, if
        there are new ones. named: arguments of `from_pretrained`.
        """
        for name, value in fields.items():
            setattr(config.get_text_config(decoder=True), name, value)
            if name == "tie_word_embeddings":
                config.tie_word_embeddings = value

        def load(**given: Any) -> TextOfWhole:
            return cls(
                AutoModelForMultimodalLM.from_pretrained(
                    model.pretrained, config=config, revision=model.revision, **given
                )
            )

        read: Any = load(**named)
        with torch.device("meta"):
            declared = cls(AutoModelForMultimodalLM.from_config(config))
        for name, weight in declared.named_parameters():
            if not weight.requires_grad:  # loading the weights has unfrozen it
                read.get_parameter(name).requires_grad_(False)
        if model.quantize == "nf4":
            round_base(read, load(dtype=torch.float32), model)
        if model.kept_rows:
            add_rows(read.whole, size or config.get_text_config(decoder=True).vocab_size, model.kept_rows)
        return cls(read.whole) if model.kept_rows else read

    def forward(self, **inputs: Any) -> Any:
        """Returns the output of the whole for texts. Gemma 3 wants to be told that there is no image."""
        if "token_type_ids" in inspect.signature(self.whole.forward).parameters:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        return self.reads_texts(**inputs)

    def train(self, mode: bool = True) -> TextOfWhole:
        """Switches the whole, whose forward is used."""
        self.whole.train(mode)
        return super().train(mode)

    def to(self, *given: Any, **named: Any) -> TextOfWhole:
        """Moves the whole."""
        self.whole.to(*given, **named)
        return super().to(*given, **named)

    def __getattr__(self, name: str) -> Any:
        """Returns what else PEFT and the reference ask a model for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["whole"], name)
