"""Legality and arithmetic of a recipe on a cluster. Pure: no torch, deepspeed, transformers or datasets."""

from llmtrain.plan.plan import Batch, KernelChoice, Layout, ModelFacts, Plan
from llmtrain.plan.resolve import resolve

__all__ = ["Batch", "KernelChoice", "Layout", "ModelFacts", "Plan", "resolve"]
