"""The fused experts of a layer as grouped products, distributed over ranks, and with low-rank updates.

With expert parallelism, a rank holds some of the experts of each layer. It sends each of its tokens to the ranks that
hold the experts which the router has chosen, and gets the results back; no token is dropped. Tokens are sorted once by
expert, which sorts them by rank, too. Tensor parallel ranks hold the same tokens, and each of them sends an equal part.

An adapter of PEFT's `target_parameters` adds B·A to a parameter, such as to the stack with the matrices of all experts,
[experts, outputs, inputs]. PEFT adds the products to the stacks in each pass, and reads the stacks outside of their
module. Here A [experts, rank, inputs] and B [experts, outputs, rank] are parameters of the same module, so what gathers
or shards its parameters (ZeRO-3, FSDP2, tensor parallelism) treats them alike, and they are applied to the tokens of
their expert only. Other parameters, such as those of routers, are small; B·A is added to them for each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmtrain.models.nf4 import Nf4Stack
from llmtrain.models.tensor.collectives import Communicator, exchange_rows, gather_rows, own_rows, scatter_rows
from llmtrain.overrides.transformers import EXPERTS_FUNCTION, grouped_linear, use_experts_function
from llmtrain.plan.facts.built_model import has_fused_experts

ALIGNMENT = 16
"""Bytes: rows of grouped products on GPUs begin at a multiple (`torch.nn.functional.grouped_mm`)."""


class Update(NamedTuple):
    """A low-rank update of a parameter, scale · B·A."""

    a: Tensor
    """[experts, rank, inputs], or [rank, inputs]."""
    b: Tensor
    """[experts, outputs, rank], or [outputs, rank]."""
    scale: float


def is_transposed(module: nn.Module, dimensions: int) -> bool:
    """Whether a parameter of a module, with that many dimensions, holds [experts, inputs, outputs] to PEFT."""
    return bool(getattr(module, "is_transposed", False)) and dimensions == 3


def update_shapes(module: nn.Module, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the matrices A and B of a low-rank update of a parameter, given its shape."""
    *experts, outputs, inputs = shape
    if is_transposed(module, len(shape)):
        outputs, inputs = inputs, outputs
    return (*experts, rank, inputs), (*experts, outputs, rank)


def add_update(module: Any, name: str, shape: tuple[int, ...], rank: int, scale: float) -> None:
    """Adds a trained low-rank update to a parameter of a module; its B is 0.

    name: of the parameter in the module. shape: of the whole parameter, which may be partitioned.
    """
    held: nn.Parameter | Nf4Stack = getattr(module, name)
    for side, own in zip("AB", update_shapes(module, shape, rank), strict=True):
        zeros = torch.zeros(own, dtype=held.dtype, device=held.device)
        module.register_parameter(f"lora_{side}_{name}", nn.Parameter(zeros))
    if not hasattr(module, "update_scales"):
        module.update_scales = {}
        if has_fused_experts(module):
            use_experts_function(module)
        elif "forward" in vars(module):
            raise ValueError(f"the forward pass of {type(module).__name__} is replaced, and would not read updates")
        else:
            module.__class__ = type(type(module).__name__, (_AddsUpdates, type(module)), {})
    module.update_scales[name] = scale


def updates(module: Any) -> Iterator[tuple[str, Update]]:
    """Yields the names of the updated parameters of a module, without those of its children, and their updates."""
    for name, scale in getattr(module, "update_scales", {}).items():
        yield name, Update(getattr(module, f"lora_A_{name}"), getattr(module, f"lora_B_{name}"), scale)


class _AddsUpdates:
    """A module whose forward pass reads updated parameters, whatever it does with them."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Hides the parameters behind updated ones during the pass."""
        parent: Any = super()
        hiding = vars(self)
        before = dict(hiding)  # a copy of nn.DataParallel has its parameters here
        for name, (a, b, scale) in updates(self):
            parameter = getattr(self, name)
            update = b @ a
            if is_transposed(self, a.ndim):  # type: ignore[arg-type]
                update = update.transpose(-2, -1)
            hiding[name] = parameter + scale * update.to(parameter.dtype)
        try:
            return parent.forward(*args, **named)
        finally:
            hiding.clear()
            hiding.update(before)


class Routes(NamedTuple):
    """The choices of all tokens, sorted by expert. A choice is one of the `per_token` experts of a token."""

    order: Tensor
    """[tokens · per_token]: the choices' numbers; those of a token are neighbours in the unsorted order."""
    experts: Tensor
    """[tokens · per_token]: the sorted choices' experts."""
    ends: Tensor
    """[experts], int32: the end of each expert's choices."""
    per_token: int

    @property
    def places(self) -> Tensor:
        """[tokens · per_token]: where each choice is among the sorted ones."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(places), device=places.device)
        return places


def route(chosen: Tensor, experts: int) -> Routes:
    """Sorts the experts that tokens have chosen, [tokens, per_token]."""
    sorted_experts, order = torch.sort(chosen.reshape(-1))
    # As in `transformers`: torch counts integers by `histc` on GPUs only, and `bincount` would wait for the device.
    counted = sorted_experts.int() if chosen.is_cuda else sorted_experts.float()
    counts = torch.histc(counted, bins=experts, min=0, max=experts - 1)
    return Routes(order, sorted_experts, torch.cumsum(counts, 0, dtype=torch.int32), chosen.shape[-1])


def dispatch(hidden: Tensor, routes: Routes) -> Tensor:
    """Returns the token of each sorted choice, [tokens · per_token, width]."""
    return hidden[routes.order // routes.per_token]


def combine(outputs: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """Returns the weighted sum of each token's outputs, [tokens, width].

    outputs: of the sorted choices. weights: [tokens, per_token].
    """
    weighted = outputs * weights.reshape(-1)[routes.order].unsqueeze(-1)
    return weighted[routes.places].view(*weights.shape, outputs.shape[-1]).sum(1)


def multiply(
    inputs: Tensor, weight: Tensor | Nf4Stack, routes: Routes, bias: Tensor | None, transposed: bool
) -> Tensor:
    """Returns the product of each sorted choice with the matrix of its expert.

    weight: [experts, outputs, inputs], or [experts, inputs, outputs] if transposed. bias: [experts, outputs].
    """
    if isinstance(weight, Nf4Stack):
        product = weight.multiply(inputs, routes.ends, transposed)
        return product if bias is None else product + bias[routes.experts]
    return grouped_linear(inputs, weight, routes.ends, None if bias is None else bias[routes.experts], transposed)


def multiply_update(inputs: Tensor, update: Update, routes: Routes) -> Tensor:
    """Returns the product of each sorted choice with the update of its expert's matrix."""
    rank = update.a.shape[1]
    a, b = update.a, update.b
    if lacking := -rank % (ALIGNMENT // a.element_size()):
        a, b = pad(a, (0, 0, 0, lacking)), pad(b, (0, lacking))
    inner = grouped_linear(inputs, a, routes.ends)
    return update.scale * grouped_linear(inner, b, routes.ends)


def apply_experts(module: Any, inputs: Tensor, routes: Routes) -> Tensor:
    """Applies the experts of a module, with their updates, to the sorted choices, [choices, width]."""
    updated = dict(updates(module))

    def project(inputs: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        product = multiply(inputs, getattr(module, name), routes, bias, module.is_transposed)
        return product + multiply_update(inputs, updated[name], routes) if name in updated else product

    inner = project(inputs, "gate_up_proj" if module.has_gate else "up_proj")
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = project(inner, "down_proj")
    return module.post_expert_norm(outputs) if module.has_post_expert_norm else outputs


class ExpertGroups(NamedTuple):
    """The groups of a rank that holds some of the experts of each layer."""

    experts: Communicator
    """The ranks that together hold all experts."""
    tensor: Communicator
    """The tensor parallel ranks, which hold the same tokens; this rank only if there are no others."""


def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the experts of a module, with its updates, on all ranks that hold them.

    hidden_states: [tokens, width]. top_k_index: [tokens, per_token], each token's experts. top_k_weights: their
    weights.
    """
    groups: ExpertGroups | None = getattr(module, "expert_groups", None)
    if groups is None:
        routes = route(top_k_index, module.num_experts)
        outputs = apply_experts(module, dispatch(hidden_states, routes), routes)
        return combine(outputs, top_k_weights, routes).to(hidden_states.dtype)
    hidden, weights = (scatter_rows(value, groups.tensor) for value in (hidden_states, top_k_weights))
    routes = route(own_rows(top_k_index, groups.tensor), module.num_experts)
    outputs = _apply_distributed(module, dispatch(hidden, routes), routes, groups.experts)
    combined = combine(outputs, weights, routes).to(hidden_states.dtype)
    return gather_rows(combined, len(hidden_states), groups.tensor)


def _apply_distributed(module: Any, inputs: Tensor, routes: Routes, group: Communicator) -> Tensor:
    """Sends the sorted choices to the ranks of their experts; returns what the experts made of them, in this order."""
    chosen = routes.ends.diff(prepend=routes.ends.new_zeros(1))
    local = module.num_experts // group.size
    arrived = group.all_to_all(chosen, [local] * group.size, [local] * group.size).view(group.size, local)
    sent, received = (counts.sum(1).tolist() for counts in (chosen.view(group.size, local), arrived))
    rows = exchange_rows(inputs, sent, received, group)
    # Those of each rank are sorted by expert.
    numbers = torch.arange(local, device=inputs.device).repeat(group.size)
    chosen_here = numbers.repeat_interleave(arrived.flatten(), output_size=len(rows))
    if not len(rows):  # torch's grouped products have no backward pass without rows, and weights need a gradient
        rows, chosen_here = pad(rows, (0, 0, 0, 1)), numbers[:1]
    own = route(chosen_here[:, None], local)
    outputs = apply_experts(module, dispatch(rows, own), own)[own.places]
    return exchange_rows(outputs[: sum(received)], received, sent, group)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, forward)
