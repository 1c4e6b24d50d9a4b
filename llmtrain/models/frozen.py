"""Parameters that no loss depends on.

The indexer of sparse attention chooses which tokens attention reads, by the places of its largest scores. A choice
has no gradient, so plain PyTorch leaves these weights as they are. DeepSpeed would sum zeros for them, and an
optimizer decays what has a gradient of zero. Frozen, they are the same to every engine.
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
    """The model, with the parameters frozen that no loss depends on."""
    chooser = CHOOSERS.get(model.config.model_type)
    for name, module in model.named_modules() if chooser else ():
        if name.endswith(f".{chooser}"):
            module.requires_grad_(False)
    return model
