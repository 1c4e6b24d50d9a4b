"""One forward pass of a causal LM, the same for every engine that calls the model whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from llmtrain.data import MicroBatch
from llmtrain.engines.documents import documents_known
from llmtrain.models import target_loss_sum


def forward(
    model: Callable[..., object], config: PreTrainedConfig, batch: MicroBatch, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Sum of the cross-entropies of a micro-batch, and the auxiliary loss to add, if the model has one.

    No attention mask is passed: `transformers` reads the bounds of packed documents from
    `position_ids`, which start again at 0 in each (`masking_utils.find_packed_sequence_indices`).
    """
    with documents_known(batch.position_ids):
        output = model(
            input_ids=batch.input_ids.to(device, non_blocking=True),
            position_ids=batch.position_ids.to(device, non_blocking=True),
            use_cache=False,
        )
    loss_sum = target_loss_sum(output.logits, batch.labels.to(device, non_blocking=True))  # type: ignore[attr-defined]
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is None:
        return loss_sum, None
    # Load balance of the experts, a mean over the tokens of the micro-batch (arXiv 2101.03961).
    return loss_sum, config.router_aux_loss_coef * auxiliary
