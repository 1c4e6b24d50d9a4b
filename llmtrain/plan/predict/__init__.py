"""Predicts the memory, traffic and step time of a plan by arithmetic. Pure."""

from llmtrain.plan.predict.memory import MemoryCache, PlanMemory, StageMemory, lacking, memory_of
from llmtrain.plan.predict.parts import Parts, Shortage, State

__all__ = ["MemoryCache", "Parts", "PlanMemory", "Shortage", "StageMemory", "State", "lacking", "memory_of"]
