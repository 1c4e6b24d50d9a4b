"""One forward pass of a causal LM, the same for every engine that calls the whole model.

Masks keep packed documents apart, and parts of layers in which no mask can do so compute each on its own
(`llmtrain.models.documents`). Attention kernels without a mask receive the boundaries as arguments of the forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data import Documents, MicroBatch
from llmtrain.models import (
    ChunkedLoss,
    Objective,
    OwnLoss,
    OwnMetrics,
    chunked_loss,
    liger,
    precision,
    router_loss_weight,
    takes_cu_seq_lens,
    target_loss_sum,
    target_losses,
)
from llmtrain.models.chunked import check_chunks
from llmtrain.models.compiled import (
    check_compiler,
    check_layers,
    compile_for_cpu,
    compile_layers,
    compiled_loss,
    share_compiler_threads,
)
from llmtrain.models.documents import document_masks, keep_apart
from llmtrain.models.head_loss import HeadLoss, check_head, head_loss
from llmtrain.models.noise import noisy_embeddings
from llmtrain.models.recompute.checkpoints import use_recomputation
from llmtrain.models.recompute.tiles import check_tiles, use_tiles
from llmtrain.models.tiny.classifier_check import check_classifier
from llmtrain.models.tiny.documents_check import mixing_parts
from llmtrain.models.tiny.varlen_check import check_attention
from llmtrain.models.varlen import check_device
from llmtrain.overrides.transformers import attention_of
from llmtrain.plan import Plan
from llmtrain.plan.facts.wrapper import text_of
from llmtrain.plan.kernels import CHUNK_TOKENS, chunks_loss, overwrites_logits, recomputes_loss
from llmtrain.recipe import Recipe


def varlen_arguments(model: PreTrainedModel, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Returns arguments of a model's forward pass by which its attention keeps documents apart; none if a mask does so.

    batch: whole sequences. If its documents are unknown, its positions are copied from the device.
    """
    if not takes_cu_seq_lens(attention_of(model)):
        return {}
    return (batch.documents or Documents.of(batch.position_ids.cpu())).arguments(device)


def install_kernels(model: PreTrainedModel, plan: Plan) -> None:
    """Configures kernels and recomputation of a whole model according to the plan, before an engine takes the model.

    Raises RecipeError as `check_kernels` does.
    """
    check_kernels(model.config, plan)
    use_kernels(model, plan)


def check_kernels(config: PreTrainedConfig, plan: Plan) -> None:
    """Tries the plan's kernels on a tiny copy of the model of `config`.

    Raises RecipeError if the model's family does not support them.
    """
    recipe, kernels, config = plan.recipe, plan.recipe.kernels, text_of(config)
    device = torch.device("cpu" if plan.cluster.spec.on_cpu else "cuda")  # for GPUs, that of this rank
    check_device(recipe.model.attention_kernel, device)
    compiled = [name for name in ("blocks", "loss") if getattr(kernels, name) == "compiled"]
    if compiled:
        check_compiler([f"kernels.{name}" for name in compiled], plan.cluster.spec.on_cpu)
    if plan.cluster.spec.on_cpu:
        compile_for_cpu(recipe.model.attention_kernel, kernels.loss)
    check_attention(config, recipe.model.attention_kernel)
    if recipe.model.num_labels is not None:
        check_classifier(config)
    if recipe.objective.hidden_states:
        check_head(config)
    if kernels.blocks == "compiled":
        kinds = mixing_parts(config) if recipe.data.has_document_mask else None
        check_layers(config, recipe.model.attention_kernel, kinds)
    elif kernels.blocks == "liger":
        liger.check_blocks(config, device)
    if recipe.parallel.tiled_mlp:
        check_tiles(config)
    if kernels.fp8 != "off":
        precision.check_fp8(kernels.fp8, device)
    if kernels.loss == "liger":
        liger.check_loss(config, device)
    elif chunks_loss(plan):
        # The check runs on the CPU, where compiled code for GPUs is not what the run computes with.
        check_chunks(config, compiled_loss(on_cpu=True) if overwrites_logits(plan) else target_loss_sum)


def use_kernels(model: PreTrainedModel, plan: Plan, has_head: bool = True) -> None:
    """Configures kernels, which `check_kernels` has accepted, and recomputation of a model, or of a stage of it.

    has_head: whether the loss is computed from the model's output.
    """
    recipe, kernels = plan.recipe, plan.recipe.kernels
    if recipe.data.has_document_mask or recipe.parallel.sequence > 1:
        keep_apart(model, mixing_parts(text_of(model.config)))
    use_recomputation(model, recipe.parallel, is_ring=plan.sequence_ring > 1)
    if kernels.fp8 != "off":
        precision.use_fp8(model, kernels.fp8)
    if "compiled" in (kernels.blocks, kernels.loss):
        share_compiler_threads(plan.cluster.devices_per_node)
    if kernels.blocks == "compiled":
        compile_layers(model, recipe.model.attention_kernel, is_ring=plan.sequence_ring > 1)
    elif kernels.blocks == "liger":
        liger.use_liger_layers(model)
    if recipe.parallel.tiled_mlp:
        use_tiles(model, plan.model.hidden_size)
    if not has_head:
        return
    if recipe.objective.hidden_states:
        HeadLoss(model)
        return
    if kernels.loss == "liger":
        liger.LigerLoss(model)
    elif chunks_loss(plan):
        if recipe.objective.is_own:
            vocabulary = model.config.get_text_config().vocab_size
            ChunkedLoss(model, CHUNK_TOKENS, recomputes_loss(recipe), OwnLoss(recipe, vocabulary).sums)
            return
        of_tokens = recipe.objective.is_preference
        plain = target_losses if of_tokens else target_loss_sum
        on_cpu = plan.cluster.spec.on_cpu
        loss = compiled_loss(on_cpu, of_tokens) if kernels.loss == "compiled" else plain
        ChunkedLoss(model, CHUNK_TOKENS, recomputes_loss(recipe), loss)


def forward(
    call: Callable[..., Any],
    model: PreTrainedModel,
    batch: MicroBatch,
    device: torch.device,
    objective: Objective | OwnLoss | None = None,
    whole: MicroBatch | None = None,
    metrics: OwnMetrics | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum of the losses of a micro-batch, and the auxiliary loss to add, if the model has one.

    The sum is over target tokens, or over the items of an objective. call: the engine, or whatever else
    stands for the model. whole: the sequences of which `batch` is a slice; default: `batch`. metrics: those of an
    evaluation, to which the micro-batch is added.

    No attention mask is passed: `transformers` finds the boundaries of packed documents in `position_ids`, which
    restart at 0 in each document (`masking_utils.find_packed_sequence_indices`). A kernel without masks receives the
    boundaries as arguments.
    """
    labels = batch.labels.to(device, non_blocking=True)
    targets = chunk_arguments(labels, batch) if chunked_loss(model) else {}
    with computed_at_head(model, batch, objective, labels, metrics):
        output, auxiliary = run_model(call, model, batch, whole or batch, device, **targets)
    result = output.loss_sum if targets else output.logits
    return loss_of(result, labels, model, batch, objective, metrics), auxiliary


def run_model(
    call: Callable[..., Any],
    model: PreTrainedModel,
    batch: MicroBatch,
    whole: MicroBatch,
    device: torch.device,
    **arguments: Tensor,
) -> tuple[Any, Tensor | None]:
    """Returns the model's output, and the auxiliary loss to add, if the model has one. Arguments as for `forward`."""
    position_ids = batch.position_ids.to(device, non_blocking=True)
    inputs: dict[str, Any] = {"position_ids": position_ids}
    if batch.images is not None:
        inputs |= batch.images.arguments(position_ids)
    with document_masks(whole), noisy_embeddings(model, whole):
        output = call(
            input_ids=batch.input_ids.to(device, non_blocking=True),
            use_cache=False,
            **inputs,
            **arguments,
            **varlen_arguments(model, whole, device),
        )
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is None:
        return output, None
    # Load balancing loss of the experts, a mean over the tokens of the micro-batch (arXiv 2101.03961).
    return output, router_loss_weight(model.config) * auxiliary


def chunk_arguments(labels: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
    """Returns the arguments with which a model with a `ChunkedLoss` returns losses. labels: on the device."""
    values = {} if batch.values is None else {"values": batch.values.to(labels.device, non_blocking=True)}
    return {"targets": labels, **values}


@torch.no_grad()
def next_logits(
    call: Callable[..., Any],
    model: PreTrainedModel,
    batch: MicroBatch,
    device: torch.device,
    whole: MicroBatch | None = None,
) -> dict[int, Tensor]:
    """Returns what `Engine.next_logits` returns, for the rows of which this rank holds the position with a label.

    whole: as for `forward`.
    """
    positions, whole = LabeledPositions.of(batch.labels), whole or batch
    with document_masks(whole):
        output = call(
            input_ids=batch.input_ids.to(device),
            position_ids=batch.position_ids.to(device),
            use_cache=False,
            **positions.arguments(model, device),
            **varlen_arguments(model, whole, device),
        )
    return positions.logits_by_row(output.logits)


@dataclass(frozen=True)
class LabeledPositions:
    """The positions with a label, at most one per row; only their columns go through the head."""

    rows: list[int]
    columns: list[int]

    @classmethod
    def of(cls, labels: Tensor) -> Self:
        """Finds them in [batch, T], on the host."""
        rows, columns = (labels >= 0).nonzero(as_tuple=True)
        return cls(rows.tolist(), columns.tolist())

    @property
    def kept(self) -> list[int]:
        """The columns of the logits; any one if there is no position."""
        return sorted(set(self.columns)) or [0]

    def arguments(self, model: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
        """Returns the argument of a model's forward pass with which it computes only these columns, if it has one."""
        takes = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        return {"logits_to_keep": torch.tensor(self.kept, device=device)} if takes else {}

    def logits_by_row(self, logits: Tensor) -> dict[int, Tensor]:
        """Returns the logits [vocab] of each row. logits: [batch, T, vocab], or only the kept columns of it."""
        kept = self.kept if logits.size(1) == len(self.kept) else range(logits.size(1))
        pairs = zip(self.rows, self.columns, strict=True)
        return {row: logits[row, kept.index(column)].float() for row, column in pairs}


def objective_of(
    recipe: Recipe, config: PreTrainedConfig, slices: ProcessGroup | None = None
) -> Objective | OwnLoss | None:
    """Returns the objective of a recipe, unless its loss is the cross-entropy of each token.

    config: of the model. slices: the ranks that share this rank's sequences.
    """
    if recipe.objective.is_own:
        return OwnLoss(recipe, config.get_text_config().vocab_size)
    return Objective(recipe.objective, slices) if recipe.objective.is_preference else None


def own_metrics_of(recipe: Recipe) -> OwnMetrics | None:
    """Returns the user's own metrics of evaluations, if there are any."""
    return OwnMetrics(recipe) if recipe.evaluation.metrics else None


def computed_at_head(
    model: PreTrainedModel,
    batch: MicroBatch,
    objective: Objective | OwnLoss | None,
    labels: Tensor,
    metrics: OwnMetrics | None,
) -> AbstractContextManager[None]:
    """Returns a context in which a model with `HeadLoss` returns the sums of the user's own loss instead of logits.

    A model that does not return logits adds them to `metrics`. labels: those of the batch, on the device.
    """
    if chunked := chunked_loss(model):
        return chunked.observed_by(metrics.add) if metrics else nullcontext()
    at_head = head_loss(model)
    if at_head is None or not isinstance(objective, OwnLoss):
        return nullcontext()
    loss = partial(objective.of_batch, batch)
    if metrics is None:
        return at_head.computing(loss)

    def observed(hidden: Tensor, weight: Tensor) -> Tensor:
        metrics.add_hidden(hidden, weight, labels)
        return loss(hidden, weight)

    return at_head.computing(observed)


def loss_of(
    result: Tensor,
    labels: Tensor,
    model: PreTrainedModel,
    batch: MicroBatch,
    objective: Objective | OwnLoss | None,
    metrics: OwnMetrics | None = None,
) -> Tensor:
    """Returns the sum of a micro-batch's losses, over target tokens, or over the items of an objective.

    result: the model's logits, or what its `ChunkedLoss` or `HeadLoss` has made of them. labels: those of the batch, on
    the device. metrics: get the logits, if the model has returned them.
    """
    is_computed = chunked_loss(model) or head_loss(model)
    if metrics and not is_computed:
        metrics.add(result, labels)
    if isinstance(objective, OwnLoss):
        return objective.take(result) if is_computed else objective(result, batch)
    if objective is None:
        return result if is_computed else target_loss_sum(result, labels)
    assert batch.completions is not None, "an objective is given completions"
    return objective(result if is_computed else target_losses(result, labels), batch.completions)
