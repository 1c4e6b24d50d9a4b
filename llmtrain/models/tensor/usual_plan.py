"""A tensor parallel plan for families of `transformers` that declare none, by the usual names of their matrices.

Megatron-LM's split (arXiv 1909.08053): attention by heads, feed-forward layers by their inner width. Whether a model
computes the same with it is found by trial (`llmtrain.models.tiny.tensor_check`), as for plans that families declare.
Shapes show what is stored in one matrix: queries, keys and values, or the gate beside the other columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.models.tensor.collectives import Shard

QUERIES = frozenset({"q_proj", "query", "query_key_value", "Wq", "q", "wq", "c_attn", "Wqkv"})
COLUMNS = QUERIES | frozenset(
    {
        *("k_proj", "v_proj", "key", "value", "Wk", "Wv", "k", "v", "wk", "wv"),
        *("gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "w1", "w3", "wi"),
    }
)
"""Names of matrices whose outputs are split."""
ROWS = frozenset(
    {
        *("o_proj", "out_proj", "dense", "Wo", "o", "wo"),
        *("down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "w2"),
    }
)
"""Names of matrices whose inputs are split."""
BLOCKS_OF_HEADS = frozenset({"c_attn", "Wqkv"})
"""Those of them that have all queries, then all keys, then all values. In the others, each head has its own three."""
PARAMETERS_OF_HEADS = ("sinks",)
"""Parameters of attention with an element for each head."""
NORMS_OF_COLUMNS = ("attn_sub_norm", "ffn_sub_norm")
"""Norms of the inputs of a matrix in `ROWS`, which need those of all ranks."""
QKV = "qkv_colwise"
"""The style of a matrix in `BLOCKS_OF_HEADS`."""
COUNTS_OF_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
COUNTS = (
    *COUNTS_OF_HEADS,
    *("num_key_value_heads", "num_kv_heads"),
    *("embed_dim", "hidden_size", "split_size", "all_head_size"),
)
"""Attributes of attention that count its heads or the width of all of them; its forward method reads some of these."""
BIASES_OF_HEADS = ("alibi", "position_bias")
"""Arguments of attention that it adds to the scores of its heads."""


def usual_plan(model: PreTrainedModel) -> dict[str, str]:
    """Returns module or parameter → style (`llmtrain.models.tensor.split.STYLES`), in the names of the whole model.

    Within a module, matrices are only split if it has both columns and rows. A norm within attention is whole on each
    rank, which applies it to its own heads, so its gradients are summed.
    """
    plan: dict[str, str] = {}
    for name, columns, rows in _pairs(model):
        norms = (child for child, _ in model.get_submodule(name).named_children() if child in NORMS_OF_COLUMNS)
        plan |= {column: _style_of_columns(model, column, rows) for column in columns} | dict.fromkeys(rows, "rowwise")
        if _is_attention(columns):
            module = model.get_submodule(name)
            for inner, norm in module.named_modules(prefix=name):
                sizes = [parameter.dim() for parameter in norm.parameters(recurse=False)]
                if inner != name and sizes and max(sizes) == 1:
                    plan[inner] = "replicated_with_grad_allreduce"
            plan |= {
                f"{name}.{own}": "colwise"
                for own, _ in module.named_parameters(recurse=False)
                if own in PARAMETERS_OF_HEADS
            }
        plan |= {f"{name}.{child}": "gathered_input" for child in norms}
    plan |= plan_of_experts(model)
    if plan:
        for name, module in model.named_modules():
            if module is model.get_input_embeddings():
                plan[name] = "embedding_rowwise"
            elif module is model.get_output_embeddings():
                plan[name] = "colwise_gather_output"
    return plan


def _style_of_columns(model: nn.Module, name: str, rows: list[str]) -> str:
    """Returns the style of a matrix whose outputs are split."""
    (outputs, _), (_, inputs) = (_size(model.get_submodule(one)) for one in (name, rows[0]))
    if name.rpartition(".")[2] in BLOCKS_OF_HEADS:
        return QKV
    is_gated = not _is_attention([name]) and outputs == 2 * inputs
    return "packed_colwise" if is_gated else "colwise"


def plan_of_experts(model: nn.Module) -> dict[str, str]:
    """Returns the styles of experts whose gates and other columns are one tensor, as their module says it is stored.

    It is [experts, outputs, inputs], or [experts, inputs, outputs] if transposed. The gates are before the other
    columns if concatenated, and else beside them.
    """
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        own = {key for key, _ in module.named_parameters(recurse=False)}
        if not own >= {"gate_up_proj", "down_proj"} or not hasattr(module, "is_concatenated"):
            continue
        outputs, inputs = ("rowwise", "colwise") if module.is_transposed else ("colwise", "rowwise")
        outputs = f"packed_{outputs}" if module.is_concatenated else outputs
        plan |= {f"{name}.gate_up_proj": outputs, f"{name}.down_proj": inputs, name: "moe_tp_experts"}
        if "gate_up_proj_bias" in own:
            plan[f"{name}.gate_up_proj_bias"] = "packed_rowwise" if module.is_concatenated else "rowwise"
    return plan


def _size(matrix: Any) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of a matrix, which may have an adapter, and may be partitioned."""
    matrix = getattr(matrix, "base_layer", matrix)
    return (matrix.nf, matrix.nx) if isinstance(matrix, Conv1D) else (matrix.out_features, matrix.in_features)


def parametric_activations(model: PreTrainedModel) -> dict[str, str]:
    """Returns the styles of activation functions with parameters, which a rank applies to its own inner width."""
    names = (name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False)))
    return {name: "replicated_with_grad_allreduce" for name in names if name.rpartition(".")[2] == "act_fn"}


def attention_modules(model: PreTrainedModel) -> Iterator[str]:
    """Yields the names of the modules whose heads the plan splits."""
    return (name for name, columns, _ in _pairs(model) if _is_attention(columns))


def with_queries(model: nn.Module) -> Iterator[str]:
    """Yields the names of the matrices that compute queries."""
    return (name for name, _ in model.named_modules() if name.rpartition(".")[2] in QUERIES)


def split_attention(model: nn.Module) -> Iterator[tuple[nn.Module, dict[nn.Module, Shard], nn.Module]]:
    """Yields each attention, its projections with the columns that the heads of a rank need, and its last projection.

    The columns are those of an activation [batch, sequence, columns].
    """
    for name, columns, rows in _pairs(model):
        if _is_attention(columns):
            styles = {column: _style_of_columns(model, column, rows) for column in columns}
            shards = {column: Shard(-1, blocks=3 if style == QKV else 1) for column, style in styles.items()}
            projections = {model.get_submodule(column): shard for column, shard in shards.items()}
            yield model.get_submodule(name), projections, model.get_submodule(rows[0])


def takes_bias_of_heads(attention: nn.Module) -> bool:
    """Whether attention gets a bias of the scores of all heads."""
    return any(name in BIASES_OF_HEADS for name in signature(attention.forward).parameters)


def biases_of_heads(attention: nn.Module, arguments: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, Shard]]:
    """Yields the biases among the arguments of attention, and the part of the heads that it counts.

    A bias is [heads, ...] or [batch · heads, ...] of all heads. ranks: how many times as many they are.
    """
    for name in BIASES_OF_HEADS:
        if arguments.get(name) is not None:
            counts = (vars(attention).get(count) for count in COUNTS_OF_HEADS)
            heads = ranks * next(count for count in counts if isinstance(count, int))
            yield name, Shard(0, blocks=len(arguments[name]) // heads)


def divide_counts(attention: nn.Module, degree: int) -> None:
    """Makes the attributes of attention count the heads of one rank."""
    for name in COUNTS:
        count = vars(attention).get(name)
        if isinstance(count, int) and count % degree == 0:
            setattr(attention, name, count // degree)


def _pairs(model: nn.Module) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields a module of a layer, and the names of its matrices whose outputs and whose inputs are split."""
    for name, module in model.named_modules():
        if not re.search(r"\.\d+(\.|$)", name):
            continue
        bases = {child: getattr(one, "base_layer", one) for child, one in module.named_children()}  # of an adapter
        linear = {child: one for child, one in bases.items() if isinstance(one, (nn.Linear, Conv1D))}
        columns, rows = ([f"{name}.{child}" for child in linear if child in names] for names in (COLUMNS, ROWS))
        blocks = [child for child in linear if child in BLOCKS_OF_HEADS]
        if blocks and rows and _size(linear[blocks[0]])[0] != 3 * _size(linear[rows[0].rpartition(".")[2]])[1]:
            continue  # with fewer keys than queries
        if columns and rows and (len(rows) == 1 or _is_attention(columns)):  # a router has several in sequence
            yield name, columns, rows


def _is_attention(columns: list[str]) -> bool:
    return any(name.rpartition(".")[2] in QUERIES for name in columns)


def splits_layers(plan: Mapping[str, str]) -> bool:
    """Whether a plan that a family declares splits a matrix of its layers."""
    return any(".*." in f"{name}." and style.endswith(("colwise", "rowwise")) for name, style in plan.items())
