"""What to train: frozen, strict models, in which no number is stated twice.

A recipe says nothing about the machine: the data parallel size and the number of accumulation steps follow from the
cluster (`llmtrain.plan.rules`).
"""

from llmtrain.recipe.callback import Callback, CallbackContext, CallbackResult
from llmtrain.recipe.execution import (
    CallbackConfig,
    CheckpointConfig,
    EvalConfig,
    ExportConfig,
    GuardConfig,
    KernelsConfig,
    LoggingConfig,
    OffloadDevice,
    ParallelConfig,
    Precision,
    ProfileConfig,
    SamplesConfig,
    TasksConfig,
    WatchdogConfig,
)
from llmtrain.recipe.parts import MAX_NUMBER, Fraction, Many, Part, PositiveFloat, PositiveInt
from llmtrain.recipe.recipe import Recipe, parse_assignments, parse_recipe, part_in, recipe_problems
from llmtrain.recipe.training import (
    MAX_SEQUENCE_LENGTH,
    BatchConfig,
    Custom,
    DataConfig,
    EarlyStoppingConfig,
    LoraConfig,
    ModelConfig,
    NewTokens,
    ObjectiveConfig,
    OptimConfig,
    Source,
    TrainConfig,
    TrainedTokenizer,
)

__all__ = [
    "MAX_NUMBER",
    "MAX_SEQUENCE_LENGTH",
    "BatchConfig",
    "Callback",
    "CallbackConfig",
    "CallbackContext",
    "CallbackResult",
    "CheckpointConfig",
    "Custom",
    "DataConfig",
    "EarlyStoppingConfig",
    "EvalConfig",
    "ExportConfig",
    "Fraction",
    "GuardConfig",
    "KernelsConfig",
    "LoggingConfig",
    "LoraConfig",
    "Many",
    "ModelConfig",
    "NewTokens",
    "ObjectiveConfig",
    "OffloadDevice",
    "OptimConfig",
    "ParallelConfig",
    "Part",
    "PositiveFloat",
    "PositiveInt",
    "Precision",
    "ProfileConfig",
    "Recipe",
    "SamplesConfig",
    "Source",
    "TasksConfig",
    "TrainConfig",
    "TrainedTokenizer",
    "WatchdogConfig",
    "parse_assignments",
    "parse_recipe",
    "part_in",
    "recipe_problems",
]
