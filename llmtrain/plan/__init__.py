"""Legality and arithmetic of a recipe on a cluster. Pure: no torch, deepspeed, transformers or datasets."""

from llmtrain.plan.plan import Batch, Layout, ModelFacts, Plan
from llmtrain.plan.resolve import resolve

__all__ = ["Batch", "Layout", "ModelFacts", "Plan", "resolve"]
