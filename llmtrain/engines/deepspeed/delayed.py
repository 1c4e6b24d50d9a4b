"""Leaves the gradients of matrices out of a backward pass, to compute them later (arXiv 2401.10241, section 2).

The previous stage waits for the gradient of a linear layer's input, but not for that of its weight, which takes as long
to compute. Weights of other modules, such as those of experts, get their gradients in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from llmtrain.models.tensor.collectives import has_reduced_gradient

Delayed = Callable[[], None]
"""Adds the gradient of one matrix."""


class DelayedWeights(TorchFunctionMode):
    """Keeps what the gradients of linear layers need; `take` returns the computations.

    It is active within the linear layers themselves, and so also when a backward pass recomputes a forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._delayed: list[Delayed] = []
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                module.forward = self._within(module.forward)  # type: ignore[method-assign]

    def _within(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(value: Tensor) -> Tensor:
            with self:
                return forward(value)

        return run

    def take(self) -> list[Delayed]:
        """Returns what was delayed since the last call, in the order of the backward pass."""
        taken, self._delayed = self._delayed, []
        return taken

    def keep(self, accumulate: Delayed) -> None:
        """Adds what was left out of a backward pass."""
        self._delayed.append(accumulate)

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled() and not named:
            if function is functional.linear and _is_trained(arguments[1]):
                value, weight, bias = (*arguments, None)[:3]
                return _DelayedProduct.apply(value, weight, bias, False, self.keep)  # type: ignore[no-untyped-call]
            if function is torch.addmm and _is_trained(arguments[2]):
                bias, value, weight = arguments
                return _DelayedProduct.apply(value, weight, bias, True, self.keep)  # type: ignore[no-untyped-call]
        return function(*arguments, **(named or {}))


def _is_trained(weight: Any) -> bool:
    is_matrix = isinstance(weight, nn.Parameter) and weight.requires_grad and weight.dim() == 2
    return is_matrix and not has_reduced_gradient(
        weight
    )  # the hook that sums a gradient over ranks needs the backward pass


class _DelayedProduct(torch.autograd.Function):
    """value · weightᵀ + bias; or value · weight + bias if `transposed`."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool, keep: Callable[..., None]
    ) -> Tensor:
        ctx.transposed, ctx.keep, ctx.value_type = transposed, keep, value.dtype
        ctx.bias_type = None if bias is None else bias.dtype
        kind = value.device.type
        if torch.is_autocast_enabled(kind):  # converted first, so that the copy is saved, not the original
            value = value.to(torch.get_autocast_dtype(kind))
        matrix = weight.to(value.dtype)
        ctx.weight = weight  # not by save_for_backward, for which a checkpoint would return a copy
        ctx.save_for_backward(value)
        bias = None if bias is None else bias.to(value.dtype)
        return functional.linear(value, matrix.t() if transposed else matrix, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (value,) = ctx.saved_tensors
        weight, transposed = ctx.weight, ctx.transposed
        matrix = weight.detach().to(gradient.dtype)
        of_value = (gradient @ (matrix.t() if transposed else matrix)).to(ctx.value_type)
        rows = gradient.flatten(0, -2)
        of_bias = rows.sum(0).to(ctx.bias_type) if ctx.bias_type is not None and ctx.needs_input_grad[2] else None
        inputs = value.detach().flatten(0, -2)

        @torch.no_grad()
        def accumulate() -> None:
            left, right = (inputs, rows) if transposed else (rows, inputs)
            if weight.grad is not None and weight.grad.dtype == left.dtype == right.dtype:
                weight.grad.addmm_(left.t(), right)  # adds in place, without the product in memory
            else:
                product = (left.t() @ right).to(weight.dtype)
                weight.grad = product if weight.grad is None else weight.grad.add_(product)

        ctx.keep(accumulate)
        return of_value if ctx.needs_input_grad[0] else None, None, of_bias, None, None
