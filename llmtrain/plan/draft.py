"""The input of the rules: a recipe on a cluster that may or may not be legal."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.cluster import Cluster
from llmtrain.plan.plan import ModelFacts
from llmtrain.recipe import ParallelConfig, Precision, Recipe

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
"""The type of the matrix products, for whose peak rate a device is measured: autocast runs them in the lower type."""


@dataclass(frozen=True)
class Draft:
    """A recipe on a cluster, with the numbers that follow from both if they are integers."""

    recipe: Recipe
    cluster: Cluster
    facts: ModelFacts | None
    """None if the model's own configuration is invalid."""

    @property
    def parallel(self) -> ParallelConfig:
        """The recipe's parallelism."""
        return self.recipe.parallel

    @property
    def weight_dtype(self) -> str:
        """Type of the weights in the forward pass, and thus of the gradients."""
        return WEIGHT_DTYPE[self.parallel.precision]

    @property
    def model_parallel(self) -> int:
        """Number of devices that share one replica of the model: pp × tp × sp."""
        return self.parallel.pipeline * self.parallel.tensor * self.parallel.sequence

    @property
    def dp(self) -> int | None:
        """Replicas that see different samples; None if the degrees do not divide the number of devices."""
        replicas, rest = divmod(self.cluster.world_size, self.model_parallel)
        return None if rest else replicas

    @property
    def accumulation(self) -> int | None:
        """Micro-batches per step and replica; None if the micro-batch does not divide the batch."""
        if self.dp is None:
            return None
        steps, rest = divmod(self.recipe.batch.global_batch_size, self.recipe.batch.micro_batch_size * self.dp)
        return None if rest or not steps else steps
