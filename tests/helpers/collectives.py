"""Records every collective and message of a rank, whichever library sends it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from llmtrain.plan.predict.links import TransferKind

KINDS: dict[str, tuple[TransferKind, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "send": ("p2p", 0),
    "recv_": ("p2p", 0),
}
"""Operation of torch → kind, and the argument with the whole tensors."""


class Seen(NamedTuple):
    """A collective or a message."""

    kind: TransferKind
    size: int
    """Bytes of the whole tensors."""
    ranks: int


class Collectives(TorchDispatchMode):
    """Within this context, `seen` records each collective in which this rank takes part with other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self._exchange = dist.all_to_all_single
        self._batch = dist.batch_isend_irecv

    def __enter__(self) -> Collectives:
        # DeepSpeed calls it within an operation of its own, where torch shows no operations.
        dist.all_to_all_single = self._exchanged
        dist.batch_isend_irecv = self._sent  # a ring does so in its backward pass, too, outside of an operation
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        dist.all_to_all_single = self._exchange
        dist.batch_isend_irecv = self._batch
        super().__exit__(*error)

    def _exchanged(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._see("all_to_all", input.nbytes, kwargs.get("group") or dist.group.WORLD)
        return self._exchange(output, input, *args, **kwargs)

    def _sent(self, messages: list[dist.P2POp]) -> list[dist.Work]:
        for one in messages:
            if one.op is dist.isend:
                self._see("p2p", one.tensor.nbytes, one.group or dist.group.WORLD)
        with _disable_current_modes():
            works: list[dist.Work] = self._batch(messages)
            return works

    def _see(self, kind: TransferKind, size: int, group: dist.ProcessGroup) -> None:
        if group.size() > 1:
            self.seen.append(Seen(kind, size, group.size()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d" and name.partition(".")[0] in KINDS:
            kind, index = KINDS[name.partition(".")[0]]
            group = next(dist.ProcessGroup.unbox(one) for one in args if _is_group(one))
            self._see(kind, sum(tensor.nbytes for tensor in tree_leaves(args[index])), group)
        return func(*args, **(kwargs or {}))


def _is_group(value: object) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup"
