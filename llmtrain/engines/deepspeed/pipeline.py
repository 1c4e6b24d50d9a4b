"""Pipeline parallelism × ZeRO-1 on stages of the model's own forward, under several schedules.

DeepSpeed's pipeline engine has the groups, the optimizer and the update; `passes.py` runs the schedule, because
DeepSpeed's own knows one stage per rank only. Tensor parallel ranks may share each stage, through llmtrain's own slices
(`llmtrain.models.tensor`) on DeepSpeed's three-dimensional topology. To DeepSpeed, ranks that share sequences
(`llmtrain.engines.deepspeed.sequence`) are data parallel ranks, as without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.deepspeed.passes import PassRunner, PipeLinks, Tensors
from llmtrain.engines.deepspeed.tensor import SlicedAxis
from llmtrain.engines.engine import Accumulated, with_router_loss
from llmtrain.engines.forward import LabeledPositions, chunk_arguments, computed_at_head, loss_of
from llmtrain.engines.runtime.agree import broadcast
from llmtrain.engines.runtime.distributed import is_alone
from llmtrain.engines.state.shards import ReplicaIndex
from llmtrain.models import (
    Objective,
    OwnLoss,
    OwnMetrics,
    RankStages,
    chunked_loss,
    router_loss_weight,
    stage_builder,
    stage_names,
)
from llmtrain.models.build import StageBuilder
from llmtrain.models.nf4 import named_weights
from llmtrain.models.precision import autocast, weight_dtype
from llmtrain.models.sharding import Sharding
from llmtrain.models.stages import Stage
from llmtrain.models.tensor.collectives import TorchCommunicator
from llmtrain.overrides.deepspeed import PipelineTiedByName, accumulating, reduce_pipeline, step_pipeline
from llmtrain.plan import Plan
from llmtrain.plan.schedules import PipelineSchedule


class RankSpec(LayerSpec):  # type: ignore[misc]
    """The stages of a rank, which are built only there."""

    def __init__(self, make: Callable[[int], RankStages], rank: int) -> None:
        super().__init__(RankStages)
        self._make = make
        self._rank = rank

    def build(self, log: bool = False) -> RankStages:
        """Returns the stages, with their weights."""
        return self._make(self._rank)


class StagePipeline(PipelineTiedByName):
    """A pipeline whose ranks, or groups of tensor parallel ranks, hold the stages that the schedule gives them.

    Ranks are numbered with the tensor groups innermost, so the ranks of such a group are adjacent and on one node.
    DeepSpeed would split a list of layers. Here the model is split beforehand, so that each rank builds only
    its own part.
    """

    def __init__(
        self, build: StageBuilder, plan: Plan, shardings: Sequence[Sharding], names: Callable[[], list[list[str]]]
    ) -> None:
        """shardings: of the other axes. names: returns the names of each stage's weights; used if there are no other
        ranks to ask."""
        schedule = PipelineSchedule.of(plan.parallel)

        def make(rank: int) -> RankStages:
            # The groups exist by now, because DeepSpeed makes them before it builds layers.
            slices = TorchCommunicator(self.mpu().get_slice_parallel_group())
            return RankStages([build(stage, slices, shardings) for stage in schedule.stages_of(rank)])

        def names_of_ranks() -> list[list[str]]:
            of_stages = names()
            ranks = (schedule.stages_of(rank) for rank in range(schedule.ranks))
            return [sorted({name for stage in stages for name in of_stages[stage]}) for stages in ranks]

        super().__init__(
            names_of_ranks if is_alone() else None,
            layers=[RankSpec(make, rank) for rank in range(schedule.ranks)],
            topology=PipeModelDataParallelTopology(
                num_pp=schedule.ranks, num_mp=plan.parallel.tensor, num_dp=plan.gradient_ranks
            ),
            partition_method="uniform",
        )


class PipelineAxis(SlicedAxis):
    """Stages of consecutive layers on the ranks of a pipe, and the slices of each stage."""

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Splits the model. Raises RecipeError if it has no valid split, or if tensor ranks cannot share its stages."""
        recipe, parallel = self.plan.recipe, self.plan.parallel
        dtype = weight_dtype(parallel.precision)
        self._build_stage = stage_builder(
            recipe, parallel.stages, dtype, self.device, parallel.tensor, self.plan.megatron_sp_ranks > 1
        )

    def build(self, shardings: Sequence[Sharding]) -> StagePipeline:
        """Returns the pipeline with this rank's stages, or with its slices of them. shardings: of the other axes."""
        names = partial(stage_names, self.plan.recipe, self.plan.parallel.stages)
        self._pipeline = StagePipeline(self._build_stage, self.plan, shardings, names)
        self._grid = self._pipeline.mpu()
        return self._pipeline

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Connects the stages of the pipe."""
        self._engine = engine
        self.passes = PassRunner(
            PipelineSchedule.of(self.plan.parallel),
            self.model,
            PipeLinks(self._grid.pipe_groups, self.device),
            self.device,
            partial(autocast, self.plan.parallel.precision, self.device.type),
            partial(accumulating, engine),
        )

    def accumulate(
        self, batch: StepBatch, slices: list[MicroBatch], objective: Objective | OwnLoss | None
    ) -> Accumulated:
        """Runs one schedule over this replica's micro-batches, and reduces their gradients.

        slices: this rank's slice of each micro-batch.
        """
        self._begin(batch)
        self.passes.train(batch.micro_batches, slices, partial(self._loss, objective))
        reduce_pipeline(self._engine)
        return Accumulated(self._total / batch.divisor, self._router_loss)

    def step(self) -> None:
        """Makes the update."""
        step_pipeline(self._engine)

    def evaluate(
        self,
        batch: StepBatch,
        slices: list[MicroBatch],
        objective: Objective | OwnLoss | None,
        metrics: OwnMetrics | None = None,
    ) -> Tensor:
        """Returns this replica's sum of losses on the last stage, and zero on the others; adds it to `metrics`."""
        self._begin(batch)
        self.passes.evaluate(batch.micro_batches, slices, partial(self._loss, objective, metrics=metrics))
        return self._total

    def next_logits(self, batch: MicroBatch, batch_slice: MicroBatch) -> dict[int, Tensor]:
        """Returns the logits after the position with a label, by row, on the last stage; nothing on the others."""
        positions = LabeledPositions.of(batch_slice.labels)
        logits_by_row: dict[int, Tensor] = {}

        def run_last_stage(stage: Stage, inputs: Tensors, arguments: dict[str, Any], _: MicroBatch) -> Tensors:
            output = stage(inputs, **arguments, **positions.arguments(stage.model, self.device))
            logits_by_row.update(positions.logits_by_row(output if isinstance(output, Tensor) else output[0]))
            return ()

        self.passes.evaluate([batch], [batch_slice], run_last_stage)
        return logits_by_row

    def sum_over_replicas(self, value: Tensor) -> Tensor:
        """Sums over all ranks. The last stages have the value, equal on tensor parallel ranks; the others have zero."""
        dist.all_reduce(value)
        return value / self.plan.parallel.tensor

    @property
    def model(self) -> RankStages:
        """The stages of this rank."""
        stages: RankStages = self._pipeline.stages
        return stages

    def models(self) -> list[tuple[PreTrainedModel, bool]]:
        """Returns the models of this rank's stages; the loss is computed from the output of the last one."""
        stages: Any = self.model
        return [(stage.model, stage.is_last) for stage in stages]

    def tied_replica(self, name: str) -> ReplicaIndex:
        """Returns this rank's replica of a weight that several stages may hold, because it is tied.

        The stages have other weights besides it, so ZeRO cuts it at other places in each of them.
        """
        ranks = self._pipeline.holders(self.hugging_face_name(name))
        return ReplicaIndex(ranks.index(dist.get_rank()), len(ranks), only_first=len(ranks) > 1)

    def sum_squares(self, square: Tensor) -> None:
        """Sums over the stages."""
        dist.all_reduce(square, group=self._grid.get_pipe_parallel_group())

    def hugging_face_name(self, name: str) -> str:
        """Returns the name in the whole model; a tied weight has the name of its first occurrence."""
        return self.model.hugging_face_name(name)

    def named_weights(self, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights of all stages; the rank of a stage broadcasts them to the other ranks of the pipe."""
        seen: set[str] = set()
        group = self._grid.get_pipe_parallel_group()
        by_path = dict(named_weights(self.model))
        by_name = {name: by_path[path] for path, name in self.model.hf_names.items()}
        for source in self._grid.pp_group:
            names = broadcast(list(by_name), source, group)
            for name in names:
                if name in seen:
                    continue
                weight = whole(by_name[name]) if dist.get_rank() == source else None
                yield name, _broadcast(weight, source, group, self.device)
            seen.update(names)

    def describe(self) -> dict[str, Any]:
        """Returns the rank's place in the pipe."""
        return {"stage": self._pipeline.stage_id}

    def _begin(self, batch: StepBatch) -> None:
        """Sets the sums to zero before the passes over a batch."""
        self._num_items, self._micro_batches = batch.divisor, len(batch.micro_batches)
        self._total = torch.zeros((), device=self.device)
        stage: Any = self.model[0]
        self._router_loss = torch.zeros(2, device=self.device) if stage.cut.sends_routers else None

    def _loss(
        self,
        objective: Objective | OwnLoss | None,
        stage: Stage,
        inputs: Tensors,
        arguments: dict[str, Any],
        batch: MicroBatch,
        metrics: OwnMetrics | None = None,
    ) -> Tensors:
        """Runs the last stage; returns the loss whose gradients DeepSpeed averages, scaled if the engine scales it.

        Adds the router's loss, as `forward` does.
        """
        labels = batch.labels.to(self.device, non_blocking=True)
        if chunked_loss(stage.model):
            arguments |= chunk_arguments(labels, batch)
        with computed_at_head(stage.model, batch, objective, labels, metrics):
            output = stage(inputs, **arguments)
        result, auxiliary = (output, None) if isinstance(output, Tensor) else output
        loss_sum = loss_of(result, labels, stage.model, batch, objective, metrics)
        self._total += loss_sum.detach()
        loss = loss_sum * (self.plan.gradient_ranks / self._num_items)  # DeepSpeed averages gradients over these ranks
        if auxiliary is not None:
            auxiliary = router_loss_weight(stage.model.config) * auxiliary
            loss = loss + auxiliary / self._micro_batches
            self._router_loss = with_router_loss(self._router_loss, auxiliary)
        return (self._engine.scale(loss) if torch.is_grad_enabled() else loss,)


def _broadcast(weight: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Returns the weight of rank `source` on every rank of the group, on the CPU."""
    described: Any = broadcast(None if weight is None else (weight.shape, weight.dtype), source, group)
    if weight is None:
        weight = torch.empty(described[0], dtype=described[1], device=device)
    weight = weight.to(device).contiguous()
    dist.broadcast(weight, src=source, group=group)
    return weight.cpu().clone()
