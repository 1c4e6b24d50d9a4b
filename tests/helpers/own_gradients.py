"""Callbacks of a user's own that change gradients: right ones, and faulty ones."""

from __future__ import annotations

import random

import torch

from llmtrain import Callback


class Noise(Callback):
    """Adds noise, and drops what the first rows of the embedding get."""

    def __init__(self, scale=0.02, rows=8):
        self.scale, self.rows = scale, rows

    def on_gradients(self, context):
        for gradient in context.gradients.values():
            gradient.add_(torch.randn_like(gradient), alpha=self.scale / context.step**0.5)
        if self.rows:
            context.gradients["model.embed_tokens.weight"][: self.rows] = 0


class Centralised(Callback):
    """Subtracts the mean of each row (arXiv 2004.01461)."""

    def on_gradients(self, context):
        for gradient in context.gradients.values():
            if gradient.dim() > 1:
                gradient.sub_(gradient.mean(1, keepdim=True))


class OfOneRank(Callback):
    """Its random numbers are others on each rank: they are not torch's."""

    def on_gradients(self, context):
        drawn = random.SystemRandom()
        for gradient in context.gradients.values():
            gradient.mul_(1 + drawn.random() / 100)


class Signs(Callback):
    """As `OfOneRank`, but the norm of the gradients stays the same."""

    def on_gradients(self, context):
        for gradient in context.gradients.values():
            gradient.mul_(random.SystemRandom().choice([-1, 1]))


class Fails(Callback):
    """Tied weights are there once, under the name of the embedding."""

    def on_gradients(self, context):
        if context.step == 2:
            context.gradients["lm_head.weight"].zero_()


class Replaces(Callback):
    """Gradients are changed in place, not replaced."""

    def on_gradients(self, context):
        context.gradients["model.norm.weight"] = torch.zeros(64)


class Returns(Callback):
    def on_gradients(self, context):
        return dict(context.gradients)


class FailsOnOneRank(Callback):
    def on_gradients(self, context):
        if torch.distributed.get_rank() == 1:
            context.gradients["model.norm.weight"].mul_(1 / 0)
