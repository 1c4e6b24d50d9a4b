"""The interface of what shards the parameters of a model over ranks before they are allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel


class Sharding(Protocol):
    """Tensor or expert parallelism, as one rank applies it to a model or to a stage of one."""

    def shard(self, name: str, parameter: nn.Parameter) -> None:
        """Replaces a parameter, which may be a meta tensor, by this rank's shard. name: its name in the whole model."""

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's shard of a whole weight. name: its name in the whole model."""

    def install(self, model: PreTrainedModel, names: Mapping[str, str]) -> None:
        """Registers what makes a sharded model, or stage of one, give the results of the whole model.

        names: parameter of `model` → its name in the whole model.
        """

    def split_adapters(self, model: PreTrainedModel) -> None:
        """Shards adapters, which have been added to a sharded model with whole matrices, as what they are added to."""

    def whole(self, parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
        """A context in which parameters are whole; when it ends, each rank keeps its shard of what was written."""


@contextmanager
def made_whole(shardings: Sequence[Sharding], parameters: list[nn.Parameter]) -> Iterator[None]:
    """The contexts of several shardings."""
    with ExitStack() as stack:
        for sharding in shardings:
            stack.enter_context(sharding.whole(parameters))
        yield
