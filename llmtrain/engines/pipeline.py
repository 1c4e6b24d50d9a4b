"""DeepSpeed's pipeline engine (1F1B) × ZeRO-1 × data parallel, on stages of the model's own forward.

Each stage may be shared by tensor parallel ranks of our own (`llmtrain.models.tensor`), on DeepSpeed's
three-dimensional topology: its AutoTP cannot be joined with its pipelines. Ranks that share sequences
(`llmtrain.engines.ulysses`) are data parallel ones to it, as without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines import deepspeed_state
from llmtrain.engines.alone import is_alone
from llmtrain.engines.deepspeed import WEIGHT_DTYPES
from llmtrain.engines.documents import bounds_for, documents_known
from llmtrain.engines.forward import check_kernels, use_kernels
from llmtrain.engines.guard import Guard, Measured, over_ranks
from llmtrain.engines.held import held
from llmtrain.engines.host_checks import no_host_checks
from llmtrain.engines.norm import gradients_of, squared_norm
from llmtrain.engines.optim import parameter_groups, schedule
from llmtrain.engines.pieces import Piece, Region
from llmtrain.engines.reduction import reduce_among_several
from llmtrain.engines.seam import StepResult
from llmtrain.engines.sequence import sequence_group
from llmtrain.engines.sequence_check import check_sequence
from llmtrain.engines.state import Place, load_state, multiplied, pieces_of, save_state, untrained_pieces
from llmtrain.engines.ulysses import Ulysses
from llmtrain.engines.writer import Writer
from llmtrain.models import (
    chunked_loss,
    model_configuration,
    router_loss_weight,
    stage_builder,
    stage_names,
    target_loss_sum,
)
from llmtrain.models.build import StageBuilder
from llmtrain.models.stages import Stage
from llmtrain.models.tensor import GroupRanks, Shard, shard_of
from llmtrain.plan import Layout, Plan

Micro = tuple[tuple[Tensor, Tensor], Tensor]
"""What DeepSpeed pulls, on the first stage and on the last: the inputs, and the labels."""


class StageSpec(LayerSpec):  # type: ignore[misc]
    """A stage that is built only on the ranks that run it."""

    def __init__(self, make: Callable[[int], Stage], index: int) -> None:
        super().__init__(Stage)
        self._make = make
        self._index = index

    def build(self, log: bool = False) -> Stage:
        """The stage, with its weights."""
        return self._make(self._index)


class StagePipeline(PipelineModule):  # type: ignore[misc]
    """A pipeline of one `Stage` per rank of the pipe, or per group of tensor parallel ranks.

    Ranks are numbered with the tensor groups innermost: neighbours, and so on one node.

    DeepSpeed would cut a list of layers; here the cut is made before, so that each rank builds its
    own part and nothing else. Weights that several stages hold (tied ones) are found by their names
    in the whole model: DeepSpeed's own tied layers would tie a whole stage.
    """

    def __init__(
        self,
        build: StageBuilder,
        layout: Layout,
        loss: Callable[[Any, Tensor], Tensor],
        stage_names: Callable[[], list[list[str]]],
    ) -> None:
        """stage_names: of each stage the weights that it holds, where the other stages cannot be asked."""
        self._stage_names = stage_names

        def make(index: int) -> Stage:
            # The groups are there by now: DeepSpeed makes them before it builds layers.
            return build(index, GroupRanks(self._grid.get_slice_parallel_group()))

        super().__init__(
            layers=[StageSpec(make, index) for index in range(layout.pp)],
            topology=PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp * layout.sp),
            loss_fn=loss,
            partition_method="uniform",
        )

    @property
    def stage(self) -> Stage:
        """The stage of this rank."""
        stage: Stage = self.forward_funcs[0]
        return stage

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, Any]]:
        """Own copies of tied weights, and the ranks among which their gradients are summed."""
        return [(self.stage.get_parameter(tied["weight_attr"][0]), tied["group"]) for tied in self.tied_comms.values()]

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """DeepSpeed's records of tied weights: group, and the path of the weight in this rank's stage.

        Also marks every copy but the first, which the norm of the gradients must not count again.
        """
        own = {whole: path for path, whole in self.stage.hf_names().items()}
        by_rank: list[Any] = [None] * dist.get_world_size()
        if is_alone():
            names = self._stage_names()
            by_rank = [names[self._topo.get_coord(rank).pipe] for rank in range(len(by_rank))]
        else:
            dist.all_gather_object(by_rank, sorted(own))
        tied = sorted({name for names in by_rank for name in names if self._stages_with(name, by_rank) > 1})
        comms = {}
        for name in tied:
            # The slices of a tensor group are weights of their own, each tied along its own pipe.
            for pipe in self._grid.pipe_groups:
                ranks = [rank for rank in pipe if name in by_rank[rank]]
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    comms[name] = {"ranks": ranks, "group": group, "weight_attr": [own[name]], "module": self.stage}
                    weight: Any = self.stage.get_parameter(own[name])
                    weight.ds_pipe_replicated = self.global_rank != ranks[0]
        return comms

    def _stages_with(self, name: str, by_rank: list[list[str]]) -> int:
        return sum(name in by_rank[rank] for rank in self._grid.pp_group)


class DeepSpeedPipeline:
    """`deepspeed.initialize` on a `StagePipeline`."""

    def __init__(self, plan: Plan, ds_config: dict[str, Any], device: torch.device) -> None:
        """Raises RecipeError for a model that cannot be split so, before it is built."""
        self.plan = plan
        self.device = device
        self._scale = 1.0
        self._total = torch.zeros((), device=device)
        recipe = plan.recipe
        config = model_configuration(recipe)
        check_kernels(config, plan)  # on all ranks, so that all refuse
        if plan.layout.sp > 1:
            check_sequence(config, recipe.model.attention_kernel)
        dtype = WEIGHT_DTYPES.get(recipe.parallel.precision, torch.float32)
        build = stage_builder(recipe, plan.layout.pp, dtype, device, tensor=plan.layout.tp)
        self.module = StagePipeline(build, plan.layout, self._loss, partial(stage_names, recipe, plan.layout.pp))
        use_kernels(self.module.stage.model, plan, has_head=self.module.stage.is_last)
        if recipe.parallel.activation_checkpointing == "full":
            # The layers of a stage, as everywhere; DeepSpeed's interval would count stages, the only layers it sees.
            self.module.stage.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.engine = deepspeed.initialize(
            model=self.module,
            model_parameters=parameter_groups(self.module, recipe.optim.weight_decay),
            lr_scheduler=lambda optimizer: schedule(optimizer, recipe),
            config=ds_config,
        )[0]
        reduce_among_several(self.engine)
        self._awaited: Iterator[MicroBatch] = iter(())
        self.module.stage.register_forward_pre_hook(lambda *_: self._tell_documents())
        self.ulysses: Ulysses | None = None
        if plan.layout.sp > 1:
            self.ulysses = Ulysses(self.module.stage.model, sequence_group(plan.layout))
            # Micro-batches are interleaved, so each forward pass brings the positions that its masks are made from.
            self.module.stage.register_forward_pre_hook(lambda _, inputs: self._receive(inputs[0]))
        self.guard = Guard(recipe.guard, device)
        self.guard.watch(self.engine.basic_optimizer)

    @property
    def data_parallel_rank(self) -> int:
        """Which replica this rank belongs to: DeepSpeed's axes are pipe, data, model."""
        rank: int = self.engine.grid.get_data_parallel_id()
        return rank // self.plan.layout.sp

    def train_step(self, batch: StepBatch) -> StepResult:
        """One 1F1B schedule over this replica's micro-batches, and one update.

        DeepSpeed takes the mean over micro-batches and ranks, so the loss of each is multiplied
        by their number: the sum divided by the target tokens is left.
        """
        lr = self.engine.get_lr()[0]
        self._start(batch)
        self.guard.begin(lambda: self._measure(batch))
        with self._sharing_attention(), no_host_checks(self.plan.recipe.parallel.precision):
            self.engine.train_batch(self._micro_batches(batch))
        measured = self.guard.end()
        return StepResult(loss=measured.loss, grad_norm=measured.grad_norm, lr=lr)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Mean cross-entropy over the target tokens of all replicas."""
        self._start(batch)
        with self._sharing_attention():
            self.engine.eval_batch(self._micro_batches(batch), num_micro_batches=len(batch.micro_batches))
        return self._mean(batch)

    def save(self, writer: Writer) -> None:
        """Writes this rank's share of the pieces."""
        save_state(self, writer)

    def load(self, folder: Path) -> None:
        """Reads what any engine wrote."""
        load_state(self, folder)

    def pieces(self) -> Iterator[list[Piece]]:
        """Live pieces of what this stage trains, and of what it does not train."""
        paths = {parameter: path for path, parameter in self.module.stage.named_parameters()}
        yield from pieces_of(held(self.engine.optimizer), lambda one: self._place(paths[one], one))
        equal = multiplied(self._replica, self._slice)
        yield untrained_pieces(self.module.stage.model, equal, split=self._split)

    def progress(self) -> dict[str, Any]:
        """DeepSpeed's counters."""
        return deepspeed_state.progress(self.engine)

    def resumed(self, progress: dict[str, Any]) -> None:
        """Goes on from written pieces."""
        deepspeed_state.resumed(self.engine, progress)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight of this rank's replica, under its name in the whole model; tied ones once."""
        seen: set[str] = set()
        grid = self.engine.grid
        group = grid.get_pipe_parallel_group()
        slices = GroupRanks(grid.get_slice_parallel_group())
        own = {whole: self.module.stage.get_parameter(path) for path, whole in self.module.stage.hf_names().items()}
        for owner in grid.pp_group:
            names = [list(own)]
            dist.broadcast_object_list(names, src=owner, group=group)
            for name in names[0]:
                if name in seen:
                    continue
                weight = _joined(own[name], slices) if dist.get_rank() == owner else None
                yield name, _broadcast(weight, owner, group, self.device)
            seen.update(names[0])

    def describe(self) -> dict[str, Any]:
        """Classes that DeepSpeed has chosen, this rank's stage, the device and the backend."""
        return {
            "engine": f"deepspeed {deepspeed.__version__} pipeline",
            "stage": self.module.stage_id,
            "optimizer": type(self.engine.optimizer).__name__,
            "device": str(self.device),
            "backend": dist.get_backend(),
        }

    @property
    def _replica(self) -> tuple[int, int]:
        """This rank's number among those with the same part of the model, and their number."""
        group = self.engine.grid.get_data_parallel_group()
        return dist.get_rank(group), dist.get_world_size(group)

    def _place(self, path: str, parameter: nn.Parameter) -> Place:
        name = self.module.stage.hf_names()[path]
        copy = (0, 1) if self.plan.layout.zero_stage else self._replica
        tied = self.module.tied_comms.get(name)
        if tied is not None:
            copy = multiplied(copy, (tied["ranks"].index(dist.get_rank()), len(tied["ranks"])))
        if split := self._split(parameter):
            return name, split[0], copy
        return name, Region.whole(parameter.shape), multiplied(copy, self._slice)

    @property
    def _slice(self) -> tuple[int, int]:
        """This rank's number among those that share its stage's weights, and their number."""
        group = self.engine.grid.get_slice_parallel_group()
        return dist.get_rank(group), dist.get_world_size(group)

    def _split(self, tensor: Tensor) -> tuple[Region, tuple[int, int]] | None:
        """The region of a weight that this rank holds a slice of, and which copy of the slice; None for a whole one."""
        shard = shard_of(tensor)
        return None if shard is None else (region_of(shard, tensor.shape, *self._slice), self._replica)

    def _measure(self, batch: StepBatch) -> Measured:
        """Of all ranks, when the optimizer is about to begin; every rank of a last stage has its replica's loss."""
        if self.plan.layout.zero_stage == 0:
            norm = self._gradient_norm()
        else:
            norm = torch.as_tensor(self.engine.optimizer._global_grad_norm, device=self.device, dtype=torch.float32)
        return over_ranks(self._total / batch.target_tokens, norm, copies=self.plan.layout.tp)

    def _gradient_norm(self) -> Tensor:
        """The norm at ZeRO-0, where DeepSpeed keeps none: before the update the gradients lie whole on each stage."""
        own = [weight for weight in self.module.parameters() if not getattr(weight, "ds_pipe_replicated", False)]
        square = squared_norm(gradients_of(weight for weight in own if shard_of(weight)), self.device)
        dist.all_reduce(square, group=self.engine.grid.get_slice_parallel_group())
        square += squared_norm(gradients_of(weight for weight in own if not shard_of(weight)), self.device)
        dist.all_reduce(square, group=self.engine.grid.get_pipe_parallel_group())
        return square.sqrt().float()

    def _sharing_attention(self) -> AbstractContextManager[None]:
        return self.ulysses.active() if self.ulysses else nullcontext()

    def _receive(self, inputs: tuple[Tensor, ...]) -> None:
        assert self.ulysses is not None
        self.ulysses.receive(inputs[1])

    def _tell_documents(self) -> None:
        """Every stage runs the micro-batches of its replica in their order, whose positions all its ranks have."""
        stage, batch = self.module.stage, next(self._awaited)
        stage.context = documents_known(batch)
        stage.bounds = bounds_for(stage.model, batch, self.device)

    def _micro_batches(self, batch: StepBatch) -> Iterator[Micro]:
        for one in batch.micro_batches:
            own = self.ulysses.slice(one) if self.ulysses else one
            labels = own.labels
            if chunked_loss(self.module.stage.model):
                # The next forward pass is this micro-batch's: DeepSpeed takes labels right before it, on a last stage.
                labels = self.module.stage.targets = labels.to(self.device, non_blocking=True)
            yield (own.input_ids, own.position_ids), labels

    def _start(self, batch: StepBatch) -> None:
        ranks = self.plan.layout.dp * self.plan.layout.sp
        self._scale = len(batch.micro_batches) * ranks / batch.target_tokens
        self._total = torch.zeros((), device=self.device)
        self._awaited = iter(batch.micro_batches)

    def _loss(self, output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """Runs on the last stage, once for each micro-batch; a router's loss is added, as in `forward`.

        output: logits, or the sum of the losses where the stage's model has made it.
        """
        result, auxiliary = (output, None) if isinstance(output, Tensor) else output
        loss_sum = result if chunked_loss(self.module.stage.model) else target_loss_sum(result, labels)
        self._total += loss_sum.detach()
        loss: Tensor = loss_sum * self._scale
        if auxiliary is None:
            return loss
        return loss + router_loss_weight(self.module.stage.model.config) * auxiliary

    def _mean(self, batch: StepBatch) -> Tensor:
        """The cross-entropy of all replicas over the target tokens; every rank of a last stage has its replica's."""
        dist.all_reduce(self._total)
        return self._total / (batch.target_tokens * self.plan.layout.tp)


def region_of(shard: Shard, local: torch.Size, rank: int, ranks: int) -> Region:
    """Where a rank's slice of shape `local` lies in the whole."""
    width = local[shard.dim] // shard.blocks
    shape = (*local[: shard.dim], local[shard.dim] * ranks, *local[shard.dim + 1 :])
    return Region.ranges(shape, shard.dim, [((block * ranks + rank) * width, width) for block in range(shard.blocks)])


def _joined(parameter: torch.nn.Parameter, slices: GroupRanks) -> Tensor:
    """The whole of a parameter that the ranks of a stage hold slices of."""
    shard = shard_of(parameter)
    return parameter.detach() if shard is None else shard.whole(slices.gather(parameter.detach()))


def _broadcast(weight: Tensor | None, owner: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The owner's weight on every rank of the group, on the CPU."""
    shape: list[Any] = [None if weight is None else (weight.shape, weight.dtype)]
    dist.broadcast_object_list(shape, src=owner, group=group)
    if weight is None:
        weight = torch.empty(shape[0][0], dtype=shape[0][1], device=device)
    weight = weight.to(device).contiguous()
    dist.broadcast(weight, src=owner, group=group)
    return weight.cpu().clone()
