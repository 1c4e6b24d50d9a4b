"""Chunked cross-entropy: the loss of a causal LM without the logits of all tokens in memory at once.

With a vocabulary of 128,000, the logits of 8,192 tokens, their softmax and its gradient take 12 GB. Here the head of
any `transformers` causal LM runs on a chunk of tokens at a time. The model's own forward is called again with its
backbone replaced by a module that returns the hidden states already computed. Whatever the family does with its logits
(scaling, capping) is therefore still done. A user's own model has no backbone; if its logits are the result of a linear
layer, that layer runs on the chunks.

There are two implementations with equal results. The *fused* one computes the gradients of a chunk in the forward pass,
as Liger's fused loss does (arXiv 2410.10989, section 3.2). Nothing is computed twice, and only the gradients of the
hidden states and of the head are kept until the backward pass. The *recomputed* one is an activation checkpoint of the
head: the backward pass recomputes the logits of each chunk. ZeRO-3 needs it, because parameters are whole only within
their module, and so does fp16, because the loss must be scaled before gradients are computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from llmtrain.errors import FamilyError
from llmtrain.models.loss import target_loss_sum
from llmtrain.models.own import OwnModel
from llmtrain.models.stages import backbone
from llmtrain.models.tiny.compare import SUM_TOLERANCE, deviation, loss_outcome
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.model import COPY_ERRORS, build_tiny_model


class NoChunksError(Exception):
    """The family's forward cannot be separated into backbone and head."""


Observe = Callable[[Tensor, Tensor], object]
"""Gets logits [..., tokens, vocab] and targets [..., tokens], as they are before the loss."""
ONE_CHUNK = 2**31
"""A chunk size that puts all tokens into one chunk."""


class _FixedOutput(nn.Module):
    """Replaces a backbone by a module that returns a fixed output."""

    def __init__(self, base: nn.Module, output: Any) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple, so that torch does not register it as a child
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        """Looks up attributes that a forward reads from its backbone, such as constants that scale the logits."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"][0], name)


class _Backbone:
    """The head of a model of `transformers`: its forward without its backbone."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises NoChunksError if the family has no backbone that can be replaced."""
        base: nn.Module = backbone(model)
        if isinstance(inner := getattr(base, "decoder", None), PreTrainedModel):
            base = inner  # in families derived from encoder-decoder models, the head reads the output of the decoder
        name = next((name for name, module in model.named_modules() if module is base), "")
        if not name or "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise NoChunksError(f"{model.config.model_type} has no head that can be called on its own")
        parent, _, child = name.rpartition(".")
        self._name: str = child
        self._parent = model.get_submodule(parent)
        self._forward = model.forward
        self._model = model
        self._output_type: type

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """Returns the model's output with the logits of one position, and the hidden states before its head."""
        seen: list[Any] = []
        handle = getattr(self._parent, self._name).register_forward_hook(lambda *call: seen.append(call[2]))
        try:
            # Keeps one position instead of none, because some heads cannot handle an empty tensor. Its logits are not
            # used.
            output = self._forward(*args, **kwargs, logits_to_keep=1)
        finally:
            handle.remove()
        self._output_type = type(seen[0])
        return output, seen[0][0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [1, tokens, vocab] of hidden states [1, tokens, width]."""
        base = self._parent.get_submodule(self._name)
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        with self._replaced_by(_FixedOutput(base, self._output_type(last_hidden_state=hidden))):
            logits: Tensor = self._forward(input_ids=tokens, use_cache=False).logits
        return logits

    def parameters(self) -> list[nn.Parameter]:
        """Returns the trainable parameters outside the backbone, including an embedding that is tied to the head."""
        with self._replaced_by(nn.Module()):
            return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    @contextmanager
    def _replaced_by(self, module: nn.Module) -> Iterator[None]:
        """Replaces the backbone inside the context, in which it is not called, so its hooks do not run."""
        modules = self._parent._modules
        base, modules[self._name] = modules[self._name], module
        try:
            yield
        finally:
            modules[self._name] = base


class _OwnHead:
    """The head of a user's own model: the linear layer whose result is the logits."""

    def __init__(self, model: OwnModel) -> None:
        """Raises NoChunksError if the model has none."""
        head = model.get_output_embeddings()
        if head is None:
            raise NoChunksError(f"{model.config.model_type} has no linear layer whose result is the logits")
        self._head: nn.Module = head
        self._forward: Callable[..., Any] = model.forward

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """Returns the model's output with the logits of one position, and the hidden states before its head."""
        seen: list[Tensor] = []
        handle = self._head.register_forward_pre_hook(lambda head, given: seen.extend(given))
        try:
            output = self._forward(*args, logits_to_keep=1, **kwargs)
        finally:
            handle.remove()
        if len(seen) != 1:
            raise NoChunksError("its head is not called once with the hidden states alone")
        return output, seen[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [1, tokens, vocab] of hidden states [1, tokens, width]."""
        logits: Tensor = self._head(hidden)
        return logits

    def parameters(self) -> list[nn.Parameter]:
        """Returns the trainable parameters of the head."""
        return [parameter for parameter in self._head.parameters() if parameter.requires_grad]


@dataclass
class Losses(ModelOutput):  # type: ignore[misc]
    """The output of a model with `ChunkedLoss` when it is given targets; a dictionary, in which engines look for
    tensors."""

    loss_sum: Tensor | None = None
    """Sum of the cross-entropies over the target tokens, each of them, or several sums: what `ChunkedLoss.loss_of`
    returns."""
    aux_loss: Tensor | None = None


@dataclass
class ChunkedLoss:
    """Adds an argument `targets` to a causal LM's forward, which then returns `Losses` instead of logits.

    Raises NoChunksError if the head of the model cannot be called on its own.
    """

    model: PreTrainedModel
    tokens: int
    """Number of tokens in a chunk."""
    recomputed: bool
    loss_of: Callable[..., Tensor] = target_loss_sum
    """Returns the summed cross-entropy of a chunk, given its logits and labels, and its `values` if there are any; or,
    if `recomputed`, the cross-entropy of each token [1, tokens], which are then concatenated over the chunks, or
    several sums [sums], which are added."""
    _observe: Observe | None = field(default=None, init=False, repr=False)
    """See `observed_by`."""
    _full_forward: Callable[..., Any] = field(init=False, repr=False)
    """The model's own forward."""
    _head: _Backbone | _OwnHead = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._head = _OwnHead(self.model) if isinstance(self.model, OwnModel) else _Backbone(self.model)
        self._full_forward = self.model.forward
        self.model.forward = self.forward
        self.model.chunked_loss = self

    def forward(self, *args: Any, targets: Tensor | None = None, values: Tensor | None = None, **kwargs: Any) -> Any:
        """Calls the model's own forward, or returns `Losses` if there are targets.

        targets: [batch, T], already shifted; NO_TARGET at positions without a target. values: [batch, T, columns], as
        in `MicroBatch`; only with `recomputed`.
        """
        if targets is None:
            return self._full_forward(*args, **kwargs)
        of_tokens = [targets] if values is None else [targets, values]
        if targets.numel() <= self.tokens:  # one chunk holds them all
            output = self._full_forward(*args, **kwargs)
            loss_sum = self._loss_of(output.logits, *of_tokens)
            return Losses(loss_sum=loss_sum, aux_loss=getattr(output, "aux_loss", None))
        output, hidden = self._head.run(*args, **kwargs)
        return Losses(loss_sum=self.loss_sum(hidden, *of_tokens), aux_loss=getattr(output, "aux_loss", None))

    def loss_sum(self, hidden: Tensor, targets: Tensor, *values: Tensor) -> Tensor:
        """Returns the sum of the cross-entropies, each of them, or several sums.

        hidden: [batch, T, width], the output of the backbone; targets: [batch, T]; values: as for `forward`, if there
        are any.
        """
        loss = self._loss(*(tensor.flatten(0, 1)[None] for tensor in (hidden, targets, *values)))
        return loss.view_as(targets) if loss.ndim == 2 else loss

    def _loss(self, hidden: Tensor, targets: Tensor, *values: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or targets.size(1) <= self.tokens:
            return self._reduce(self._chunks(hidden, targets, *values), self._chunk_loss)
        if self.recomputed:
            return self._reduce(
                self._chunks(hidden, targets, *values), partial(checkpoint, self._chunk_loss, use_reentrant=False)
            )
        head = self._head.parameters()
        loss: Tensor = _Fused.apply(self, hidden, targets, *head)  # type: ignore[no-untyped-call]
        return loss

    def _chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(torch.split(tensor, self.tokens, dim=1) for tensor in tensors), strict=True)

    def _reduce(self, parts: Iterator[tuple[Tensor, ...]], loss_of: Callable[..., Tensor]) -> Tensor:
        losses = [loss_of(*part) for part in parts]
        if losses[0].ndim == 2:
            return torch.cat(losses, dim=1)
        return torch.stack(losses).sum(0) if losses[0].ndim else torch.stack(losses).sum()

    def _chunk_loss(self, hidden: Tensor, targets: Tensor, *values: Tensor) -> Tensor:
        """Returns the summed loss of one chunk."""
        return self._loss_of(self._head.logits(hidden), targets, *values)

    def _loss_of(self, logits: Tensor, targets: Tensor, *values: Tensor) -> Tensor:
        if self._observe is not None:
            self._observe(logits, targets)
        return self.loss_of(logits, targets, *values)

    @contextmanager
    def observed_by(self, observe: Observe) -> Iterator[None]:
        """A context, without gradients, in which a function gets the logits and the targets of each chunk."""
        self._observe = observe
        try:
            yield
        finally:
            self._observe = None


class _Fused(torch.autograd.Function):
    """Computes the gradient of each chunk of tokens as soon as its loss is known."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkedLoss, hidden: Tensor, targets: Tensor, *head: Tensor) -> Tensor:
        """Returns the sum of the losses and saves the gradients."""
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        # In fp32, because a sum over chunks in a lower precision would round where a single product over all tokens
        # does not.
        head_gradients: list[Tensor] = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in head]
        parts = loss._chunks(hidden, targets, hidden_gradient)
        for part, labels, chunk_gradient in parts:
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss_sum = loss._chunk_loss(part, labels)
            gradient_of_part, *gradients_of_head = torch.autograd.grad(loss_sum, (part, *head), allow_unused=True)
            total += loss_sum.detach()
            chunk_gradient.copy_(gradient_of_part)
            for total_gradient, gradient_of_parameter in zip(head_gradients, gradients_of_head, strict=True):
                if gradient_of_parameter is not None:
                    total_gradient += gradient_of_parameter
        ctx.save_for_backward(
            hidden_gradient,
            *(
                total_gradient.to(parameter.dtype)
                for total_gradient, parameter in zip(head_gradients, head, strict=True)
            ),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the saved gradients by the gradient of the sum."""
        hidden_gradient, *head_gradients = ctx.saved_tensors
        return (None, hidden_gradient * gradient, None, *(head_gradient * gradient for head_gradient in head_gradients))


def chunked_loss(model: PreTrainedModel) -> ChunkedLoss | None:
    """Returns the `ChunkedLoss` of a model that accepts targets, or None if the model returns logits."""
    return getattr(model, "chunked_loss", None)


def check_chunks(config: PreTrainedConfig, loss_of: Callable[[Tensor, Tensor], Tensor] = target_loss_sum) -> None:
    """Compares the chunked losses and gradients of a tiny copy with the unchunked ones; on the CPU, in fp32.

    loss_of: as for `ChunkedLoss`. Raises RecipeError if they differ or if the family's loss cannot be computed in
    chunks.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            worst = _deviation(shrink_configuration(config, LAYERS), loss_of)
    except NoChunksError as error:
        raise _refused(config, str(error)) from error
    except COPY_ERRORS as error:
        raise _refused(config, f"a tiny copy fails ({type(error).__name__}: {error})") from error
    if worst > SUM_TOLERANCE:
        raise _refused(config, f"losses or gradients deviate by {worst:.0e}")


def _refused(config: PreTrainedConfig, why: str) -> FamilyError:
    refused = f"the loss of {config.model_type} cannot be computed in chunks"
    return FamilyError("kernels.loss", "kernels.loss", "whole", refused, why)


def _deviation(config: PreTrainedConfig, loss_of: Callable[[Tensor, Tensor], Tensor]) -> float:
    model = build_tiny_model(config, "eager")
    expected = loss_outcome(model)
    chunked = ChunkedLoss(model, tokens=5, recomputed=False, loss_of=loss_of)
    worst = 0.0
    for chunked.recomputed, chunked.tokens in ((False, 5), (True, 5), (False, ONE_CHUNK)):
        changed = deviation(loss_outcome(model, takes_targets=True), expected)
        worst = max(worst, changed.output, changed.gradient)
    return worst
