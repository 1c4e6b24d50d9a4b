"""Train language models with DeepSpeed: one recipe, every strategy, the same training run."""

__version__ = "0.1.0"
