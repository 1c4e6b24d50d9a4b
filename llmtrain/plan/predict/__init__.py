"""Predicts the memory, traffic and step time of a plan by arithmetic. Pure."""

from llmtrain.plan.predict.memory import MemoryCache, PlanMemory, StageMemory, memory_of, memory_shortage
from llmtrain.plan.predict.parts import Parts, Shortage, State

__all__ = ["MemoryCache", "Parts", "PlanMemory", "Shortage", "StageMemory", "State", "memory_of", "memory_shortage"]
