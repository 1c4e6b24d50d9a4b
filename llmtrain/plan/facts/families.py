"""The decoder families whose weights are known without the model, their configurations, and what families can do.

`transformers` accepts any keyword in a configuration and keeps a misspelt one as an attribute that nothing reads. The
keys are therefore listed here, and a test compares them with the library's own classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.plan.facts.weights import Weight, Weights, runs_of

# Keys of every configuration: `transformers.PreTrainedConfig`, without those that do not change a causal LM.
COMMON_KEYS = frozenset({"architectures", "dtype", "model_type", "name_or_path", "transformers_version", "use_cache"})
# Written by older versions of the library; rotary models still read them.
LEGACY_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling"})

TOKEN_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True)
class Shape:
    """Sizes that the weights depend on, with the same names for all families."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    positions: int | None
    tied: bool


@dataclass(frozen=True)
class Experts:
    """The experts of a configuration: their number, their width, and their layers."""

    number: int = 0
    per_token: int = 0
    inner: int = 0
    step: int = 1
    """Every `step`-th layer is sparse; 1 means all."""
    dense_layers: tuple[int, ...] = ()

    def sparse(self, total: int) -> list[bool]:
        """Returns for each of `total` layers whether it has experts."""
        if not self.number:
            return [False] * total
        return [(layer + 1) % self.step == 0 and layer not in self.dense_layers for layer in range(total)]


@dataclass(frozen=True)
class Family:
    """The keys that a `model_type` declares, and its weights."""

    defaults: dict[str, Any]
    """Default of every key that the family declares."""
    weights: Callable[[dict[str, Any], Shape, Experts], Weights]
    """Returns the weights of a configuration with its defaults filled in."""
    experts: Callable[[dict[str, Any]], Experts] = lambda config: Experts()
    """Returns the experts of such a configuration."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Standard name → the family's own name (`attribute_map` of `transformers`)."""
    extra_keys: frozenset[str] = frozenset()
    """Keys that the model reads without declaring them."""
    inner_key: str = "intermediate_size"
    """Key of the width of the feed-forward layer."""
    learned_positions: bool = False
    """Whether positions are a table, whose length limits the sequence."""
    moe_block: str | None = None
    """Class of the module that contains a layer's router and experts; None for dense families."""

    @property
    def keys(self) -> frozenset[str]:
        """Returns every key that a recipe may set."""
        rotary = LEGACY_ROPE_KEYS if "rope_parameters" in self.defaults else frozenset()
        return frozenset(self.defaults) | frozenset(self.aliases) | self.extra_keys | rotary | COMMON_KEYS


def gpt2_weights(config: dict[str, Any], shape: Shape, experts: Experts) -> Weights:
    """Returns GPT-2's weights: biases everywhere, a fused projection of queries, keys and values, learned positions."""
    width, inner = shape.width, shape.inner
    layer = [
        *_module("ln_1", width, bias=True),
        *_module("attn.c_attn", 3 * width, width, bias=True, transposed=True),
        *_module("attn.c_proj", width, width, bias=True, transposed=True),
        *_module("ln_2", width, bias=True),
        *_module("mlp.c_fc", inner, width, bias=True, transposed=True),
        *_module("mlp.c_proj", width, inner, bias=True, transposed=True),
    ]
    table = Weight(name="transformer.wte.weight", shape=(shape.vocab, width))
    return Weights(
        prefix="transformer.h",
        embedding=(table, Weight(name="transformer.wpe.weight", shape=(shape.positions or 0, width))),
        runs=runs_of([layer] * shape.layers),
        outside=_module("transformer.ln_f", width, bias=True),
        head=(table,) if shape.tied else (Weight(name="lm_head.weight", shape=table.shape),),
        tied=shape.tied,
    )


@dataclass(frozen=True)
class RotaryDecoder:
    """The weights of the Llama line: rotary positions, gated feed-forward, RMSNorms without a bias.

    The fields describe the differences of a family; a bias is on, off, or a key of the configuration.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    query_key_norm: str = "none"
    """`head`: one weight per dimension of a head (Qwen 3); `full`: over all heads (OLMo 2)."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """RMSNorms of a layer over the residual stream."""
    router_first: bool = False
    """Whether a block of experts declares its router before its experts."""

    def __call__(self, config: dict[str, Any], shape: Shape, experts: Experts) -> Weights:
        """Returns the weights of a configuration."""
        width, inner, heads, kv_heads = shape.width, shape.inner, shape.heads, shape.kv_heads
        qkv_bias, output_bias, mlp_bias = (
            bool(config.get(switch)) if isinstance(switch, str) else switch
            for switch in (self.qkv_bias, self.output_bias, self.mlp_bias)
        )
        attention = [
            *_module("self_attn.q_proj", heads * shape.head_dim, width, bias=qkv_bias),
            *_module("self_attn.k_proj", kv_heads * shape.head_dim, width, bias=qkv_bias),
            *_module("self_attn.v_proj", kv_heads * shape.head_dim, width, bias=qkv_bias),
            *_module("self_attn.o_proj", width, heads * shape.head_dim, bias=output_bias),
        ]
        if self.query_key_norm != "none":
            whole = self.query_key_norm == "full"
            attention += _module("self_attn.q_norm", shape.head_dim * (heads if whole else 1))
            attention += _module("self_attn.k_norm", shape.head_dim * (kv_heads if whole else 1))
        over_residual = [weight for name in self.norms for weight in _module(name, width)]
        dense = [
            *_module("mlp.gate_proj", inner, width, bias=mlp_bias),
            *_module("mlp.up_proj", inner, width, bias=mlp_bias),
            *_module("mlp.down_proj", width, inner, bias=mlp_bias),
        ]
        router = _module("mlp.gate", experts.number, width)
        sparse = [
            *(router if self.router_first else ()),
            Weight(name="mlp.experts.gate_up_proj", shape=(experts.number, 2 * experts.inner, width)),
            Weight(name="mlp.experts.down_proj", shape=(experts.number, width, experts.inner)),
            *(() if self.router_first else router),
        ]
        table = Weight(name="model.embed_tokens.weight", shape=(shape.vocab, width))
        has_experts = experts.sparse(shape.layers)
        return Weights(
            prefix="model.layers",
            embedding=(table,),
            runs=runs_of([*attention, *(sparse if is_sparse else dense), *over_residual] for is_sparse in has_experts),
            outside=_module("model.norm", width),
            head=(table,) if shape.tied else (Weight(name="lm_head.weight", shape=table.shape),),
            tied=shape.tied,
        )


def _module(name: str, *shape: int, bias: bool = False, transposed: bool = False) -> tuple[Weight, ...]:
    """Returns the weights of a norm, given its width, or of a linear layer, given its outputs and inputs."""
    weight = Weight(name=f"{name}.weight", shape=shape, transposed=transposed)
    return (weight, Weight(name=f"{name}.bias", shape=shape[:1])) if bias else (weight,)


def _mixtral_experts(config: dict[str, Any]) -> Experts:
    return Experts(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"])


def _qwen3_experts(config: dict[str, Any]) -> Experts:
    return Experts(
        config["num_experts"],
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        config["decoder_sparse_step"],
        tuple(config["mlp_only_layers"] or ()),
    )


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_dropout": 0.0,
    **TOKEN_IDS,
}
_SLIDING = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN = {
    **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
    **_SLIDING,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {
    **_LLAMA,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
}
_MIXTRAL = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
}
_QWEN3_MOE = {
    **{key: value for key, value in _QWEN.items() if key not in ("max_window_layers", "layer_types")},
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "mlp_only_layers": None,
}
_OLMO2_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_GEMMA2_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA2 = {
    **{key: value for key, value in _GEMMA.items() if key != "hidden_act"},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GPT2 = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "tie_word_embeddings": True,
    **TOKEN_IDS,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        {**_LLAMA, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
        RotaryDecoder(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    ),
    "mistral": Family(
        {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        RotaryDecoder(),
    ),
    "qwen2": Family(_QWEN, RotaryDecoder(qkv_bias=True), extra_keys=frozenset({"head_dim"})),
    "qwen3": Family(
        {**_QWEN, "head_dim": 128, "attention_bias": False},
        RotaryDecoder(qkv_bias="attention_bias", output_bias="attention_bias", query_key_norm="head"),
    ),
    "olmo2": Family(
        {
            **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
            "vocab_size": 50304,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
        },
        RotaryDecoder(
            qkv_bias="attention_bias", output_bias="attention_bias", query_key_norm="full", norms=_OLMO2_NORMS
        ),
        extra_keys=frozenset({"head_dim"}),
    ),
    "gemma": Family(_GEMMA, RotaryDecoder(qkv_bias="attention_bias", output_bias="attention_bias")),
    "gemma2": Family(
        _GEMMA2, RotaryDecoder(qkv_bias="attention_bias", output_bias="attention_bias", norms=_GEMMA2_NORMS)
    ),
    "mixtral": Family(
        _MIXTRAL,
        RotaryDecoder(router_first=True),
        experts=_mixtral_experts,
        aliases={"num_experts": "num_local_experts"},
        moe_block="transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    ),
    "qwen3_moe": Family(
        _QWEN3_MOE,
        RotaryDecoder(qkv_bias="attention_bias", output_bias="attention_bias", query_key_norm="head"),
        experts=_qwen3_experts,
        aliases={"num_local_experts": "num_experts"},
        extra_keys=frozenset({"head_dim", "max_window_layers"}),
        moe_block="transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    ),
    "gpt2": Family(
        _GPT2,
        gpt2_weights,
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        inner_key="n_inner",
        learned_positions=True,
    ),
}

_TRIED = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
"""Results for all model types of `transformers`. `tools/families.py` tries them on tiny copies, and writes the file."""
SLICED_FAMILIES = frozenset(_TRIED["tensor"])
"""Model types that are correct on two tensor parallel ranks (`docs/reference/families_tensor.md`)."""
MEGATRON_SP_FAMILIES = frozenset(_TRIED["residual_slices"])
"""Those of them whose ranks may hold slices of the residual stream."""
MIXES_DOCUMENTS = frozenset(_TRIED["mixes_documents"])
"""Model types in which packed documents influence each other (`docs/reference/families_documents.md`).

The causes are recurrences, convolutions, custom masks, and indexers that choose among the tokens of all documents.
"""
EXPERT_PRESETS: dict[str, str] = _TRIED["expert_presets"]
"""Family → the engine's preset for it, for families whose experts the engine can distribute over ranks."""
EXPERT_TENSOR_FAMILIES = frozenset(_TRIED["expert_tensor"])
"""Those of them whose attention is split correctly by the names of its projections beside distributed experts."""
TEXT_PARTS = frozenset(_TRIED["text_parts"])
"""Model types of several modalities of which `transformers` builds only the text model as causal LM."""
