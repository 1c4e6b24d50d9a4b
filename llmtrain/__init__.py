"""Train language models with DeepSpeed: one recipe, every strategy, the same training run.

A recipe file imports everything it needs from here.
"""

from collections.abc import Callable

from llmtrain.system.stops import importing, stop_at_once

with importing():
    from llmtrain.cluster import Cluster
    from llmtrain.recipe import (
        BatchConfig,
        CheckpointConfig,
        DataConfig,
        EvalConfig,
        ExportConfig,
        GuardConfig,
        KernelsConfig,
        LoggingConfig,
        LoraConfig,
        ModelConfig,
        ObjectiveConfig,
        OptimConfig,
        ParallelConfig,
        ProfileConfig,
        Recipe,
        Source,
        TrainConfig,
        TrainedTokenizer,
        WatchdogConfig,
    )

__version__ = "0.1.0"

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Cluster",
    "DataConfig",
    "EvalConfig",
    "ExportConfig",
    "GuardConfig",
    "KernelsConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "ParallelConfig",
    "ProfileConfig",
    "Recipe",
    "Source",
    "TrainConfig",
    "TrainedTokenizer",
    "WatchdogConfig",
    "main",
]


def main(recipe: Callable[[], Recipe]) -> None:
    """Makes a recipe file launchable by python, torchrun, deepspeed, accelerate and srun."""
    stop_at_once()
    # Imported here, so that reading a recipe is not slowed down.
    from llmtrain.script import main as run

    run(recipe)
