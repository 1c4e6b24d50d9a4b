"""Tensor parallelism over any group of ranks, by the plan that a `transformers` family declares (`tp_plan`).

Families without a plan are split by the usual names of their matrices (`usual_plan.py`).

The model keeps its modules and their names. A rank holds shards of the parameters that the plan names, and their
modules call collectives on inputs and outputs, as in Megatron-LM (arXiv 1909.08053). Parameters remain plain tensors,
because DeepSpeed's optimizers flatten them: the styles of `transformers` itself create DTensors, which those optimizers
do not accept.

Between split modules, activations are whole and equal on all ranks, and so are their gradients. Modules with the same
input (query, key and value; gate and up) share one copy of it. A layer therefore needs four all-reduces: attention and
feed-forward each need one in the forward pass and one in the backward pass. Where a family allows it, the activations
are sharded along the sequence, and a reduce-scatter and an all-gather replace each all-reduce (`sequence_parallel.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.errors import FamilyError
from llmtrain.models.adapter import ADAPTER, adapters
from llmtrain.models.experts import is_transposed, updates
from llmtrain.models.tensor.collectives import (
    Communicator,
    Forward,
    Shard,
    TensorParallelBlock,
    all_reduce_gradient,
    gather_from_tensor_parallel,
    scatter_to_tensor_parallel,
    shard_of,
)
from llmtrain.models.tensor.sequence_parallel import EXPERTS, SequenceParallel, sublayer_of
from llmtrain.models.tensor.usual_plan import (
    QKV,
    attention_modules,
    biases_of_heads,
    divide_counts,
    parametric_activations,
    plan_of_experts,
    splits_layers,
    takes_bias_of_heads,
    usual_plan,
    with_queries,
)

Part = Literal["", "attention", "feed-forward"]
"""A part of each layer."""


def no_split(config: PreTrainedConfig, reason: str) -> FamilyError:
    """Returns the refusal of a family that cannot be split by its own plan."""
    refused = f"{config.model_type} cannot be split among tensor parallel ranks"
    return FamilyError("tensor.family", "parallel.tensor", 1, refused, reason)


@dataclass(frozen=True)
class DeclaredSplit:
    """The split of a model. All names are those of the whole model."""

    styles: Mapping[str, str]
    """Module → style."""
    shards: Mapping[str, Shard]
    """Parameter → how it is sharded; a tied parameter is listed under each of its names."""
    sequence_parallel: bool = False
    """Whether the residual stream is sharded along the sequence (`sequence_parallel.py`)."""
    counts_heads: frozenset[str] = frozenset()
    """Modules of attention whose attributes count the heads of all ranks."""


class TensorParallel:
    """One tensor parallel rank: shards parameters, gathers shards, and registers the collectives of split modules."""

    def __init__(self, split: DeclaredSplit, group: Communicator) -> None:
        self.split = split
        self.group = group
        self._sequence_parallel = SequenceParallel(group, split.styles) if split.sequence_parallel else None
        self._shared_block = TensorParallelBlock(group)
        self._single_block = TensorParallelBlock(group, is_single_module=True)

    def shard(self, name: str, parameter: nn.Parameter) -> None:
        """Replaces a parameter, which may be a meta tensor, by this rank's shard. name: its name in the whole model."""
        parameter.data = self.part(name, parameter.data)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's shard of a whole weight."""
        shard = self.split.shards.get(name)
        return whole if shard is None else shard.part(whole, self.group.rank, self.group.size)

    def install(self, model: PreTrainedModel, names: Mapping[str, str]) -> None:
        """Registers the collectives that make a sharded model, or stage of one, give the results of the whole model.

        names: parameter of `model` → its name in the whole model.
        """
        for path, name in names.items():
            if name in self.split.shards:
                parameter: Any = model.get_parameter(path)
                parameter.tensor_shard = self.split.shards[name]
                parameter.model_parallel = True  # read by DeepSpeed: each rank's shard counts in the gradient norm
        for name, module in model.named_modules():
            if name in self.split.counts_heads:
                if takes_bias_of_heads(module):
                    module.register_forward_pre_hook(self._own_bias, with_kwargs=True)
                divide_counts(module, self.group.size)
            style = self.split.styles.get(name)
            if style is not None and (style == IDENTITY or next(module.parameters(), None) is not None):
                block = self._single_block if _pattern(name) == name else self._shared_block
                if self._sequence_parallel is not None:
                    block = self._sequence_parallel.block_of(name)
                STYLES[style].install(module, block, model.config)
        if self._sequence_parallel is not None:
            self._sequence_parallel.install(model)

    def _own_bias(self, attention: nn.Module, args: Any, named: Any) -> tuple[Any, dict[str, Any]]:
        """Keeps the biases of the scores of this rank's heads, given those of all."""
        given = signature(attention.forward).bind(*args, **named)
        for name, shard in biases_of_heads(attention, given.arguments, self.group.size):
            given.arguments[name] = scatter_to_tensor_parallel(given.arguments[name], self.group, shard)
        return given.args, given.kwargs

    def split_adapters(self, model: PreTrainedModel) -> None:
        """Shards the adapters of a model, or of a part of it, like what they are added to."""
        for name, module in adapters(model):
            inner, outer = module.lora_A[ADAPTER], module.lora_B[ADAPTER]
            self._split_adapter(name, module.get_base_layer(), inner, outer, model.config)
        for path, module in model.named_modules():
            for name, update in updates(module):
                base, transposed = getattr(module, name), is_transposed(module, update.a.ndim)
                self._split_update(f"{path}.{name}", base, update.a, update.b, transposed, model.config)

    def _split_adapter(
        self, name: str, base: Any, inner: nn.Linear, outer: nn.Linear, config: PreTrainedConfig
    ) -> None:
        """Shards an adapter's matrices, `outer` (B) · `inner` (A), like the linear layer that it is added to.

        If the outputs of the layer are sharded, so are those of B, and A is whole. If the inputs of the layer are
        sharded, so are those of A, and B is whole. The gradient of the whole matrix is then whole on each rank; with
        sequence parallelism it is partial, and is all-reduced. Raises FamilyError for a layer of another style.
        """
        style, shard = self.split.styles.get(name, "replicate"), shard_of(base.weight)
        block = self._sequence_parallel.block_of(name) if self._sequence_parallel else self._single_block
        if shard is None and style == "replicate":
            if self._sequence_parallel is not None and self._sequence_parallel.has_partial_gradients(name):
                block.prepare_whole_parameter(inner.weight)
                block.prepare_whole_parameter(outer.weight)
            return
        if shard is None or not isinstance(base, nn.Linear):
            raise no_split(config, f"an adapter of {name} has no split like that of the layer ('{style}')")
        split_layer: Any
        split_layer, unsplit = (inner, outer) if shard.dim else (outer, inner)
        block.prepare_whole_parameter(unsplit.weight)
        split_layer.weight.data = shard.part(split_layer.weight.data, self.group.rank, self.group.size)
        split_layer.weight.tensor_shard, split_layer.weight.model_parallel = shard, True
        STYLES[style].install(split_layer, block, config)

    def _split_update(
        self, name: str, base: Tensor, a: Tensor, b: Tensor, transposed: bool, config: PreTrainedConfig
    ) -> None:
        """Shards a low-rank update of a parameter like this parameter.

        name: of the parameter. a: [experts, rank, inputs]. b: [experts, outputs, rank]. transposed: whether the
        parameter is [experts, inputs, outputs]. The matrix that stays whole is applied between collectives of the
        experts, so a rank computes a part of its gradient, which is all-reduced. Raises FamilyError for a parameter of
        another style than that of experts.
        """
        module, shard = name.rpartition(".")[0], shard_of(base)
        style = self.split.styles.get(module, "replicate")
        if shard is None:
            is_partial = style == "replicated_with_grad_allreduce"
            if is_partial or (self._sequence_parallel and self._sequence_parallel.has_partial_gradients(module)):
                all_reduce_gradient(a, self.group)
                all_reduce_gradient(b, self.group)
            return
        if style != EXPERTS or shard.dim not in (1, 2):
            raise no_split(config, f"an adapter of {name} has no split like that of the parameter ('{style}')")
        splits_outputs = (shard.dim == 2) == transposed
        matrix: Any
        matrix, whole = (b, a) if splits_outputs else (a, b)
        all_reduce_gradient(whole, self.group)
        own = Shard(1 if splits_outputs else 2, shard.blocks)
        matrix.data = own.part(matrix.data, self.group.rank, self.group.size)
        matrix.tensor_shard, matrix.model_parallel = own, True

    @contextmanager
    def whole(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """A context in which parameters are whole; when it ends, each rank keeps its shard of what was written."""
        # A tied parameter may occur twice.
        sliced = {parameter: shard for parameter in parameters if (shard := shard_of(parameter)) is not None}
        for parameter, shard in sliced.items():
            parameter.data = self.all_gather(parameter.data, shard)
        try:
            yield
        finally:
            for parameter, shard in sliced.items():
                parameter.data = shard.part(parameter.data, self.group.rank, self.group.size)

    def all_gather(self, part: Tensor, shard: Shard) -> Tensor:
        """All-gathers a parameter: returns the whole tensor, given this rank's shard."""
        return shard.whole(self.group.all_gather(part))


@dataclass(frozen=True)
class Style:
    """How modules with a style of `tp_plan` are split."""

    shard: Callable[[int], Shard | None]
    """Returns how a parameter with this number of dimensions is sharded."""
    install: Callable[[nn.Module, TensorParallelBlock, PreTrainedConfig], None]
    """Makes a module call the collectives of its block."""
    can_stay_whole: bool = False
    """Whether the module can be left unsplit, because its inputs and outputs are whole."""


def _wrap_forward(wrap: Callable[[nn.Module, Forward, TensorParallelBlock], Forward]) -> Callable[..., None]:
    def install(module: nn.Module, block: TensorParallelBlock, config: PreTrainedConfig) -> None:
        module.forward = wrap(module, module.forward, block)

    return install


def _column_parallel(module: nn.Module, block: TensorParallelBlock, config: PreTrainedConfig) -> None:
    """Copies the shared input before other hooks run: those of ZeRO-3 make a new tensor for each module."""
    module.register_forward_pre_hook(lambda _, inputs: block.copy_shared_input(inputs[0]))
    if isinstance(module, Conv1D):
        module.nf //= block.group.size


def _column_parallel_gathered(module: nn.Module, block: TensorParallelBlock, config: PreTrainedConfig) -> None:
    _column_parallel(module, block, config)
    forward = module.forward
    module.forward = lambda value: gather_from_tensor_parallel(forward(value), block.group)


def _row_parallel(module: nn.Module, forward: Forward, block: TensorParallelBlock) -> Forward:
    def run(value: Tensor) -> Tensor:
        block.release_input()
        bias: Tensor | None = getattr(module, "bias", None)
        if bias is None:
            return block.reduce_output(forward(value))
        # Added once, after the sum over ranks.
        weight = module.get_parameter("weight")
        product = value @ weight if isinstance(module, Conv1D) else functional.linear(value, weight)
        return block.reduce_output(product) + bias

    if isinstance(parameter := getattr(module, "bias", None), nn.Parameter):
        block.prepare_whole_parameter(parameter)
    return run


def _row_parallel_scattered(module: nn.Module, forward: Forward, block: TensorParallelBlock) -> Forward:
    row = _row_parallel(module, forward, block)
    return lambda value: row(scatter_to_tensor_parallel(value, block.group))


def _vocabulary_parallel_embedding(module: Any, forward: Forward, block: TensorParallelBlock) -> Forward:
    """Each rank looks up the tokens whose rows it holds and uses zeros for all others.

    Until the first call, ZeRO-3 may have partitioned the table, and `padding_idx` is a row of the whole one.
    """
    padding = getattr(module, "padding_idx", None)
    for parameter in module.parameters():
        if shard_of(parameter) is None:  # such as of a norm, which each rank applies to its own tokens
            all_reduce_gradient(parameter, block.group)

    def run(tokens: Tensor) -> Tensor:
        rows = module.get_parameter("weight").shape[0]
        first = block.group.rank * rows
        if padding is not None:  # the row that gets no gradient
            module.padding_idx = padding - first if first <= padding < first + rows else None
        is_local = (tokens >= first) & (tokens < first + rows)
        values = forward(torch.where(is_local, tokens - first, 0))
        return block.reduce_output(values.masked_fill(~is_local.unsqueeze(-1), 0))

    return run


def _column_parallel_embedding(module: nn.Module, forward: Forward, block: TensorParallelBlock) -> Forward:
    return lambda tokens: gather_from_tensor_parallel(forward(tokens), block.group)


def _experts(module: nn.Module, forward: Forward, block: TensorParallelBlock) -> Forward:
    """Sums the parts of every expert over the ranks.

    Each rank holds a part of every expert and computes a part of the gradients of the input and of the routing weights,
    which Llama 4 has multiplied with the input before. An expert's bias of outputs is whole on each rank, which adds
    its share of it.
    """
    bias = module._parameters.get("down_proj_bias")
    if bias is not None:
        all_reduce_gradient(bias, block.group)

    def copied(value: Tensor) -> Tensor:
        return block.copy_input(value) if value.is_floating_point() else value

    def run(*inputs: Tensor, **named: Tensor) -> Tensor:
        inputs, named = tuple(map(copied, inputs)), {name: copied(value) for name, value in named.items()}
        output: Tensor = forward(*inputs, **named)
        if bias is not None:
            _, chosen, weights = (*inputs, *named.values())
            others = 1 - 1 / block.group.size
            output = output - others * _biases(module.get_parameter("down_proj_bias"), chosen, weights)
        return block.reduce_output(output)

    return run


def _biases(bias: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns the biases [tokens, width] that experts have added. bias: [experts, width]; others: [tokens, top-k]."""
    by_expert = weights.new_zeros(len(chosen), len(bias)).scatter_add(1, chosen, weights)
    return (by_expert @ bias.to(weights.dtype)).to(bias.dtype)


def _gathered_input(module: nn.Module, forward: Forward, block: TensorParallelBlock) -> Forward:
    """For a norm of the columns of all ranks, each of which keeps its own columns."""
    return lambda value: scatter_to_tensor_parallel(
        forward(gather_from_tensor_parallel(value, block.group)), block.group
    )


def _identity(module: nn.Module, forward: Forward, block: TensorParallelBlock) -> Forward:
    """Each rank adds its share of what an expert without weights returns."""
    return lambda value: forward(value / block.group.size)


def _all_reduce_gradients(module: nn.Module, block: TensorParallelBlock, config: PreTrainedConfig) -> None:
    """All-reduces the gradients of whole parameters that each rank applies only to its own heads."""
    for parameter in module.parameters(recurse=False):
        all_reduce_gradient(parameter, block.group)


def _latent_keys(module: nn.Module, block: TensorParallelBlock, config: PreTrainedConfig) -> None:
    """For latent attention: the rotary part of the keys goes directly to this rank's heads."""
    rotated, forward = config.get_text_config(decoder=True).qk_rope_head_dim, module.forward

    def run(value: Tensor) -> Tensor:
        latent, keys = forward(value).tensor_split([-rotated], dim=-1)
        return torch.cat([latent, block.copy_input(keys)], dim=-1)

    module.forward = run


def _no_shard(dimensions: int) -> None:
    return None


def _shard_outputs(dimensions: int, blocks: int = 1) -> Shard:
    return Shard(max(dimensions - 2, 0), blocks)  # [output, input], [experts, output, input] or a bias


def _shard_inputs(dimensions: int, blocks: int = 1) -> Shard | None:
    return Shard(dimensions - 1, blocks) if dimensions > 1 else None


IDENTITY = "moe_identity_expert"
_GATHERED = Style(_shard_outputs, _column_parallel_gathered, can_stay_whole=True)
_SCATTERED = Style(_shard_inputs, _wrap_forward(_row_parallel_scattered), can_stay_whole=True)
STYLES: Mapping[str, Style] = {
    "colwise": Style(_shard_outputs, _column_parallel),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": Style(_shard_inputs, _wrap_forward(_row_parallel)),
    "rowwise_split_input": _SCATTERED,
    "rowwise_rep": _SCATTERED,
    "packed_colwise": Style(partial(_shard_outputs, blocks=2), _column_parallel),
    QKV: Style(partial(_shard_outputs, blocks=3), _column_parallel),
    "packed_rowwise": Style(partial(_shard_inputs, blocks=2), _wrap_forward(_row_parallel)),
    "embedding_rowwise": Style(lambda _: Shard(0), _wrap_forward(_vocabulary_parallel_embedding), can_stay_whole=True),
    "embedding_colwise": Style(lambda _: Shard(1), _wrap_forward(_column_parallel_embedding), can_stay_whole=True),
    EXPERTS: Style(_no_shard, _wrap_forward(_experts)),
    "all_reduce": Style(_no_shard, _wrap_forward(_experts)),  # of experts that every token has
    IDENTITY: Style(_no_shard, _wrap_forward(_identity)),
    "gathered_input": Style(_no_shard, _wrap_forward(_gathered_input)),
    "replicated_with_grad_allreduce": Style(_no_shard, _all_reduce_gradients),
    "mla_kv_a_proj": Style(_no_shard, _latent_keys),
    "replicate": Style(_no_shard, lambda *_: None),  # computes the same on every rank
}
"""The styles of `transformers` (`ALL_PARALLEL_STYLES`) that are supported here, and those of usual plans."""


def plan_split(model: PreTrainedModel, degree: int, whole: Part = "") -> DeclaredSplit:
    """Returns how the model's own plan splits it among `degree` ranks; the model may be on the meta device.

    whole: the part of each layer that is left unsplit. A module with whole inputs and outputs (head, embedding) is left
    unsplit if its size is not a multiple of the degree, or if it shares its weight with a module that is sharded
    differently. Raises FamilyError.
    """
    plan, config = dict(model.tp_plan or {}), model.config
    usual = {} if splits_layers(plan) else usual_plan(model)
    if not plan and not usual:
        message = "it declares no tensor parallel plan (tp_plan), and its matrices have unusual names"
        raise no_split(config, message)
    attention = {sublayer_of(name) for name in with_queries(model)}

    def is_split(name: str) -> bool:
        sublayer = sublayer_of(name)
        return not whole or not sublayer or (sublayer in attention) != (whole == "attention")

    plan |= {key: style for name, style in plan_of_experts(model).items() if (key := _pattern(name)) in plan}
    declared = {name: plan[key] for name, _ in model.named_modules() if (key := _pattern(name)) in plan}
    styles = parametric_activations(model) | usual | declared
    styles = {name: style for name, style in styles.items() if is_split(name)}
    by_parameter: dict[int, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = (plan.get(_pattern(name)) or usual.get(name)) if is_split(name) else None
        style = own or styles.get(_module(name), "replicate")
        by_parameter.setdefault(id(parameter), {})[name] = style
    requested = {*styles.values(), *(style for uses in by_parameter.values() for style in uses.values())}
    unknown = sorted(requested - STYLES.keys())
    if unknown:
        raise no_split(config, f"its plan asks for the styles {', '.join(unknown)}")
    shards: dict[str, Shard] = {}
    for uses in by_parameter.values():
        shard = _shard(model, uses, degree)
        for name, style in uses.items():
            if shard is not None:
                shards[name] = shard
            elif STYLES[style].can_stay_whole:
                styles.pop(_module(name), None)
    if all(_pattern(name) == name for name in shards):
        raise no_split(config, f"its plan splits no weight of the layers among {degree} ranks")
    counts_heads = attention_modules(model) if usual and whole != "attention" else ()
    return DeclaredSplit(styles, shards, counts_heads=frozenset(counts_heads))


def _shard(model: PreTrainedModel, uses: Mapping[str, str], degree: int) -> Shard | None:
    """Returns how a parameter is sharded, given the style of each of its names; None if it stays whole."""
    by_name: dict[str, Shard | None] = {}
    for name, style in uses.items():
        shape = model.get_parameter(name).shape
        shard = STYLES[style].shard(len(shape))
        if shard is not None and len(shape) == 2 and isinstance(model.get_submodule(_module(name)), Conv1D):
            shard = replace(shard, dim=1 - shard.dim)  # stored [inputs, outputs]
        if shard is not None and shape[shard.dim] % (shard.blocks * degree):
            if not STYLES[style].can_stay_whole:
                reason = f"dimension {shard.dim} of {name} {list(shape)} is not divisible by {degree}"
                raise no_split(model.config, reason)
            shard = None
        by_name[name] = shard
    if len(set(by_name.values())) == 1:
        return next(iter(by_name.values()))
    for name, shard in by_name.items():
        if shard is not None and not STYLES[uses[name]].can_stay_whole:
            raise no_split(model.config, f"{name} is tied to a weight that is split in another way")
    return None


def _module(name: str) -> str:
    """Returns the name of the module that holds a parameter."""
    return name.rpartition(".")[0]


def _pattern(name: str) -> str:
    """Returns a name in the notation of plans, such as `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
