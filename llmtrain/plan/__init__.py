"""Plans: a recipe on a cluster, the facts of its model, and the resulting plan. Pure: no torch."""

from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.plan import Batch, KernelChoice, Plan

__all__ = ["Batch", "KernelChoice", "ModelFacts", "Plan"]
