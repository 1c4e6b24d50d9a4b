"""Causal attention as matrix products of tiles of queries, in the graph of a compiled layer on a CPU.

Torch's kernel for CPUs (`aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`) computes the scores of 512 keys at a time
and masks them afterwards. Here a tile of queries is multiplied only by the keys that it may attend to, and the compiler
joins scaling, mask and softmax. The probabilities are kept for the backward pass, so their memory grows with the square
of the length. In long sequences, writing them takes longer than the products that are saved;
`llmtrain.plan.kernels.attends_in_tiles` decides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from llmtrain.plan.kernels import tiles_of


def use_tiles(graph: GraphModule) -> GraphModule:
    """Replaces torch's kernel in a traced graph where it computes plain causal attention; returns the graph."""
    for node in graph.graph.nodes:
        if node.target is functional.scaled_dot_product_attention and _is_plain(node):
            node.target = causal_attention
            node.kwargs = {"scale": node.kwargs.get("scale")}
    graph.recompile()
    return graph


def _is_plain(node: Node) -> bool:
    """Whether there is neither a mask nor dropout, and no token of another sequence, such as those of a cache."""
    named, states = node.kwargs, [one for one in node.args if isinstance(one, Node)]
    if len(states) != 3 or len(node.args) != 3 or not named.get("is_causal"):
        return False
    if named.get("attn_mask") is not None or named.get("dropout_p"):
        return False
    query, key, value = (one.meta["example_value"] for one in states)
    is_of_heads = query.ndim == key.ndim == value.ndim == 4
    return is_of_heads and bool(query.shape[2] == key.shape[2])


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Returns what `scaled_dot_product_attention` returns with `is_causal`, [batch, heads, T, value_dim].

    query: [batch, heads, T, head_dim]; key: [batch, kv_heads, T, head_dim]; value: [batch, kv_heads, T, value_dim].
    Queries that share a key are rows of one product.
    """
    batch, heads, length, width = query.shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    keys, values = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
    positions = torch.arange(length, dtype=torch.int32, device=query.device)
    outputs = []
    for start, end in tiles_of(length):
        queries = query[:, :, start:end].reshape(len(values), -1, width)
        scores = torch.bmm(queries, keys[:, :, :end]).view(batch, heads, end - start, end) * scale
        scores = scores.masked_fill(positions[:end] > positions[start:end, None], -torch.inf)
        weights = scores.softmax(-1).view(len(values), -1, end)
        outputs.append(torch.bmm(weights, values[:, :end]).view(batch, heads, end - start, -1))
    return torch.cat(outputs, dim=2)
