"""Tensor parallelism by the plan that a `transformers` family declares (`tp_plan`), over any group of ranks.

The model keeps its modules and their names. A rank holds slices of the parameters that the plan names, and the inputs
and outputs of their modules are exchanged as in Megatron-LM (arXiv 1909.08053). Parameters remain plain tensors,
because DeepSpeed's optimizers flatten them: the styles of `transformers` itself create DTensors, which those optimizers
do not accept.

Between split modules, activations are whole and equal on all ranks, and so are their gradients. What enters several
modules (query, key and value; gate and up) enters once, so that a layer of attention and feed-forward needs four sums
over the ranks: one for each of the two in the forward pass, and one in the backward pass. Where a family allows it,
ranks hold slices of the sequence instead, and each sum becomes a reduction and a gathering (`regions.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.errors import FamilyError
from llmtrain.models.tensor.exchanges import (
    Forward,
    Ranks,
    Shard,
    SplitSection,
    gather_slices,
    scatter,
    shard_of,
    sum_gradient,
)
from llmtrain.models.tensor.regions import EXPERTS, Regions


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
    """Parameter → how it is sliced; a tied parameter is listed under each of its names."""
    regions: bool = False
    """Whether each rank holds a slice of every sequence outside attention and feed-forward (`regions.py`)."""


class TensorParallel:
    """One rank's part in the split: slices parameters, installs the exchanges of modules and joins slices again."""

    def __init__(self, split: DeclaredSplit, ranks: Ranks) -> None:
        self.split = split
        self.ranks = ranks
        self._regions = Regions(ranks, split.styles) if split.regions else None
        self._joined, self._alone = SplitSection(ranks), SplitSection(ranks, one_module=True)

    def slice(self, name: str, parameter: nn.Parameter) -> None:
        """Replaces a parameter, which may be a meta tensor, by this rank's slice. name: its name in the whole model."""
        shard = self.split.shards.get(name)
        if shard is not None:
            parameter.data = shard.part(parameter.data, self.ranks.rank, self.ranks.size)

    def install(self, model: PreTrainedModel, names: Mapping[str, str]) -> None:
        """Makes the modules of a sliced model, or of a part of one, give the results of the whole model.

        names: parameter of `model` → its name in the whole model.
        """
        for own, name in names.items():
            if name in self.split.shards:
                parameter: Any = model.get_parameter(own)
                parameter.tensor_shard = self.split.shards[name]
                parameter.model_parallel = True  # read by DeepSpeed: each rank's slice counts in the norm
        for name, module in model.named_modules():
            style = self.split.styles.get(name)
            if style is not None and next(module.parameters(), None) is not None:
                section = self._alone if _pattern(name) == name else self._joined
                if self._regions is not None:
                    section = self._regions.section_of(name)
                STYLES[style].install(module, section, model.config)
        if self._regions is not None:
            self._regions.install(model)

    def adapt(self, name: str, base: Any, inner: nn.Linear, outer: nn.Linear, config: PreTrainedConfig) -> None:
        """Splits the matrices of an adapter, `outer`·`inner`, as the linear layer that it is added to.

        If the layer's outputs are split, so are those of the outer matrix, and the inner matrix is whole. If the
        layer's inputs are split, so are those of the inner matrix, and the outer one is whole. Gradients of whole
        matrices are then whole on each rank, or summed over the ranks if these hold slices of the sequence. Raises
        FamilyError for a layer whose outputs are exchanged differently.
        """
        style, shard = self.split.styles.get(name, "replicate"), shard_of(base.weight)
        section = self._regions.section_of(name) if self._regions else self._alone
        if shard is None and style == "replicate":
            if self._regions is not None and self._regions.has_partial_gradients(name):
                section.use(inner.weight)
                section.use(outer.weight)
            return
        if shard is None or not isinstance(base, nn.Linear):
            raise no_split(config, f"an adapter of {name} has no split like that of the layer ('{style}')")
        split_layer: Any
        split_layer, unsplit = (inner, outer) if shard.dim else (outer, inner)
        section.use(unsplit.weight)
        split_layer.weight.data = shard.part(split_layer.weight.data, self.ranks.rank, self.ranks.size)
        split_layer.weight.tensor_shard, split_layer.weight.model_parallel = shard, True
        STYLES[style].install(split_layer, section, config)

    @contextmanager
    def whole(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Makes parameters whole inside the context; each rank then keeps its slice of what was written there."""
        # A tied parameter may occur twice.
        sliced = {parameter: shard for parameter in parameters if (shard := shard_of(parameter)) is not None}
        for parameter, shard in sliced.items():
            parameter.data = self.join(parameter.data, shard)
        try:
            yield
        finally:
            for parameter, shard in sliced.items():
                parameter.data = shard.part(parameter.data, self.ranks.rank, self.ranks.size)

    def join(self, part: Tensor, shard: Shard) -> Tensor:
        """Gathers the slices of all ranks and returns the whole tensor."""
        return shard.whole(self.ranks.gather(part))


@dataclass(frozen=True)
class Style:
    """The meaning of a style that a plan names."""

    shard: Callable[[int], Shard | None]
    """Returns how a parameter with this number of dimensions is sliced."""
    install: Callable[[nn.Module, SplitSection, PreTrainedConfig], None]
    """Makes a module exchange its inputs and outputs."""
    alone: bool = False
    """Whether inputs and outputs are whole, so that the module can also be left unsplit."""


def _wrapping(wrap: Callable[[nn.Module, Forward, SplitSection], Forward]) -> Callable[..., None]:
    def install(module: nn.Module, section: SplitSection, config: PreTrainedConfig) -> None:
        module.forward = wrap(module, module.forward, section)

    return install


def _column(module: nn.Module, section: SplitSection, config: PreTrainedConfig) -> None:
    """Lets the input enter before other hooks: those of ZeRO-3 make a tensor of their own for each module."""
    module.register_forward_pre_hook(lambda _, inputs: section.enter(inputs[0]))


def _column_gathered(module: nn.Module, section: SplitSection, config: PreTrainedConfig) -> None:
    _column(module, section, config)
    forward = module.forward
    module.forward = lambda value: gather_slices(forward(value), section.ranks)


def _row(module: nn.Module, forward: Forward, section: SplitSection) -> Forward:
    def run(value: Tensor) -> Tensor:
        section.close()
        bias: Tensor | None = getattr(module, "bias", None)
        if bias is None:
            return section.leave(forward(value))
        # Added once, after the sum over ranks.
        return section.leave(functional.linear(value, module.get_parameter("weight"))) + bias

    if isinstance(own := getattr(module, "bias", None), nn.Parameter):
        section.use(own)
    return run


def _row_scattered(module: nn.Module, forward: Forward, section: SplitSection) -> Forward:
    row = _row(module, forward, section)
    return lambda value: row(scatter(value, section.ranks))


def _table_of_rows(module: Any, forward: Forward, section: SplitSection) -> Forward:
    """Each rank looks up the tokens whose rows it holds and uses zeros for all others.

    Until the first call, ZeRO-3 may have partitioned the table, and `padding_idx` is a row of the whole one.
    """
    padding = getattr(module, "padding_idx", None)

    def run(tokens: Tensor) -> Tensor:
        rows = module.get_parameter("weight").shape[0]
        first = section.ranks.rank * rows
        if padding is not None:  # the row that gets no gradient
            module.padding_idx = padding - first if first <= padding < first + rows else None
        own = (tokens >= first) & (tokens < first + rows)
        values = forward(torch.where(own, tokens - first, 0))
        return section.leave(values.masked_fill(~own.unsqueeze(-1), 0))

    return run


def _table_of_columns(module: nn.Module, forward: Forward, section: SplitSection) -> Forward:
    return lambda tokens: gather_slices(forward(tokens), section.ranks)


def _experts(module: nn.Module, forward: Forward, section: SplitSection) -> Forward:
    """Sums the parts of every expert over the ranks.

    Each rank holds a part of every expert and computes a part of the gradients of the input and of the routing weights.
    """

    def run(value: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return section.leave(forward(section.admit(value), chosen, section.admit(weights)))

    return run


def _sum_gradients(module: nn.Module, section: SplitSection, config: PreTrainedConfig) -> None:
    """Sums the gradients of whole parameters that each rank uses only for its own heads."""
    for parameter in module.parameters(recurse=False):
        sum_gradient(parameter, section.ranks)


def _latent_keys(module: nn.Module, section: SplitSection, config: PreTrainedConfig) -> None:
    """For latent attention: the rotary part of the keys goes directly to this rank's heads."""
    rotated, forward = config.get_text_config(decoder=True).qk_rope_head_dim, module.forward

    def run(value: Tensor) -> Tensor:
        latent, keys = forward(value).tensor_split([-rotated], dim=-1)
        return torch.cat([latent, section.admit(keys)], dim=-1)

    module.forward = run


def _whole(dimensions: int) -> None:
    return None


def _by_output(dimensions: int, blocks: int = 1) -> Shard:
    return Shard(max(dimensions - 2, 0), blocks)  # [output, input], [experts, output, input] or a bias


def _by_input(dimensions: int, blocks: int = 1) -> Shard | None:
    return Shard(dimensions - 1, blocks) if dimensions > 1 else None


_GATHERED = Style(_by_output, _column_gathered, alone=True)
_SCATTERED = Style(_by_input, _wrapping(_row_scattered), alone=True)
STYLES: Mapping[str, Style] = {
    "colwise": Style(_by_output, _column),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": Style(_by_input, _wrapping(_row)),
    "rowwise_split_input": _SCATTERED,
    "rowwise_rep": _SCATTERED,
    "packed_colwise": Style(partial(_by_output, blocks=2), _column),
    "packed_rowwise": Style(partial(_by_input, blocks=2), _wrapping(_row)),
    "embedding_rowwise": Style(lambda _: Shard(0), _wrapping(_table_of_rows), alone=True),
    "embedding_colwise": Style(lambda _: Shard(1), _wrapping(_table_of_columns), alone=True),
    EXPERTS: Style(_whole, _wrapping(_experts)),
    "replicated_with_grad_allreduce": Style(_whole, _sum_gradients),
    "mla_kv_a_proj": Style(_whole, _latent_keys),
    "replicate": Style(_whole, lambda *_: None),  # computes the same on every rank
}
"""The styles of `transformers` (`ALL_PARALLEL_STYLES`) that are supported here."""


def plan_split(model: PreTrainedModel, degree: int) -> DeclaredSplit:
    """Returns how the model's own plan splits it among `degree` ranks; the model may be on the meta device.

    A module with whole inputs and outputs (head, embedding) is left unsplit if its size is not a multiple of the
    degree, or if it shares its weight with a module that is not sliced alike. Raises FamilyError.
    """
    plan, config = model.tp_plan, model.config
    if not plan:
        raise no_split(config, "it declares no tensor parallel plan (tp_plan)")
    styles = {name: plan[key] for name, _ in model.named_modules() if (key := _pattern(name)) in plan}
    by_parameter: dict[int, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        style = plan.get(_pattern(name)) or styles.get(_module(name), "replicate")
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
            elif STYLES[style].alone:
                styles.pop(_module(name), None)
    if all(_pattern(name) == name for name in shards):
        raise no_split(config, f"its plan splits no weight of the layers among {degree} ranks")
    return DeclaredSplit(styles, shards)


def _shard(model: PreTrainedModel, uses: Mapping[str, str], degree: int) -> Shard | None:
    """Returns how a parameter is sliced, given the style of each of its names; None if it stays whole."""
    wanted: dict[str, Shard | None] = {}
    for name, style in uses.items():
        shape = model.get_parameter(name).shape
        shard = STYLES[style].shard(len(shape))
        if shard is not None and shape[shard.dim] % (shard.blocks * degree):
            if not STYLES[style].alone:
                reason = f"dimension {shard.dim} of {name} {list(shape)} is not divisible by {degree}"
                raise no_split(model.config, reason)
            shard = None
        wanted[name] = shard
    if len(set(wanted.values())) == 1:
        return next(iter(wanted.values()))
    for name, shard in wanted.items():
        if shard is not None and not STYLES[uses[name]].alone:
            raise no_split(model.config, f"{name} is tied to a weight that is split in another way")
    return None


def _module(name: str) -> str:
    """Returns the name of the module that holds a parameter."""
    return name.rpartition(".")[0]


def _pattern(name: str) -> str:
    """Returns a name in the notation of plans, such as `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
