"""Tiny copies of configurations: the same modules in the same order, with dimensions of a few dozen.

What a copy computes is representative of the model, since forward passes do not branch on sizes. A family can thus be
tried on a CPU in a fraction of a second. Sizes are recognized by the names that `transformers` gives them, and their
tiny values are consistent: the number of heads times the head size is the width, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from llmtrain.plan.facts.classifier import is_classifier

LAYERS = 4
"""Layers of tiny copies: families whose kinds of layers alternate, or share weights, cannot be built with fewer."""
VOCABULARY = 99

_SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd lru_width word_embed_proj_dim embedding_dim router_hidden_size "
    "dim_model_base ple_embed_dim",
    96: "intermediate_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "ffn_dim dff dim_ff ffn_hidden_size expert_ffn_hidden_size intermediate_size_mlp "
    "dense_intermediate_size n_inner moe_shared_expert_intermediate_size d_inner",
    128: "mamba_d_ssm attention_hidden_size max_position_embeddings n_positions n_ctx model_max_length "
    "max_seq_len context_length",
    8: "mamba_n_heads mamba_num_heads num_heads n_mamba_heads qk_rope_head_dim qk_nope_head_dim rotary_dim "
    "sliding_window sliding_window_size window_size local_attention attention_window_size "
    "attention_chunk_size chunk_size mamba_chunk_size block_size keep_window_size mamba_d_state "
    "state_size ssm_state_size time_step_rank mamba_dt_rank index_topk indexer_budget kv_lora_rank "
    "q_lora_rank o_lora_rank d_rel laurel_rank adapter_rank gated_norm_rank hc_lowrank "
    "hidden_size_per_layer_input block_multiple_of prompt_types prompt_length segment_types "
    "index_block_size rel_extent split_ngram_parts floor_scale log_scaling_n_floor",
    4: "num_attention_heads n_head n_heads attention_heads linear_num_value_heads linear_num_heads "
    "swa_num_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts num_query_groups heads_per_ngram zero_expert_num",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
    "num_experts_per_token moe_topk moe_k indexer_compress_ratio o_groups num_kv_shared_layers "
    "attn_layer_period expert_layer_period layer_group_size",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts "
    "mamba_n_groups n_groups mamba_ngroups first_k_dense_replace num_dense_layers index_topk_blocks "
    "indexer_kv_heads moe_layer_start_index attn_layer_offset expert_layer_offset",
    16: "head_dim v_head_dim qk_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "index_head_dim indexer_head_dim mamba_d_head mamba_head_dim mamba_headdim kv_channels dim_head "
    "swa_head_dim query_pre_attn_scalar",
    # With few heads of an indexer, whose scores are cut off at 0, many tokens would have the same score.
    32: "attention_head_dim index_n_heads indexer_n_heads",
    50: "ngram_vocab_size_base",
}
SIZES: Mapping[str, int] = {name: size for size, names in _SIZES.items() for name in names.split()}
"""The value in a tiny copy of each field that is a size."""

_POSITIONS = 128
"""Longest sequence of a tiny copy. In nanoGPT and models after it, `block_size` is that."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth")
"""Names for the number of layers."""
_LAYER_NUMBERS = ("full_attn_idxs", "moe_layers", "mlp_only_layers", "hybrid_layer_ids", "cross_attention_layers")
"""Lists whose values are layer numbers."""
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_NOISE = ("dropout", "pdrop", "layerdrop", "jitter")
_UNDECLARED = (
    *("head_dim", "num_attention_heads", "num_key_value_heads", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "n_group", "topk_group"),
    *("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"),
)
"""Sizes that some families leave unset."""
_DROPPED = ("id2label", "label2id", "dtype", "transformers_version", "model_type", "_name_or_path")


def shrink_configuration(config: PreTrainedConfig, layers: int | None = None, **overrides: Any) -> PreTrainedConfig:
    """Returns a tiny copy of a model's configuration, without dropout; with `layers`, only that many layers.

    The layers kept include, if there is room, one of each kind. Raises the exceptions of the configuration's class if
    its fields are inconsistent.
    """
    values = config.to_dict()
    text = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    kept = list(range(total)) if layers is None else _one_of_each(text.to_dict(), total, layers)
    shrunk = _shrunk(values, total, kept)
    if is_classifier(config):
        shrunk["num_labels"] = VOCABULARY  # so that the losses of trials have tokens as targets
    if "arguments" in values:  # a user's own model
        tiny = config.origin.tiny_arguments(layers)
        return type(config)(
            **(shrunk | {"arguments": tiny | {name: value for name, value in overrides.items() if name in tiny}})
        )
    return type(config)(**(shrunk | overrides))


def shrunk_arguments(arguments: Mapping[str, Any], layers: int | None = None) -> dict[str, Any]:
    """Returns the arguments of a user's own model with the sizes of a tiny copy, as far as their names are usual.

    layers: number of layers; by default all of them.
    """
    total = next((arguments[name] for name in LAYER_COUNTS if isinstance(arguments.get(name), int)), 0)
    shrunk = _shrunk(dict(arguments), total, list(range(min(total, layers or total))))
    return {name: _POSITIONS if name == "block_size" else value for name, value in shrunk.items()}


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Returns a model's configuration with that many layers in their own sizes, chosen as for a tiny copy."""
    values = config.to_dict()
    text = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    kept = _one_of_each(text.to_dict(), total, min(layers, total))
    kept_values = {name: _of_layers(name, value, total, kept) for name, value in values.items() if name not in _DROPPED}
    return type(config)(**kept_values, num_labels=config.num_labels)


def _of_layers(name: str, value: Any, total: int, kept: list[int]) -> Any:
    if name in LAYER_COUNTS:
        return len(kept)
    if name in _LAYER_NUMBERS and isinstance(value, list):
        return [kept.index(layer) for layer in value if layer in kept]
    if isinstance(value, list) and len(value) == total:
        return [value[layer] for layer in kept]
    if name == "per_layer_config":
        return {f"{kept.index(int(k)):02d}": v for k, v in value.items() if int(k) in kept}
    if isinstance(value, dict):
        return {key: _of_layers(key, item, total, kept) for key, item in value.items()}
    return value


def _shrunk(values: dict[str, Any], total: int, kept: list[int]) -> dict[str, Any]:
    shrunk = {name: _field(name, value, total, kept) for name, value in values.items() if name not in _DROPPED}
    if "qk_rope_head_dim" in values and "head_dim" in values:
        shrunk["head_dim"] = SIZES["qk_rope_head_dim"]  # latent attention rotates only this part of a head
    if values.get("word_embed_proj_dim", values.get("hidden_size")) != values.get("hidden_size"):
        # OPT of 350M parameters has projections into and out of the layers, but only if the two widths differ.
        shrunk["word_embed_proj_dim"] = SIZES["attention_head_dim"]
    if "long_factor" in values:  # one factor per rotated pair of a head's dimensions
        pairs = int(SIZES["head_dim"] * values.get("partial_rotary_factor", 1.0)) // 2
        shrunk |= {name: values[name][:pairs] for name in ("long_factor", "short_factor")}
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        shrunk["num_key_value_heads"] = shrunk["num_attention_heads"]
    return shrunk


def _field(name: str, value: Any, total: int, kept: list[int]) -> Any:
    if value is None:
        return SIZES[name] if name in _UNDECLARED else None
    if name in LAYER_COUNTS or name in _LAYER_NUMBERS:
        return _of_layers(name, value, total, kept)
    if name.endswith("token_id"):
        return min(value, VOCABULARY - 1) if isinstance(value, int) else VOCABULARY - 1
    if isinstance(value, float) and any(noise in name for noise in _NOISE):
        return 0.0
    if name == "num_experts_per_tok" and value == 1:
        return value  # zaya has only such routers
    if name == "mrope_section":
        return [4, 2, 2]
    if name == "per_layer_config":
        return {f"{kept.index(int(k)):02d}": _shrunk(v, total, kept) for k, v in value.items() if int(k) in kept}
    if isinstance(value, list) and len(value) == total:
        return [_size(name.removesuffix("_per_layer"), value[layer]) for layer in kept]
    if isinstance(value, dict):
        return _shrunk(value, total, kept)
    return _size(name, value)


def _size(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    if name in _CHOSEN_EXPERTS:
        return min(value, SIZES[name])  # some families allow one only
    return SIZES.get(name, value)


def _one_of_each(values: dict[str, Any], total: int, layers: int) -> list[int]:
    """Returns the numbers of `layers` layers: the first of each kind, then the second of each kind, and so on."""
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == total]
    seen: Counter[str] = Counter()
    ranks = []
    for layer in range(total):
        kind = repr([value[layer] for value in lists])
        ranks.append((seen[kind], layer))
        seen[kind] += 1
    order = [layer for _, layer in sorted(ranks)]
    return [order[number % total] for number in range(layers if total else 0)]
