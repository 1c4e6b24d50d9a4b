"""`transformers` causal LMs as they are: configuration, initial weights, loss."""

from llmtrain.models.build import build_model, model_configuration, stage_builder
from llmtrain.models.loss import IGNORE, target_loss_sum

__all__ = ["IGNORE", "build_model", "model_configuration", "stage_builder", "target_loss_sum"]
