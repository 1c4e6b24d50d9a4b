"""Names of the weights in DeepSpeed's block of experts, and in the Hugging Face block that it replaces.

`transformers` keeps the experts of a layer in two tensors, gate and up projections joined:
`gate_up_proj` [experts, 2·inner, width] and `down_proj` [experts, width, inner]. DeepSpeed has three,
`w1` (gate) and `w3` (up) [experts, inner, width], and `w2` (down) (`deepspeed/moe/ep_repack.py`).
"""

from __future__ import annotations

from deepspeed.module_inject.auto_ep_presets.registry import get_preset

GATE, DOWN, UP = "experts.w1", "experts.w2", "experts.w3"


def hugging_face_name(name: str, family: str) -> str:
    """The name of a weight within its block, for `name` in DeepSpeed's; the joined one for GATE.

    family: DeepSpeed's preset, `AutoEPMoELayer.model_family`.
    """
    preset = get_preset(family)
    prefixes = {
        GATE: f"{preset.experts_pattern}.{preset.expert_w1}",
        DOWN: f"{preset.experts_pattern}.{preset.expert_w2}",
        "router.gate.": f"{preset.router_pattern}.",
        "router.": f"{preset.router_pattern}.",
        "shared_experts_gate.": f"{preset.shared_experts_gate_pattern}.",
        "shared_experts.": f"{preset.shared_experts_pattern}.",
    }
    own, theirs = next((own, theirs) for own, theirs in prefixes.items() if name.startswith(own))
    return theirs + name.removeprefix(own)
