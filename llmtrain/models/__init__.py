"""`transformers` causal LMs as they are: configuration, initial weights, loss."""

from llmtrain.models.build import build_model, model_configuration
from llmtrain.models.loss import IGNORE, target_loss_sum

__all__ = ["IGNORE", "build_model", "model_configuration", "target_loss_sum"]
