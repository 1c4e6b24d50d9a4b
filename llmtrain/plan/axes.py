"""The axes of parallelism: what each of them divides, and what its degree has to divide.

Everything that depends on the degrees iterates over `AXES`: the degrees that searches try, the rules about
divisibility, the groups of ranks, the shares of memory and work, and the names of plans. What an axis sends within a
layer is in `predict/traffic.py`, and what it does in an engine in `engines/deepspeed/`. `docs/extending.md` shows how
to add an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from llmtrain.plan.facts.model import ModelFacts
from llmtrain.recipe import ParallelConfig, Recipe

Divided = Literal["samples", "tokens", "layers", "matrices", "experts"]
"""What an axis divides: the `tokens` of a sequence, the `matrices` of a layer with the heads of its attention."""
Limits = Callable[[Recipe, ModelFacts | None, int], Iterator[tuple[str, int]]]
"""Yields the numbers that a degree has to divide, each with its description, from the recipe, the facts of its model
(None if they are unknown) and the degree of data parallelism (0 if it is not an integer)."""


@dataclass(frozen=True)
class Axis:
    """A row of the table of axes."""

    name: str
    """Its field in `parallel`. Data parallelism has none: its degree is the number of devices that the others leave."""
    short: str
    """Its abbreviation in the names of plans."""
    divides: frozenset[Divided]
    reason: str = ""
    """The reason for `limits`."""
    limits: Limits = lambda recipe, facts, data: iter(())
    has_ranks: bool = True
    """False if its groups are subsets of the ranks that hold the same layers, so that it needs no ranks of its own."""

    @property
    def field(self) -> str:
        """Its dotted field of a recipe."""
        return f"parallel.{self.name}"

    @property
    def divides_weights(self) -> bool:
        """Whether its ranks hold different weights."""
        return not self.divides <= {"samples", "tokens"}

    def degree(self, parallel: ParallelConfig) -> int:
        """Returns its degree in a recipe; not defined for data parallelism."""
        degree: int = getattr(parallel, self.name)
        return degree


def _tensor_limits(recipe: Recipe, facts: ModelFacts | None, data: int) -> Iterator[tuple[str, int]]:
    if facts is not None:
        yield f"the model's {facts.heads} query heads", facts.heads
        yield f"the model's {facts.kv_heads} key and value heads", facts.kv_heads


def _sequence_limits(recipe: Recipe, facts: ModelFacts | None, data: int) -> Iterator[tuple[str, int]]:
    length, tensor = recipe.data.sequence_length, recipe.parallel.tensor
    yield f"a sequence of {length} tokens", length
    if any(number % tensor for _, number in _tensor_limits(recipe, facts, data)):
        return  # the ranks would have different numbers of heads
    if facts is not None:
        heads, ring = facts.heads // tensor, ring_degree(recipe.parallel, facts)
        if recipe.parallel.sequence % ring:
            return  # another rule refuses such a ring
        times = f" × a ring of {ring}" if ring > 1 else ""
        yield f"{'the model' if tensor == 1 else 'a tensor parallel rank'}'s {heads} heads{times}", heads * ring


def ring_degree(parallel: ParallelConfig, facts: ModelFacts | None) -> int:
    """Returns how many of the groups that divide heads form a ring; by default as few as the heads of a rank allow."""
    if parallel.sequence_ring is not None:
        return parallel.sequence_ring
    if facts is None or facts.heads % parallel.tensor or facts.kv_heads % parallel.tensor:
        return 1
    return parallel.sequence // math.gcd(parallel.sequence, facts.heads // parallel.tensor)


def _expert_limits(recipe: Recipe, facts: ModelFacts | None, data: int) -> Iterator[tuple[str, int]]:
    ranks = data * recipe.parallel.tensor * recipe.parallel.sequence
    yield f"data × tensor × sequence = {ranks} ranks", ranks
    if facts is not None and facts.experts:
        yield f"{facts.experts} experts", facts.experts


DATA = Axis("data", "dp", frozenset({"samples"}))
PIPELINE = Axis("pipeline", "pp", frozenset({"layers"}))
TENSOR = Axis(
    "tensor",
    "tp",
    frozenset({"matrices", "experts"}),
    "Each tensor parallel rank holds equally many whole heads.",
    _tensor_limits,
)
SEQUENCE = Axis(
    "sequence",
    "sp",
    frozenset({"tokens"}),
    "Ulysses splits the sequence across ranks, and within attention the heads (arXiv 2309.14509); a ring does not.",
    _sequence_limits,
)
EXPERT = Axis(
    "expert",
    "ep",
    frozenset({"experts"}),
    "Experts are distributed over all ranks that hold the same layers, each rank with equally many.",
    _expert_limits,
    has_ranks=False,
)
AXES = (DATA, PIPELINE, TENSOR, SEQUENCE, EXPERT)
INNERMOST_FIRST = (TENSOR, SEQUENCE, DATA, PIPELINE)
"""The order in which ranks are numbered, as `StagePipeline` and DeepSpeed do: those of a tensor group are adjacent."""
CHOSEN = tuple(axis for axis in AXES if axis is not DATA)
"""The axes whose degrees a recipe gives."""


def used(parallel: ParallelConfig) -> tuple[Axis, ...]:
    """Returns the axes whose degrees in a recipe are above 1."""
    return tuple(axis for axis in CHOSEN if axis.degree(parallel) > 1)


def model_parallel_size(parallel: ParallelConfig) -> int:
    """Returns the number of devices that share one replica of the model."""
    return math.prod(axis.degree(parallel) for axis in CHOSEN if axis.has_ranks)
