"""A tensor parallel plan for families of `transformers` that declare none, by the usual names of their matrices.

Megatron-LM's split (arXiv 1909.08053): attention by heads, feed-forward layers by their inner width. Whether a model
computes the same with it is found by trial (`llmtrain.models.tiny.tensor_check`), as for plans that families declare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn
from transformers import PreTrainedModel

QUERIES = frozenset({"q_proj", "query", "query_key_value", "Wq", "q", "wq"})
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
PARAMETERS_OF_HEADS = ("sinks",)
"""Parameters of attention with an element for each head."""
COUNTS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads"),
    *("embed_dim", "hidden_size", "split_size", "all_head_size"),
)
"""Attributes of attention that count its heads or the width of all of them; its forward method reads some of these."""


def usual_plan(model: PreTrainedModel) -> dict[str, str]:
    """Returns module or parameter → style (`llmtrain.models.tensor.split.STYLES`), in the names of the whole model.

    Within a module, matrices are only split if it has both columns and rows. A norm within attention is whole on each
    rank, which applies it to its own heads, so its gradients are summed.
    """
    plan: dict[str, str] = {}
    for name, columns, rows in _pairs(model):
        plan |= dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
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
    if plan:
        for name, module in model.named_modules():
            if module is model.get_input_embeddings():
                plan[name] = "embedding_rowwise"
            elif module is model.get_output_embeddings():
                plan[name] = "colwise_gather_output"
    return plan


def parametric_activations(model: PreTrainedModel) -> dict[str, str]:
    """Returns the styles of activation functions with parameters, which a rank applies to its own inner width."""
    names = (name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False)))
    return {name: "replicated_with_grad_allreduce" for name in names if name.rpartition(".")[2] == "act_fn"}


def attention_modules(model: PreTrainedModel) -> Iterator[str]:
    """Yields the names of the modules whose heads the plan splits."""
    return (name for name, columns, _ in _pairs(model) if _is_attention(columns))


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
        linear = [child for child, one in module.named_children() if isinstance(one, nn.Linear)]
        columns, rows = ([f"{name}.{child}" for child in linear if child in names] for names in (COLUMNS, ROWS))
        if columns and rows:
            yield name, columns, rows


def _is_attention(columns: list[str]) -> bool:
    return any(name.rpartition(".")[2] in QUERIES for name in columns)


def splits_layers(plan: Mapping[str, str]) -> bool:
    """Whether a plan that a family declares splits a matrix of its layers."""
    return any(".*." in f"{name}." and style.endswith(("colwise", "rowwise")) for name, style in plan.items())
