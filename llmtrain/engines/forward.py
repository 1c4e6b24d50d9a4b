"""One forward pass of a causal LM, the same for every engine that calls the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data import MicroBatch
from llmtrain.engines.documents import bounds_for, documents_known
from llmtrain.models import ChunkedLoss, chunked_loss, fp8, liger, router_loss_weight, target_loss_sum
from llmtrain.models.chunked import check_chunks
from llmtrain.models.compiled import check_compiler, check_layers, compile_layers, compiled_loss, share_processors
from llmtrain.models.varlen_check import check_attention
from llmtrain.plan import Plan
from llmtrain.plan.kernels import CHUNK_TOKENS, chunks_loss, recomputes_loss


def install_kernels(model: PreTrainedModel, plan: Plan) -> None:
    """Configures the kernels of a whole model according to the plan, before an engine takes the model.

    Raises RecipeError as `check_kernels` does.
    """
    check_kernels(model.config, plan)
    use_kernels(model, plan)


def check_kernels(config: PreTrainedConfig, plan: Plan) -> None:
    """Tries the plan's kernels on a tiny copy of the model of `config`.

    Raises RecipeError if the model's family does not support them.
    """
    recipe, device = plan.recipe, _device(plan)
    kernels = recipe.kernels
    check_attention(config, recipe.model.attention_kernel)
    compiled = [name for name in ("blocks", "loss") if getattr(kernels, name) == "compiled"]
    if compiled:
        check_compiler([f"kernels.{name}" for name in compiled], plan.cluster.spec.on_cpu)
    if kernels.blocks == "compiled":
        check_layers(config, recipe.model.attention_kernel)
    elif kernels.blocks == "liger":
        liger.check_blocks(config, device)
    if kernels.fp8 != "off":
        fp8.check_fp8(kernels.fp8, device)
    if kernels.loss == "liger":
        liger.check_loss(config, device)
    elif chunks_loss(plan):
        check_chunks(config)


def use_kernels(model: PreTrainedModel, plan: Plan, has_head: bool = True) -> None:
    """Configures the kernels of a model, or of a stage of it, that `check_kernels` has accepted.

    has_head: whether the loss is computed from the model's output.
    """
    recipe, kernels = plan.recipe, plan.recipe.kernels
    if kernels.fp8 != "off":
        fp8.use_fp8(model, kernels.fp8)
    if "compiled" in (kernels.blocks, kernels.loss):
        share_processors(plan.cluster.devices_per_node)
    if kernels.blocks == "compiled":
        compile_layers(model, recipe.model.attention_kernel)
    elif kernels.blocks == "liger":
        liger.use_blocks(model)
    if not has_head:
        return
    if kernels.loss == "liger":
        liger.LigerLoss(model)
    elif chunks_loss(plan):
        loss = compiled_loss() if kernels.loss == "compiled" else target_loss_sum
        ChunkedLoss(model, CHUNK_TOKENS, recomputes_loss(recipe), loss)


def _device(plan: Plan) -> torch.device:
    """Returns the kind of device that ranks compute on; for GPUs, this rank's device."""
    return torch.device("cpu" if plan.cluster.spec.on_cpu else "cuda")


def forward(
    call: Callable[..., Any], model: PreTrainedModel, batch: MicroBatch, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum of the cross-entropies of a micro-batch, and the auxiliary loss to add, if the model has one.

    call: the engine, or whatever else stands for the model. No attention mask is passed: `transformers` finds the
    boundaries of packed documents in `position_ids`, which restart at 0 in each document
    (`masking_utils.find_packed_sequence_indices`). A kernel without masks receives the boundaries as arguments.
    """
    labels = batch.labels.to(device, non_blocking=True)
    inputs = {
        "input_ids": batch.input_ids.to(device, non_blocking=True),
        "position_ids": batch.position_ids.to(device, non_blocking=True),
        "use_cache": False,
    }
    if chunked_loss(model):
        inputs["targets"] = labels
    with documents_known(batch) as documents:
        output = call(**inputs, **bounds_for(model, batch, device, documents))
    loss_sum = output.loss_sum if "targets" in inputs else target_loss_sum(output.logits, labels)
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is None:
        return loss_sum, None
    # Load balancing loss of the experts, a mean over the tokens of the micro-batch (arXiv 2101.03961).
    return loss_sum, router_loss_weight(model.config) * auxiliary
