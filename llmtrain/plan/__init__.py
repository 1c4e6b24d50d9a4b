"""Plans: a recipe on a cluster, the facts of its model, and the resulting plan. Pure: no torch."""

from llmtrain.plan.plan import Batch, KernelChoice, ModelFacts, Plan

__all__ = ["Batch", "KernelChoice", "ModelFacts", "Plan"]
