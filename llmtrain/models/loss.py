"""The loss of a language model as a sum, which the caller that knows the global batch divides.

Parameters that no loss depends on are frozen. The indexer of sparse attention chooses the tokens that attention reads:
those with its largest scores. Such a choice has no gradient, and texts do not reach the vision tower of Gemma 3, so
plain PyTorch leaves these weights unchanged. DeepSpeed, however, would reduce zeros for them, and an optimizer applies
weight decay to parameters whose gradient is zero. Once they are frozen, all engines treat them alike.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data import NO_TARGET
from llmtrain.plan.facts.built_model import without_gradient


def target_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the cross-entropies over the target tokens, in nats, in fp32.

    It is a sum and not a mean, because micro-batches hold different numbers of target tokens: in a mean of means, a
    token's weight would depend on its neighbours (huggingface/transformers#34191).

    logits: [batch, T, vocab]; labels: [batch, T], already shifted; NO_TARGET at positions without a target.
    """
    return torch.nn.functional.cross_entropy(
        logits.float().view(-1, logits.size(-1)), labels.view(-1), ignore_index=NO_TARGET, reduction="sum"
    )


def target_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each target token, [batch, T], in nats, in fp32; 0 without a target.

    logits and labels: as for `target_loss_sum`.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.float().view(-1, logits.size(-1)), labels.view(-1), ignore_index=NO_TARGET, reduction="none"
    )
    return losses.view_as(labels)


def router_loss_weight(config: PreTrainedConfig) -> float:
    """Returns the coefficient of the auxiliary loss of a mixture of experts.

    JetMoE and DBRX have other names for it.
    """
    feed_forward = getattr(config, "ffn_config", None)
    names = ((config, "router_aux_loss_coef"), (config, "aux_loss_coef"), (feed_forward, "moe_loss_weight"))
    return float(next(getattr(part, name) for part, name in names if hasattr(part, name)))


def freeze_unused(model: PreTrainedModel) -> PreTrainedModel:
    """Freezes the parameters that the loss of texts does not depend on, and returns the model, which is whole."""
    for name in without_gradient(model.config):
        model.get_parameter(name).requires_grad_(False)
    return model
