"""Tiny mixtures of experts for tests."""

from __future__ import annotations

from typing import Any

from llmtrain.recipe import Recipe
from tests.helpers.batches import VOCAB, T, tiny_recipe

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": T,
}
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_routed_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": _COMMON | _BALANCED | {"num_hidden_layers": 2, "num_local_experts": 4, "tie_word_embeddings": False},
    "qwen3_moe": _COMMON
    | _BALANCED
    | _EXPERTS
    | {"num_hidden_layers": 3, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}
    | {"tie_word_embeddings": True},
    "qwen2_moe": _COMMON
    | _BALANCED
    | _EXPERTS
    | {"num_hidden_layers": 2, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen3_5_moe_text": {key: value for key, value in _COMMON.items() if key != "intermediate_size"}
    | _EXPERTS
    | {"num_hidden_layers": 2, "shared_expert_intermediate_size": 24, "head_dim": 8}
    | {"layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "deepseek_v2": _COMMON | _LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": _COMMON | _LATENT | {"norm_topk_prob": True},
    "minimax_m3_vl_text": _COMMON
    | _BALANCED
    | {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 8}
    | {"bos_token_id": 0, "eos_token_id": 1, "dense_intermediate_size": 48, "shared_intermediate_size": 24}
    | {"layer_types": ["full_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
}
"""Tiny configurations of the families whose experts can be distributed over ranks."""

GPT_OSS = {
    "architecture": "gpt_oss",
    "attention": "eager",
    "config": _COMMON
    | _BALANCED
    | {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}
"""A model whose experts have transposed matrices, biases, and gates beside each input."""

INDEXED = {
    **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "max_position_embeddings": 32},
}
"""DeepSeek V3.2, whose indexer's choice has no gradient."""


def moe_recipe(architecture: str = "mixtral", **fields: Any) -> Recipe:
    """Returns a recipe with `expert` ranks in a group, whose clipping is active at every step of SGD."""
    model = GPT_OSS if architecture == "gpt_oss" else {"architecture": architecture, "config": CONFIGS[architecture]}
    return tiny_recipe(**{"model": model, "parallel.expert": 2, **fields})
