"""The decoder families whose weights are known without the model, their configurations, and what families can do.

`transformers` accepts any keyword in a configuration and keeps a misspelt one as an attribute that nothing reads. The
keys that its classes declare are therefore known here, in `defaults.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmtrain.plan.facts.weights import Weight, Weights, runs_of

# Keys of every configuration: `transformers.PreTrainedConfig`, without those that do not change a causal LM.
COMMON_KEYS = frozenset({"architectures", "dtype", "model_type", "name_or_path", "transformers_version", "use_cache"})
# Written by older versions of the library; rotary models still read them.
LEGACY_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling"})
_DEFAULTS = json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))
"""For each family, the default of every key that its configuration declares. `tools/families.py` writes the file."""


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
    """A `model_type` of `transformers`, and its weights."""

    model_type: str
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

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default of every key that the family declares."""
        defaults: dict[str, Any] = _DEFAULTS[self.model_type]
        return defaults

    @property
    def keys(self) -> frozenset[str]:
        """Every key that a recipe may set."""
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
        router = Weight(name="mlp.gate.weight", shape=(experts.number, width), kind="other")
        stacks = {
            "mlp.experts.gate_up_proj": (experts.number, 2 * experts.inner, width),
            "mlp.experts.down_proj": (experts.number, width, experts.inner),
        }
        fused = [Weight(name=name, shape=size, kind="stack") for name, size in stacks.items()]
        sparse = [router, *fused] if self.router_first else [*fused, router]
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


_ATTENTION_BIAS = RotaryDecoder(qkv_bias="attention_bias", output_bias="attention_bias")
_READS_HEAD_DIM = frozenset({"head_dim"})

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", replace(_ATTENTION_BIAS, mlp_bias="mlp_bias")),
        Family("mistral", RotaryDecoder()),
        Family("qwen2", RotaryDecoder(qkv_bias=True), extra_keys=_READS_HEAD_DIM),
        Family("qwen3", replace(_ATTENTION_BIAS, query_key_norm="head")),
        Family(
            "olmo2",
            replace(
                _ATTENTION_BIAS, query_key_norm="full", norms=("post_attention_layernorm", "post_feedforward_layernorm")
            ),
            extra_keys=_READS_HEAD_DIM,
        ),
        Family("gemma", _ATTENTION_BIAS),
        Family(
            "gemma2",
            replace(
                _ATTENTION_BIAS,
                norms=(
                    *("input_layernorm", "post_attention_layernorm"),
                    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
                ),
            ),
        ),
        Family(
            "mixtral",
            RotaryDecoder(router_first=True),
            experts=_mixtral_experts,
            aliases={"num_experts": "num_local_experts"},
            moe_block="transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        ),
        Family(
            "qwen3_moe",
            replace(_ATTENTION_BIAS, query_key_norm="head"),
            experts=_qwen3_experts,
            aliases={"num_local_experts": "num_experts"},
            extra_keys=_READS_HEAD_DIM | {"max_window_layers"},
            moe_block="transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ),
        Family(
            "gpt2",
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
    )
}

_TRIED = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
"""Results for all model types of `transformers`. `tools/families.py` tries them on tiny copies, and writes the file."""
SLICED_FAMILIES = frozenset(_TRIED["tensor"])
"""Model types that are correct on two tensor parallel ranks (`docs/reference/families_tensor.md`)."""
MEGATRON_SP_FAMILIES = frozenset(_TRIED["residual_slices"])
"""Those of them whose ranks may hold slices of the residual stream."""
WHOLE_MATRICES: dict[str, list[str]] = _TRIED["whole"]
"""Family → the usual names of split matrices that its tensor parallel ranks hold whole in some layer."""
MIXES_DOCUMENTS = frozenset(_TRIED["mixes_documents"])
"""Model types in which packed documents influence each other (`docs/reference/families_documents.md`).

Their documents meet before the decoder layers, or in parts of these that cannot compute each document on its own.
"""
MIXING_PARTS = frozenset(_TRIED["mixing_parts"])
"""Model types with parts that mix packed documents, unless they compute each document on its own: recurrences,
convolutions, and attention with masks of its own."""
CONTINUES_FROM_STATES = frozenset(_TRIED["continues_from_states"])
"""Those of them of which every such part can continue a document from the states of an earlier slice of it, so that
sequence parallel ranks hand states on (`docs/reference/families_sequence.md`)."""
WITHOUT_SDPA = frozenset(_TRIED["without_sdpa"])
"""Model types that `transformers` does not build with `sdpa`: soft caps, sinks, or attention of their own."""
ENCODERS = frozenset(
    {
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta"),
        *("xlm-roberta-xl", "xlnet", "xmod"),
    }
)
"""Model types with a causal LM in `transformers` whose tokens see later ones, unless `is_decoder` is set."""
CONV1D_FAMILIES = frozenset({"gpt2", "openai-gpt"})
"""Model types whose linear layers are `Conv1D` of `transformers`, whose matrices are stored [inputs, outputs]."""
EXPERT_FAMILIES = frozenset(_TRIED["expert"])
"""Families whose experts can be distributed over ranks."""
EXPERT_TENSOR_FAMILIES = frozenset(_TRIED["expert_tensor"])
"""Those of them that tensor parallel ranks can split beside the experts."""
WRAPPERS: dict[str, str] = _TRIED["wrappers"]
"""Multimodal model type → the type of its text model by default, for those whose text model alone computes the same
from texts (`docs/reference/families_multimodal.md`)."""
