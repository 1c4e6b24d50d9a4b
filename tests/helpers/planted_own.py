"""Bugs in how a user's own model is run and divided."""

from __future__ import annotations

from dataclasses import replace

import torch

from llmtrain.models import own, own_attention
from llmtrain.models.recompute import checkpoints


def no_mask(patch):
    """Attention ignores the boundaries of documents."""
    original = own_attention.route_of
    patch.setattr(own, "route_of", lambda *arguments: replace(original(*arguments), mask=None))


def other_scale(patch):
    """The scale of the scores is lost."""
    original = own_attention.Route.attend

    def attend(self, query, key, value, *rest, **named):
        return original(self, query, key, value, *rest, **{**named, "scale": 1.0})

    patch.setattr(own_attention.Route, "attend", attend)


def no_positions(patch):
    """The positions of the data do not reach the user's module."""
    original = own.OwnModel.forward
    patch.setattr(
        own.OwnModel,
        "forward",
        lambda self, input_ids, position_ids=None, **named: original(self, input_ids, **named),
    )


def recomputed_with_another_mask(patch):
    """A recomputed layer computes attention across documents."""
    original = own_attention.on_same_route

    def on_another_route(function):
        again, route = original(function), own_attention._active.route

        def call(*args):
            if torch._C._current_graph_task_id() == -1:  # not within a backward pass
                return again(*args)
            with own_attention.routed(replace(route, mask=torch.ones_like(route.mask).tril())):
                return function(*args)

        return call

    patch.setattr(checkpoints, "on_same_route", on_another_route)


def no_auxiliary_loss(patch):
    """The loss of the routers is not added."""
    original = own.as_output
    patch.setattr(own, "as_output", lambda result: replace(original(result), aux_loss=None))


def doubled_auxiliary_loss(patch):
    """The loss of the routers has twice its weight."""
    patch.setattr(own.OwnConfig, "router_aux_loss_coef", 2.0)


ATTENTION = [no_mask, other_scale, no_positions, recomputed_with_another_mask]
AUXILIARY = [no_auxiliary_loss, doubled_auxiliary_loss]
