"""A loss of hidden states, computed in place of the head's logits.

The loss runs as the forward of the head's module, because engines make the weight of a module whole only while it runs
(ZeRO-3), and reduce its gradients afterwards. What the loss returns takes the place of the logits in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.errors import FamilyError
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.model import COPY_ERRORS, build_tiny_model, packed_input

LossOfHidden = Callable[[Tensor, Tensor], Tensor]
"""Returns sums, given hidden states [batch, T, width] and the weight of the head [outputs, width]."""


class HeadLoss:
    """Replaces the forward of a model's head, which still returns logits outside of `computing`."""

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        self._head = (head,)  # in a tuple, so that torch does not register it as a child
        self._logits = head.forward
        self._loss: LossOfHidden | None = None
        head.forward = self.forward
        model.head_loss = self

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits, or what the loss returns."""
        return self._logits(hidden) if self._loss is None else self._loss(hidden, self._head[0].weight)

    @contextmanager
    def computing(self, loss: LossOfHidden) -> Iterator[None]:
        """A context in which the output of the model holds the sums of a loss instead of logits."""
        self._loss = loss
        try:
            yield
        finally:
            self._loss = None


def head_loss(model: PreTrainedModel) -> HeadLoss | None:
    """Returns what computes a model's loss in place of its head."""
    found: HeadLoss | None = getattr(model, "head_loss", None)
    return found


def check_head(config: PreTrainedConfig) -> None:
    """Raises FamilyError unless a model's logits are the product of hidden states and the weight of its head.

    It is tried on a tiny copy; the random state is preserved.
    """
    refused = f"hidden states of {config.model_type} are not available"
    reason = ""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = build_tiny_model(shrink_configuration(config, LAYERS), "eager").eval()
            head, outputs = model.get_output_embeddings(), list[Tensor]()
            if not isinstance(head, nn.Linear) or head.bias is not None:
                reason = "its head is not a linear layer without a bias"
            else:
                head.register_forward_hook(lambda module, args, output: outputs.append(output))
                tokens, positions = packed_input(model.config)
                logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
                if len(outputs) != 1 or not torch.equal(outputs[0], logits):
                    reason = "it changes the logits after its head, such as by a scale or a cap"
    except COPY_ERRORS as error:
        reason = f"its tiny copy does not run ({type(error).__name__}: {error})"
    if reason:
        raise FamilyError("objective.hidden_states", "objective.hidden_states", "false", refused, reason)
