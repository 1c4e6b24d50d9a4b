"""Bugs in the treatment of weights without a gradient in a step; each as in `planted`."""

from __future__ import annotations

import accelerate
import torch
from torch import Tensor, nn

from llmtrain.engines.deepspeed.engine import DeepSpeedEngine
from llmtrain.models import build


def choosers_are_trained(patch):
    """DeepSpeed sums zeros for indexers, and the optimizer decays them."""
    patch.setattr(build, "freeze_unused", lambda model: model)


def unmet_experts_are_left_alone(patch):
    """The experts of a layer are one tensor, so plain PyTorch decays those, too, whose part of its gradient is 0."""
    norm, train = DeepSpeedEngine._norm_unless_deepspeed_keeps_it, DeepSpeedEngine.train_step
    kept: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def note(self):
        for experts in (one for one in self.model.parameters() if one.dim() == 3):
            unmet = ~experts.grad.flatten(1).any(1)
            kept.append((experts, unmet, experts.detach()[unmet]))
        return norm(self)

    def restore(self, batch, *others):
        result = train(self, batch, *others)
        with torch.no_grad():
            for experts, unmet, values in kept:
                experts[unmet] = values
        kept.clear()
        return result

    patch.setattr(DeepSpeedEngine, "_norm_unless_deepspeed_keeps_it", note)
    patch.setattr(DeepSpeedEngine, "train_step", restore)


def missing_gradients_are_zeros(patch):
    original = accelerate.Accelerator.clip_grad_norm_

    def fill(self, parameters, limit):
        trained = list(parameters)
        for one in trained:
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        return original(self, trained, limit)

    patch.setattr(accelerate.Accelerator, "clip_grad_norm_", fill)


FROZEN = (choosers_are_trained,)
UNMET = (unmet_experts_are_left_alone,)
SOMETIMES = (missing_gradients_are_zeros,)
"""By the kind of weight that they concern."""
