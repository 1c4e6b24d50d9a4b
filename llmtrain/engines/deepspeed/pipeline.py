"""Pipeline parallelism through DeepSpeed's engine (1F1B) × ZeRO-1, on stages of the model's own forward.

Tensor parallel ranks may share each stage, through llmtrain's own slices (`llmtrain.models.tensor`) on DeepSpeed's
three-dimensional topology, because DeepSpeed's AutoTP cannot be combined with its pipelines. To DeepSpeed, ranks that
share sequences (`llmtrain.engines.deepspeed.sequence`) are data parallel ranks, as without a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.data import Completions, MicroBatch, StepBatch
from llmtrain.engines.deepspeed.axis import EngineAxis, Portion
from llmtrain.engines.engine import StepResult
from llmtrain.engines.forward import Places, bounds_for, documents_known, loss_of
from llmtrain.engines.state.pieces import Region
from llmtrain.models import chunked_loss, router_loss_weight, stage_builder, stage_names
from llmtrain.models.build import StageBuilder
from llmtrain.models.packed.nf4 import named_weights
from llmtrain.models.precision import weight_dtype
from llmtrain.models.stages import Stage
from llmtrain.models.tensor import GroupRanks, Shard, shard_of
from llmtrain.overrides.deepspeed import PipelineTiedByName, keep_losses_apart
from llmtrain.plan import Plan
from llmtrain.runtime.alone import is_alone

if TYPE_CHECKING:
    from llmtrain.engines.deepspeed.engine import DeepSpeedEngine

Micro = tuple[tuple[Tensor, Tensor], Tensor]
"""What DeepSpeed's pipeline reads on its first and last stage: the inputs, and the labels."""


class StageSpec(LayerSpec):  # type: ignore[misc]
    """A stage that is built only on the ranks that run it."""

    def __init__(self, make: Callable[[int], Stage], index: int) -> None:
        super().__init__(Stage)
        self._make = make
        self._index = index

    def build(self, log: bool = False) -> Stage:
        """Returns the stage, with its weights."""
        return self._make(self._index)


class StagePipeline(PipelineTiedByName):
    """A pipeline of one `Stage` per rank of the pipe, or per group of tensor parallel ranks.

    Ranks are numbered with the tensor groups innermost, so the ranks of such a group are adjacent and on one node.
    DeepSpeed would split a list of layers. Here the model is split before, so that each rank builds its own part and
    nothing else.
    """

    def __init__(
        self,
        build: StageBuilder,
        plan: Plan,
        loss: Callable[[Any, Tensor], Tensor],
        names: Callable[[], list[list[str]]],
    ) -> None:
        """names: returns the names of each stage's weights; used if the other ranks are not there to be asked."""

        def make(index: int) -> Stage:
            # The groups exist by now, because DeepSpeed makes them before it builds layers.
            return build(index, GroupRanks(self.mpu().get_slice_parallel_group()))

        super().__init__(
            names if is_alone() else None,
            layers=[StageSpec(make, index) for index in range(plan.parallel.pipeline)],
            topology=PipeModelDataParallelTopology(
                num_pp=plan.parallel.pipeline, num_mp=plan.parallel.tensor, num_dp=plan.holders
            ),
            loss_fn=loss,
            partition_method="uniform",
        )


class PipelineAxis(EngineAxis):
    """Stages of consecutive layers, one for each rank of a pipe; DeepSpeed interleaves their passes (1F1B)."""

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Splits the model. Raises RecipeError if it has no valid split, or if tensor ranks cannot share its stages."""
        recipe, parallel = self.plan.recipe, self.plan.parallel
        dtype = weight_dtype(parallel.precision)
        self._stages = stage_builder(recipe, parallel.pipeline, dtype, self.device, tensor=parallel.tensor)

    def build(self, ds_config: dict[str, Any]) -> StagePipeline:
        """Returns the pipeline with this rank's stage, or with its slice of the stage."""
        names = partial(stage_names, self.plan.recipe, self.plan.parallel.pipeline)
        self._pipeline = StagePipeline(self._stages, self.plan, self._loss, names)
        return self._pipeline

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Makes each forward pass of the stage use the documents of its micro-batch."""
        self._engine = engine
        keep_losses_apart(engine.engine)
        self._names = self._stage.hf_names()
        self._awaited: Iterator[MicroBatch] = iter(())
        self._places: Places | None = None
        self._stage.register_forward_pre_hook(lambda *_: self._tell_documents())

    def train_step(self, batch: StepBatch) -> StepResult:
        """Runs one schedule over this replica's micro-batches, with one update."""
        lr = self._engine.learning_rate
        self._start(batch)
        measured = self._engine.judged(
            lambda: self._total / batch.terms,
            lambda: self._engine.engine.train_batch(self._micro_batches(batch.micro_batches)),
        )
        return StepResult(loss=measured.loss, grad_norm=measured.grad_norm, lr=lr)

    def evaluate(self, batch: StepBatch) -> Tensor:
        """Returns this replica's sum of losses on the last stage, and zero on the others."""
        self._start(batch)
        self._engine.engine.eval_batch(
            self._micro_batches(batch.micro_batches), num_micro_batches=len(batch.micro_batches)
        )
        return self._total

    def next_logits(self, batch: MicroBatch) -> dict[int, Tensor]:
        """Returns the logits after the position with a label, by row, on the last stage; nothing on the others."""
        self._start(StepBatch([batch], target_tokens=1, samples=0, first_sample=0))
        self._places = Places.of(self._engine.slice(batch).labels)
        self._found: dict[int, Tensor] = {}
        try:
            self._engine.engine.eval_batch(self._micro_batches([batch]), num_micro_batches=1)
        finally:
            self._places = None
        return self._found

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the same stage."""
        group: dist.ProcessGroup = self._grid.get_data_parallel_group()
        return group

    @property
    def copies(self) -> dist.ProcessGroup:
        """The ranks that share a stage."""
        group: dist.ProcessGroup = self._grid.get_slice_parallel_group()
        return group

    def portion(self, name: str, tensor: Tensor) -> Portion | None:
        """Returns this rank's slice of a weight that the ranks of a stage share."""
        shard = shard_of(tensor)
        if shard is None:
            return None
        rank, ranks = dist.get_rank(self.copies), dist.get_world_size(self.copies)
        return Portion(region_of(shard, tensor.shape, rank, ranks), self.copies, self.replicas)

    def tied_copy(self, name: str) -> tuple[int, int]:
        """Returns (index, number) of this stage among those that hold the weight."""
        tied = self._pipeline.tied_comms.get(self.hugging_face_name(name))
        return (0, 1) if tied is None else (tied["ranks"].index(dist.get_rank()), len(tied["ranks"]))

    def whole(self, parameter: nn.Parameter, own: Tensor) -> Tensor:
        """Joins the slices."""
        shard = shard_of(parameter)
        return own if shard is None else shard.whole(GroupRanks(self.copies).gather(own))

    def sum_squares(self, square: Tensor) -> None:
        """Sums over the stages."""
        dist.all_reduce(square, group=self._grid.get_pipe_parallel_group())

    def hugging_face_name(self, name: str) -> str:
        """Returns the name in the whole model; a tied weight has the name of its first occurrence."""
        return self._names.get(f"model.{name}", name)

    def named_weights(self, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights of all stages; the rank of a stage broadcasts them to the other ranks of the pipe."""
        seen: set[str] = set()
        group = self._grid.get_pipe_parallel_group()
        held = dict(named_weights(self._stage))
        own = {name: held[path] for path, name in self._names.items()}
        for owner in self._grid.pp_group:
            names = [list(own)]
            dist.broadcast_object_list(names, src=owner, group=group)
            for name in names[0]:
                if name in seen:
                    continue
                weight = whole(own[name]) if dist.get_rank() == owner else None
                yield name, _broadcast(weight, owner, group, self.device)
            seen.update(names[0])

    @property
    def _stage(self) -> Stage:
        stage: Stage = self._pipeline.stage
        return stage

    @property
    def _grid(self) -> Any:
        return self._pipeline.mpu()

    def _start(self, batch: StepBatch) -> None:
        """Prepares a pass over a batch.

        DeepSpeed averages over micro-batches and ranks. Each loss is therefore multiplied by their numbers, so that
        the result is the sum divided by the number of terms.
        """
        self._scale = len(batch.micro_batches) * self._engine.averaged_ranks / batch.terms
        self._completions: deque[Completions | None] = deque()
        self._total = torch.zeros((), device=self.device)
        if self._engine.objective:
            self._engine.objective.begin()
        self._awaited = iter(batch.micro_batches)

    def _tell_documents(self) -> None:
        """Sets the documents of the next micro-batch, whose positions all ranks of the replica have.

        Every stage runs the micro-batches of its replica in order.
        """
        batch = next(self._awaited)
        self._stage.context = documents_known(batch)
        self._stage.bounds = bounds_for(self._stage.model, batch, self.device)

    def _micro_batches(self, batches: Iterable[MicroBatch]) -> Iterator[Micro]:
        """Yields micro-batches on the device: DeepSpeed's own copies would wait for all that is queued there."""
        for one in batches:
            own = self._engine.slice(one)
            self._completions.append(own.completions)
            tensors = (own.input_ids, own.position_ids, own.labels)
            tokens, positions, labels = (one.to(self.device, non_blocking=True) for one in tensors)
            if self._places and self._stage.is_last:
                self._stage.kept = self._places.arguments(self._stage.model, self.device)
            elif chunked_loss(self._stage.model):
                # DeepSpeed reads labels right before the last stage's forward pass, so the next one is for these.
                self._stage.targets = labels
            yield (tokens, positions), labels

    def _loss(self, output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """Returns the scaled loss of a micro-batch, on the last stage; adds the router's loss, as `forward` does.

        output: logits, or the sum of the losses if the stage's model computes it.
        """
        result, auxiliary = (output, None) if isinstance(output, Tensor) else output
        if self._places:
            self._found = self._places.rows_of(result)
            return torch.zeros((), device=self.device)
        # The last stage reads, runs and judges one micro-batch after the other.
        loss_sum = loss_of(result, labels, self._stage.model, self._completions.popleft(), self._engine.objective)
        self._total += loss_sum.detach()
        loss: Tensor = loss_sum * self._scale
        if auxiliary is None:
            return loss
        return loss + router_loss_weight(self._stage.model.config) * auxiliary


def region_of(shard: Shard, local: torch.Size, rank: int, ranks: int) -> Region:
    """Returns the location of a rank's slice of shape `local` in the whole weight."""
    width = local[shard.dim] // shard.blocks
    shape = (*local[: shard.dim], local[shard.dim] * ranks, *local[shard.dim + 1 :])
    return Region.ranges(shape, shard.dim, [((block * ranks + rank) * width, width) for block in range(shard.blocks)])


def _broadcast(weight: Tensor | None, owner: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Returns the owner's weight on every rank of the group, on the CPU."""
    shape: list[Any] = [None if weight is None else (weight.shape, weight.dtype)]
    dist.broadcast_object_list(shape, src=owner, group=group)
    if weight is None:
        weight = torch.empty(shape[0][0], dtype=shape[0][1], device=device)
    weight = weight.to(device).contiguous()
    dist.broadcast(weight, src=owner, group=group)
    return weight.cpu().clone()
