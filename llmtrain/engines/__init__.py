"""The engines, which run one optimizer step of a plan behind a common interface (`Engine`)."""

from llmtrain.engines.build import build_engine
from llmtrain.engines.engine import Engine, OwnPasses, StepResult

__all__ = ["Engine", "OwnPasses", "StepResult", "build_engine"]
