"""Attention of a user's own model: its calls of `scaled_dot_product_attention` use the attention of the plan.

Kernels, masks of packed documents and Ulysses are those of the attention interface of `transformers`. A causal call
without a mask of its own is passed to that interface; every other call is left as it is. A tiny copy shows whether the
model then computes the same when documents are packed or sequences are cut, as for other models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmtrain.overrides.torch import replace_attention, torch_attention

eager_attention_forward = sdpa_attention_forward
"""What `eager` means here: a user's module calls torch's function, which has no form without a kernel."""


@dataclass
class AttentionCall:
    """What an attention function of `transformers` reads from the module that calls it."""

    num_key_value_groups: int
    training: bool
    is_causal: bool = True


@dataclass(frozen=True)
class Route:
    """How the calls of one forward pass compute attention."""

    name: str
    """The implementation, by its name in `transformers`."""
    mask: Any
    """The mask of that implementation; None if it needs none."""
    training: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the implementation, such as the boundaries of documents."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Has the arguments and the result of `scaled_dot_product_attention`; [batch, heads, T, head_dim]."""
        with routed(None):
            if not is_causal or attn_mask is not None or query.shape[-2] != key.shape[-2] or query.ndim != 4:
                return torch_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            function = ALL_ATTENTION_FUNCTIONS.get(self.name) or sdpa_attention_forward
            call = AttentionCall(query.shape[1] // key.shape[1], self.training)
            arguments = {"dropout": dropout_p, "scaling": scale, **self.arguments}
            output: Tensor = function(call, query, key, value, self.mask, **arguments)[0]
        return output.transpose(1, 2)


class _Active(threading.local):
    """The route of the forward pass that runs in this thread."""

    route: Route | None = None


_active = _Active()


def _dispatch(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
    """Has the arguments and the result of `scaled_dot_product_attention`."""
    route = _active.route
    if route is None:
        return torch_attention(query, key, value, *args, **named)
    return route.attend(query, key, value, *args, **named)


def intercept() -> None:
    """Replaces `scaled_dot_product_attention` in this process. Outside of a user's own model, it does what it did.

    It is called before a user's module is imported, which may import the function by its name.
    """
    replace_attention(_dispatch)


def route_of(
    config: PreTrainedConfig,
    embeddings: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    training: bool,
    arguments: dict[str, Any],
) -> Route:
    """Returns the route of a forward pass.

    embeddings: a tensor [batch, T, …] of the model's dtype and device. mask: [batch, 1, T, T]; by default it is made
    from the positions.
    """
    made = create_causal_mask(config, embeddings, mask, None, position_ids)  # a name changed in transformers 5.24
    return Route(config._attn_implementation, made, training, {**arguments, "position_ids": position_ids})


@contextmanager
def routed(route: Route | None) -> Iterator[None]:
    """A context in which a user's calls take a route; None for torch's function."""
    before, _active.route = _active.route, route
    try:
        yield
    finally:
        _active.route = before


def on_same_route(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes the active route whenever it is called, as in a recomputed layer."""
    route = _active.route

    def call(*args: Any, **named: Any) -> Any:
        with routed(route):
            return function(*args, **named)

    return call
