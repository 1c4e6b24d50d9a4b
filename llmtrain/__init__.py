"""Train language models with DeepSpeed: one recipe, every strategy, the same training run.

A recipe file imports everything it needs from here, and so does a program that plans, trains and reads runs.
"""

import sys
from collections.abc import Callable
from types import ModuleType

from llmtrain.errors import UserError
from llmtrain.library import lint, load_run, plan, prepare, train, verify
from llmtrain.recipe import (
    BatchConfig,
    Callback,
    CallbackConfig,
    CallbackContext,
    CallbackResult,
    CheckpointConfig,
    Custom,
    DataConfig,
    EarlyStoppingConfig,
    EvalConfig,
    ExportConfig,
    GradientContext,
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
    SamplesConfig,
    Source,
    TasksConfig,
    TrainConfig,
    TrainedTokenizer,
    WatchdogConfig,
)
from llmtrain.recipe.cluster import Cluster

__version__ = "0.1.0"

__all__ = [
    "BatchConfig",
    "Callback",
    "CallbackConfig",
    "CallbackContext",
    "CallbackResult",
    "CheckpointConfig",
    "Cluster",
    "Custom",
    "DataConfig",
    "EarlyStoppingConfig",
    "EvalConfig",
    "ExportConfig",
    "GradientContext",
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
    "SamplesConfig",
    "Source",
    "TasksConfig",
    "TrainConfig",
    "TrainedTokenizer",
    "UserError",
    "WatchdogConfig",
    "lint",
    "load_run",
    "main",
    "plan",
    "prepare",
    "train",
    "verify",
]


class _Library(ModuleType):
    """This module, in which `plan`, `train` and `verify` are the functions, not the packages of these names.

    Python stores a package in its parent when it is first imported, which would replace the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Library


def main(recipe: Callable[[], Recipe]) -> None:
    """Makes a recipe file launchable by python, torchrun, deepspeed, accelerate and srun."""
    # Imported here, so that reading a recipe is not slowed down.
    from llmtrain.cli import run_script

    run_script(recipe)
