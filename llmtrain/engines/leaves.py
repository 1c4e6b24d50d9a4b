"""Decoder layers that ZeRO-3 has to gather as a whole."""

from __future__ import annotations

from deepspeed.utils import set_z3_leaf_module
from transformers import PreTrainedModel

from llmtrain.models.stages import decoder_layers


def gather_layers_together(model: PreTrainedModel) -> None:
    """Marks each decoder layer, so that ZeRO-3 gathers it as a whole and has its hooks around it.

    Compiled as one graph, a layer has no modules any more between which parameters could come and go.
    """
    for layer in decoder_layers(model)[1]:
        set_z3_leaf_module(layer, True)
