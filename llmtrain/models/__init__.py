"""`transformers` causal LMs as they are: configuration, initial weights, loss."""

from llmtrain.models.bounds import StageBounds, balance
from llmtrain.models.build import build_model, model_configuration
from llmtrain.models.cut import build_stage, check_cut
from llmtrain.models.loss import IGNORE, target_loss_sum
from llmtrain.models.stages import Cut, Refused, Stage

__all__ = [
    "IGNORE",
    "Cut",
    "Refused",
    "Stage",
    "StageBounds",
    "balance",
    "build_model",
    "build_stage",
    "check_cut",
    "model_configuration",
    "target_loss_sum",
]
