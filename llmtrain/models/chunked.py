"""The loss of a language model without the logits of all tokens at once.

With a vocabulary of 128,000 the logits of 8,192 tokens, their softmax and its gradient are 12 GB. Here the head of any
`transformers` causal LM runs on some tokens at a time: the model's own forward is called again with its backbone
replaced by what that has returned, so that whatever the family does with its logits (scale, cap) is done.

Two ways, equal in value. *Fused* takes the gradient of each part right away, as Liger's fused loss does
(arXiv 2410.10989, section 3.2): nothing is computed twice, and what stays until the backward pass is the gradient of
the hidden states and of the head. *Recomputed* forgets the logits and makes them again in the backward pass: one more
product of the head, for ZeRO-3, which has parameters whole only within their module, and for fp16, whose gradients must
be scaled before they are taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from llmtrain.errors import Problem, RecipeError
from llmtrain.models.compare import Comparison
from llmtrain.models.cut import STUMBLES, reference
from llmtrain.models.loss import target_loss_sum
from llmtrain.models.stages import backbone
from llmtrain.models.tiny import shrink


class NoChunksError(Exception):
    """The family's forward does not come apart into backbone and head."""


LAYERS = 4
"""Of the tiny copy: families whose kinds of layers alternate, or share weights, cannot be built with fewer."""
ALL = 2**31
"""Tokens of a chunk that has all of them."""
TOLERANCE = 1e-5
"""Largest deviation in fp32 of a loss, and of a gradient relative to the largest: sums in another order."""


class _Given(nn.Module):
    """In the place of a backbone: returns what it was given."""

    def __init__(self, base: nn.Module, output: Any) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple, where torch does not take it for a child
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        """What a forward asks its backbone for: constants that logits are multiplied with."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"][0], name)


@dataclass
class Losses(ModelOutput):  # type: ignore[misc]
    """What a model with `ChunkedLoss` returns for targets: a dictionary, in which engines find tensors."""

    loss_sum: Tensor | None = None
    """Sum of the cross-entropies over the target tokens."""
    aux_loss: Tensor | None = None


@dataclass
class ChunkedLoss:
    """Gives a causal LM's forward a further argument, `targets`, for which it returns `Losses` instead of logits.

    Raises NoChunksError where the family has no backbone to replace.
    """

    model: PreTrainedModel
    tokens: int
    """Of a chunk."""
    recomputed: bool
    loss_of: Callable[[Tensor, Tensor], Tensor] = target_loss_sum
    """Sum of the cross-entropies of a chunk's logits."""
    _whole: Callable[..., Any] = field(init=False, repr=False)
    """The model's own forward."""
    _kind: type = field(init=False, repr=False)
    """What the backbone returns."""
    _parent: nn.Module = field(init=False, repr=False)
    _name: str = field(init=False)
    """Where the backbone is, of whose hidden states the head makes logits."""

    def __post_init__(self) -> None:
        base: nn.Module = backbone(self.model)
        if isinstance(inner := getattr(base, "decoder", None), PreTrainedModel):
            base = inner  # of families that come from an encoder and a decoder: their head asks this one
        name = next((name for name, one in self.model.named_modules() if one is base), "")
        if not name or "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            raise NoChunksError(f"{self.model.config.model_type} has no head that can be called on its own")
        parent, _, self._name = name.rpartition(".")
        self._parent = self.model.get_submodule(parent)
        self._whole = self.model.forward
        self.model.forward = self.forward
        self.model.chunked_loss = self

    def forward(self, *args: Any, targets: Tensor | None = None, **kwargs: Any) -> Any:
        """The model's own forward, unless there are targets.

        targets: [batch, T], shifted, IGNORE where there is none.
        """
        if targets is None:
            return self._whole(*args, **kwargs)
        if targets.numel() <= self.tokens:  # a chunk has them all
            output = self._whole(*args, **kwargs)
            return Losses(loss_sum=self.loss_of(output.logits, targets), aux_loss=getattr(output, "aux_loss", None))
        seen: list[Any] = []
        handle = getattr(self._parent, self._name).register_forward_hook(lambda *call: seen.append(call[2]))
        try:
            # One position instead of none, since some heads cannot do with an empty tensor. Its logits are not used.
            output = self._whole(*args, **kwargs, logits_to_keep=1)
        finally:
            handle.remove()
        self._kind = type(seen[0])
        loss_sum = self.loss_sum(seen[0][0], targets)
        return Losses(loss_sum=loss_sum, aux_loss=getattr(output, "aux_loss", None))

    def loss_sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropies.

        hidden: [batch, T, width], what the backbone returned; targets: [batch, T].
        """
        hidden, targets = hidden.reshape(1, -1, hidden.size(-1)), targets.reshape(1, -1)
        if not torch.is_grad_enabled() or targets.size(1) <= self.tokens:
            return self._sum(self._parts(hidden, targets), self._part)
        if self.recomputed:
            return self._sum(self._parts(hidden, targets), partial(checkpoint, self._part, use_reentrant=False))
        loss: Tensor = _Fused.apply(self, hidden, targets, *self._head())  # type: ignore[no-untyped-call]
        return loss

    def _parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(torch.split(tensor, self.tokens, dim=1) for tensor in tensors), strict=True)

    def _sum(self, parts: Iterator[tuple[Tensor, ...]], loss_of: Callable[..., Tensor]) -> Tensor:
        return torch.stack([loss_of(*part) for part in parts]).sum()

    def _part(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Of some tokens."""
        with self._returning(hidden):
            logits = self._whole(input_ids=torch.zeros_like(targets), use_cache=False).logits
        return self.loss_of(logits, targets)

    @contextmanager
    def _returning(self, hidden: Tensor) -> Iterator[None]:
        """The backbone replaced by one that returns `hidden`. Not called, it runs none of its hooks."""
        modules = self._parent._modules
        base = self._parent.get_submodule(self._name)
        modules[self._name] = _Given(base, self._kind(last_hidden_state=hidden))
        try:
            yield
        finally:
            modules[self._name] = base

    def _head(self) -> list[nn.Parameter]:
        """The trained parameters outside the backbone, a tied table among them."""
        modules = self._parent._modules
        base, modules[self._name] = modules[self._name], nn.Module()
        try:
            return [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        finally:
            modules[self._name] = base


class _Fused(torch.autograd.Function):
    """Takes the gradient of each part of the tokens as soon as its loss is there."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkedLoss, hidden: Tensor, targets: Tensor, *head: Tensor) -> Tensor:
        """The sum of the losses; the gradients are kept."""
        total = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        # In fp32: a sum over parts in a lower type would round where one product over all tokens does not.
        of_head: list[Tensor] = [torch.zeros_like(one, dtype=torch.float32) for one in head]
        parts = loss._parts(hidden, targets, of_hidden)
        for part, labels, gradient in parts:
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss_sum = loss._part(part, labels)
            own, *others = torch.autograd.grad(loss_sum, (part, *head), allow_unused=True)
            total += loss_sum.detach()
            gradient.copy_(own)
            for sum_, other in zip(of_head, others, strict=True):
                if other is not None:
                    sum_ += other
        ctx.save_for_backward(of_hidden, *(sum_.to(one.dtype) for sum_, one in zip(of_head, head, strict=True)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Scales what is kept by the gradient of the sum."""
        of_hidden, *of_head = ctx.saved_tensors
        return (None, of_hidden * gradient, None, *(one * gradient for one in of_head))


def chunked_loss(model: PreTrainedModel) -> ChunkedLoss | None:
    """What makes the losses of a model that takes targets; None where it returns logits."""
    return getattr(model, "chunked_loss", None)


def check_chunks(config: PreTrainedConfig) -> None:
    """Compares losses and gradients of a tiny copy in chunks with those of the copy as it is; on the CPU, in fp32.

    Raises RecipeError where they differ, or the family cannot be computed so.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            deviation = _deviation(shrink(config, LAYERS))
    except (*STUMBLES, NoChunksError, StrictDataclassError) as error:
        raise _refused(config, f" ({type(error).__name__}: {error})") from error
    if deviation > TOLERANCE:
        raise _refused(config, f": losses or gradients deviate by {deviation:.0e}")


def _refused(config: PreTrainedConfig, why: str) -> RecipeError:
    message = f"the loss of {config.model_type} cannot be computed in chunks{why}"
    return RecipeError(Problem("kernels.loss", "kernels.loss", message, "--set kernels.loss=whole"))


def _deviation(config: PreTrainedConfig) -> float:
    model = reference(config, "eager")
    comparison = Comparison(model, config)
    chunked = ChunkedLoss(model, tokens=5, recomputed=False)
    worst = 0.0
    for chunked.recomputed, chunked.tokens in ((False, 5), (True, 5), (False, ALL)):
        worst = max(worst, comparison.deviation(takes_targets=True))
    return worst
