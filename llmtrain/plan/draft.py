"""The input of the rules: a recipe on a cluster that may or may not be legal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

from llmtrain.plan.axes import model_parallel_size
from llmtrain.plan.facts.families import WITHOUT_SDPA
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.own_optimizer import TriedOptimizer, tried_optimizer
from llmtrain.recipe import ParallelConfig, Precision, Recipe
from llmtrain.recipe.cluster import Cluster

WEIGHT_DTYPE: dict[Precision, str] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "autocast_bf16": "fp32",
    "autocast_fp16": "fp32",
}
"""The type of the weights that the engine uses in the forward pass."""

COMPUTE_DTYPE: dict[Precision, str] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "autocast_bf16": "bf16",
    "autocast_fp16": "fp16",
}
"""The type of the matrix products, which decides the peak rate that counts: autocast runs them in the lower type."""

BYTES_OF = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Type → bytes per element."""


@dataclass(frozen=True)
class Draft:
    """A recipe on a cluster, with the numbers that follow from both if they are integers."""

    recipe: Recipe
    cluster: Cluster
    facts: ModelFacts | None
    """None if the model's own configuration is invalid."""

    def __post_init__(self) -> None:
        """Replaces `model.attention` of `auto` by `eager` for a family that has no `sdpa`."""
        if self.facts and self.recipe.model.attention == "auto" and self.facts.text_type in WITHOUT_SDPA:
            model = self.recipe.model.model_copy(update={"attention": "eager"})
            object.__setattr__(self, "recipe", self.recipe.model_copy(update={"model": model}))

    @cached_property
    def optimizer(self) -> TriedOptimizer | None:
        """What a trial of the recipe's own optimizer found; None if there is none. Raises RecipeError as the trial."""
        return tried_optimizer(self.recipe)

    @property
    def parallel(self) -> ParallelConfig:
        """The recipe's parallelism."""
        return self.recipe.parallel

    @property
    def weight_dtype(self) -> str:
        """Type of the weights in the forward pass, and thus of the gradients."""
        return WEIGHT_DTYPE[self.parallel.precision]

    @property
    def data_parallel_size(self) -> int | None:
        """Replicas that see different samples; None if the degrees do not divide the number of devices."""
        replicas, rest = divmod(self.cluster.world_size, model_parallel_size(self.parallel))
        return None if rest else replicas

    @property
    def accumulation(self) -> int | None:
        """Micro-batches per step and replica; None if the micro-batch does not divide the batch."""
        if self.data_parallel_size is None:
            return None
        per_pass = self.recipe.batch.micro_batch_size * self.data_parallel_size
        steps, rest = divmod(self.recipe.batch.global_batch_size, per_pass)
        return None if rest or not steps else steps


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors of a positive number in increasing order, within milliseconds for the largest clusters."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
