"""Freezes parameters that no loss depends on.

The indexer of sparse attention chooses the tokens that attention reads: those with its largest scores. Such a choice
has no gradient, so plain PyTorch leaves the indexer's weights unchanged. DeepSpeed, however, would reduce zeros for
them, and an optimizer applies weight decay to parameters whose gradient is zero. Once they are frozen, all engines
treat them alike.
"""

from __future__ import annotations

from transformers import PreTrainedModel

CHOOSERS = {
    "axk2": "self_attn.indexer",
    "deepseek_v32": "self_attn.indexer",
    "deepseek_v4": "self_attn.compressor.indexer",
    "glm_moe_dsa": "self_attn.indexer",
    "hy_v4": "self_attn.indexer",
    "qwen4_exp_text": "self_attn.indexer",
}
"""Family → the module in each decoder layer whose parameters have no gradient."""


def freeze_choosers(model: PreTrainedModel) -> PreTrainedModel:
    """Freezes the parameters that no loss depends on, and returns the model."""
    chooser = CHOOSERS.get(model.config.model_type)
    for name, module in model.named_modules() if chooser else ():
        if name.endswith(f".{chooser}"):
            module.requires_grad_(False)
    return model
