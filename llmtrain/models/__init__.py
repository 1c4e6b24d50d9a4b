"""`transformers` causal LMs, unmodified: configuration, initial weights, pipeline stages, tensor slices and loss."""

from llmtrain.models.build import (
    build_model,
    build_sharded,
    check_trained,
    check_weights,
    find_cut_and_split,
    model_configuration,
    stage_builder,
    stage_names,
)
from llmtrain.models.chunked import ChunkedLoss, chunked_loss
from llmtrain.models.loss import router_loss_weight, target_loss_sum, target_losses
from llmtrain.models.objective import Objective
from llmtrain.models.own_loss import OwnLoss
from llmtrain.models.own_metrics import OwnMetrics
from llmtrain.models.stages import RankStages, Stage
from llmtrain.models.varlen import takes_cu_seq_lens

__all__ = [
    "ChunkedLoss",
    "Objective",
    "OwnLoss",
    "OwnMetrics",
    "RankStages",
    "Stage",
    "build_model",
    "build_sharded",
    "check_trained",
    "check_weights",
    "chunked_loss",
    "find_cut_and_split",
    "model_configuration",
    "router_loss_weight",
    "stage_builder",
    "stage_names",
    "takes_cu_seq_lens",
    "target_loss_sum",
    "target_losses",
]
