"""Keeps the inputs of recomputed layers in host memory until the backward pass.

Each input is copied to pinned memory while its layer computes, on a stream of its own, and back while the backward pass
of the layer above computes. The device holds the inputs of two layers at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class OffloadedInputs:
    """Runs the checkpoints of a model's layers; their inputs wait on the host. On a CPU they are there already."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._newest: _Copy | None = None

    def run(self, is_first: bool, function: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        """Runs a layer as `torch.utils.checkpoint.checkpoint` does. is_first: of the layers that a pass runs so."""
        if not hidden.is_cuda:
            return checkpoint(function, hidden, *args, use_reentrant=False)
        place = hidden.data_ptr(), hidden.shape

        def pack(tensor: Tensor) -> Tensor | _Copy:
            # Masks and the like are the same tensors for all layers.
            return self._keep(tensor, is_first) if (tensor.data_ptr(), tensor.shape) == place else tensor

        with saved_tensors_hooks(pack, lambda kept: kept.take() if isinstance(kept, _Copy) else kept):
            return checkpoint(function, hidden, *args, use_reentrant=False)

    def _keep(self, tensor: Tensor, is_first: bool) -> _Copy:
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        if self._newest is not None:
            self._newest.leave()
        self._newest = _Copy(tensor.detach(), self._stream, None if is_first else self._newest)
        return self._newest


class _Copy:
    """A tensor on its way to the host, there, or on its way back."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream, below: _Copy | None) -> None:
        """below: the input of the layer below, which the backward pass needs next."""
        self._stream, self._below = stream, below
        self._device = tensor.device
        self._tensor: Tensor | None = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copied = self._copy(self._host, tensor)

    def leave(self) -> None:
        """Frees the memory on the device, for operations that come after the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._tensor = None

    def fetch(self) -> None:
        """Begins to copy the tensor back."""
        if self._tensor is None:
            self._tensor = torch.empty_like(self._host, device=self._device)
            self._copied = self._copy(self._tensor, self._host)

    def take(self) -> Tensor:
        """Returns the tensor on the device, and begins to copy back the one below."""
        self.fetch()
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        if self._below is not None:
            self._below.fetch()
            self._below = None
        return tensor

    def _copy(self, to: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copies once the present stream has written the source, and nothing there uses the destination's memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
            return event
