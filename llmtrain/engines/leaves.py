"""Blocks whose experts ZeRO-3 has to gather together."""

from __future__ import annotations

from deepspeed.utils import set_z3_leaf_module
from torch import nn
from transformers import PreTrainedModel

from llmtrain.models.stages import decoder_layers


def gather_experts_together(model: nn.Module) -> list[str]:
    """Marks each module that chooses among experts which are modules of their own; the names of those marked.

    ZeRO-3 gathers a module's parameters, with all ranks, when that module runs. A rank whose tokens miss an
    expert does not run it, and the others would wait for that rank for ever. `transformers` keeps the experts
    of a layer in one module, which runs on every rank; a model's own code may not. A marked block (a "leaf")
    is gathered as a whole.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if any("expert" in child and isinstance(part, nn.ModuleList) for child, part in module.named_children())
    }
    for module in found.values():
        set_z3_leaf_module(module, True)
    return list(found)


def gather_layers_together(model: PreTrainedModel) -> None:
    """Marks each decoder layer, so that ZeRO-3 gathers it as a whole and has its hooks around it.

    Compiled as one graph, a layer has no modules any more between which parameters could come and go.
    """
    for layer in decoder_layers(model)[1]:
        set_z3_leaf_module(layer, True)
