"""Looks at a model that is built without its weights: its layers, its parameters, and those that no loss reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from llmtrain.plan.facts.images import IMAGE_FAMILIES, reads_images
from llmtrain.plan.facts.weights import Weight, Weights, runs_of

PROBE_TOKENS = 512
"""Length of the sequence with which a model is tried; windows and strides of tokens have to fit into it."""
STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the stacks of matrices that such functions multiply with."""
INDEXERS = {
    "axk2": "self_attn.indexer",
    "deepseek_v32": "self_attn.indexer",
    "deepseek_v4": "self_attn.compressor.indexer",
    "glm_moe_dsa": "self_attn.indexer",
    "hy_v4": "self_attn.indexer",
    "qwen4_exp_text": "self_attn.indexer",
}
"""Family → the module in each decoder layer whose parameters have no gradient. No other family of `transformers` that
only reads texts has such parameters (`tests/models/test_frozen_families.py`)."""


def has_fused_experts(module: Any) -> bool:
    """Whether `transformers` computes the experts of a module by a function that can be chosen (`ExpertsInterface`).

    Their matrices are stacks (`STACKS`).
    """
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate"))


def without_gradient(config: Any) -> tuple[str, ...]:
    """Returns the names of the trained parameters of a causal LM that the loss of texts does not depend on.

    These are indexers of sparse attention (`INDEXERS`). Models that have parts for other inputs, such as the vision
    tower of Gemma 3, and those that come with their own code, are tried; if a forward pass needs values, for example
    to see which experts its tokens have chosen, nothing is found. config: of `transformers`; models that come with
    their own code are registered (`pretrained_configuration`).
    """
    import torch
    from transformers import AutoModelForCausalLM

    if found := getattr(config, "found", None):  # the parts of a user's own model
        return tuple(found.without_gradient)
    if reads_images(config):  # every micro-batch has an image
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        unread = IMAGE_FAMILIES[config.model_type].unread
        return tuple(name for name, _ in whole.named_parameters() if name.startswith(unread))
    indexer = INDEXERS.get(config.model_type)
    if indexer is None and config is config.get_text_config() and type(config).__module__.startswith("transformers."):
        return ()
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _probed:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
        names = tuple(name for name, _ in built.named_parameters() if f".{indexer}." in name)
        _probed[key] = names if indexer else _without_gradient(built)
    return _probed[key]


_probed: dict[tuple[type, str], tuple[str, ...]] = {}


def _without_gradient(built: Any) -> tuple[str, ...]:
    """Returns the names for a model without weights."""
    import torch

    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device="meta")
    mask = torch.ones((1, 1, PROBE_TOKENS, PROBE_TOKENS), dtype=torch.bool, device="meta")
    for dtype in (torch.float32, torch.bfloat16):  # torch has no products of groups on the meta device in fp32
        trained = {name: parameter for name, parameter in built.to(dtype).named_parameters() if parameter.requires_grad}
        for more in ({}, {"attention_mask": mask}):  # without a mask `transformers` needs the values of positions
            try:
                with torch.device("meta"):
                    output = built.train()(input_ids=tokens, position_ids=tokens, use_cache=False, **more)
                auxiliary = getattr(output, "aux_loss", None)
                total = output.logits.sum() if auxiliary is None else output.logits.sum() + auxiliary
                gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
            except Exception:
                # A foreign forward method may raise anything if tensors have no values; a worker will show whether it
                # runs.
                continue
            return tuple(name for name, gradient in zip(trained, gradients, strict=True) if gradient is None)
    return ()


def has_position_table(built: Any, positions: int | None) -> bool:
    """Whether positions are rows of a table, learned or computed once, of which a model object has as many as this."""
    from torch.nn import Embedding

    tables = {name: table.num_embeddings - getattr(table, "offset", 0) for name, table in _modules(built, Embedding)}
    tables |= {name: len(table) for name, table in built.named_buffers() if table.ndim == 2}
    last = {name.rpartition(".")[2]: rows for name, rows in tables.items() if rows == positions}
    return any(("pos" in name and "rel" not in name) or name == "wpe" for name in last)


def _modules(built: Any, kind: type) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in built.named_modules() if isinstance(module, kind))


def weights_of(built: Any, layers: list[Any]) -> Weights:
    """Returns the parameters of a model object by part; parameters that several parts share count in the first."""
    from torch.nn import Embedding, Linear
    from transformers.pytorch_utils import Conv1D

    seen: set[int] = set()
    owners = {id(parameter): module for module in built.modules() for parameter in module.parameters(recurse=False)}

    def weight(name: str, parameter: Any) -> Weight:
        owner, shape = owners[id(parameter)], tuple(parameter.shape)
        transposed = len(shape) == 3 and bool(getattr(owner, "is_transposed", False))
        shape = (shape[0], shape[2], shape[1]) if transposed else shape
        kind: Literal["layer", "stack", "other"] = "other"
        if len(shape) < 2 or isinstance(owner, Linear | Conv1D | Embedding):
            kind = "layer"
        elif has_fused_experts(owner) and name.rpartition(".")[2] in STACKS:
            kind = "stack"
        return Weight(name=name, shape=shape, transposed=transposed, kind=kind)

    def new(named: Iterable[tuple[str, Any]]) -> list[Weight]:
        found = []
        for name, parameter in named:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(weight(name, parameter))
        return found

    whole = {id(parameter): name for name, parameter in built.named_parameters()}

    def outside(module: Any) -> list[Weight]:
        return new((whole[id(parameter)], parameter) for _, parameter in module.named_parameters())

    embedding = outside(built.get_input_embeddings())
    runs = runs_of(new(layer.named_parameters()) for layer in layers)
    projection = built.get_output_embeddings()
    head = outside(projection) if projection is not None else []
    return Weights(
        prefix=next(iter(decoder_lists(built))),
        embedding=tuple(embedding),
        runs=runs,
        outside=tuple(new(built.named_parameters())),
        head=tuple(head or embedding),
        tied=not head,
    )


def decoder_lists(model: Any) -> dict[str, Any]:
    """Returns the lists of modules that may be a model's decoder layers, by name; exactly one for a chain of layers.

    These are the lists outside of other lists, with the lowest depth, that have as many layers as the configuration
    says (or any number, if none has that many).
    """
    from torch import nn

    if found := getattr(model.config, "found", None):  # the parts of a user's own model
        return {found.layers: model.get_submodule(found.layers)} if found.layers else {}
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not any(part.isdigit() for part in name.split("."))
    }
    if reads_images(model.config):  # a tower may have as many layers
        inside = set(model.get_decoder().modules())
        lists = {name: module for name, module in lists.items() if module in inside}
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    matching = {name: module for name, module in lists.items() if len(module) == count} or lists
    depth = min((name.count(".") for name in matching), default=0)
    return {name: module for name, module in matching.items() if name.count(".") == depth}


def has_expert_modules(model: Any) -> bool:
    """Whether a module of a model has a list of experts, each of which is a module."""
    from torch import nn

    return any(
        isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2]
        for name, module in model.named_modules()
    )


def parameters_of(module: Any, within: str = "") -> int:
    """Returns the number of parameters of a module, or of those parts whose name contains `within`."""
    return sum(parameter.numel() for name, parameter in module.named_parameters() if within in name)
