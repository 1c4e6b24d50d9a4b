"""Memory of a plan: bytes by part, on the fullest rank of each pipeline stage."""

from llmtrain.plan.memory.count import PlanMemory, StageMemory, lacking, memory_of
from llmtrain.plan.memory.parts import Parts, Shortage, State

__all__ = ["Parts", "PlanMemory", "Shortage", "StageMemory", "State", "lacking", "memory_of"]
