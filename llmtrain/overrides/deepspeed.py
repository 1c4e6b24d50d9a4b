"""The private parts of DeepSpeed 0.19.8 that llmtrain replaces or reads. `llmtrain.overrides` has the list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from deepspeed import ops
from deepspeed.runtime import bf16_optimizer, compiler
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from llmtrain.overrides import replaced
from llmtrain.overrides.torch import squared_norm
from llmtrain.plan.axes import used
from llmtrain.recipe import ParallelConfig, Precision

T = TypeVar("T")


def reset_groups() -> None:
    """Discards DeepSpeed's process groups, so that the next engine of this process makes its own.

    After a pipeline or tensor parallelism, the next engine would join their groups. After hpZ, another one with hpZ
    fails.
    """
    groups.mpu = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def register_expert_groups(degree: int, sharing: dist.ProcessGroup, equal: dist.ProcessGroup) -> str:
    """Gives DeepSpeed the groups of experts; returns the name under which it finds them.

    It would make them itself for ranks without tensor parallelism only. sharing: the ranks that share the experts.
    equal: those that hold the same ones.
    """
    name = f"ep_size_{degree}"
    groups._EXPERT_PARALLEL_GROUP = {name: sharing}
    groups._EXPERT_PARALLEL_GROUP_RANKS = {name: dist.get_process_group_ranks(sharing)}
    groups._EXPERT_DATA_PARALLEL_GROUP = {name: equal}
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS = {name: dist.get_process_group_ranks(equal)}
    return name


def partition_over(expert: Any, equal: dist.ProcessGroup, name: str) -> None:
    """Lets ZeRO-3 partition a parameter of experts over the ranks that hold the same ones.

    name: of `register_expert_groups`.
    """
    expert.ds_zero_placement_family = "autoep_expert"
    expert.ds_zero_partition_group_name = name
    expert.ds_zero_partition_process_group = equal


def leave_muon_eager() -> None:
    """Imports DeepSpeed's Muon without `torch.compile`, which would import inductor.

    ZeRO checks whether any optimizer is an instance of that Muon. llmtrain has its own, so it is never called.
    """
    compiled = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compiled


def use_no_compiled_collective() -> None:
    """Makes gloo run all collectives on CPUs.

    Compiling DeepSpeed's shared-memory collective takes a minute at the first start.
    """
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def reduce_among_several(engine: DeepSpeedEngine) -> None:
    """Leaves gradients in place in a group of one rank.

    DeepSpeed 0.19.8 copies all of them into a buffer and back, which takes time and doubles their memory. A group of
    one rank still runs DeepSpeed's function if it has to divide by more ranks, as for experts that only one rank holds.
    """
    own = engine.allreduce_no_retain

    def reduce(bucket: list[Tensor], dp_group: dist.ProcessGroup, **options: Any) -> None:
        if dist.get_world_size(dp_group) > 1 or options.get("dp_world_size") != 1:
            own(bucket, dp_group, **options)

    engine.allreduce_no_retain = reduce


def clip_by(engine: DeepSpeedEngine, norm: Tensor) -> None:
    """Makes the next step of an engine that keeps no norm, with fp32 weights at ZeRO-0, clip by `norm`.

    DeepSpeed would compute the norm a second time, and average it over ranks with different experts.
    """

    def clip() -> None:
        nn.utils.clip_grads_with_norm_(engine.module.parameters(), engine.gradient_clipping(), norm)

    engine.clip_fp32_gradients = clip


def last_norm(optimizer: Any) -> Any:
    """Returns the norm of an optimizer of DeepSpeed. The engine has the previous step's norm until a step is over."""
    return optimizer._global_grad_norm


def use_schedule(engine: DeepSpeedEngine, schedule: LRScheduler) -> None:
    """Lets an engine step a schedule that was not given to `deepspeed.initialize`."""
    engine.lr_scheduler = schedule


def loss_scalers(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Returns DeepSpeed's scaler for fp16 and torch's for autocast_fp16, which DeepSpeed keeps in one of two places."""
    autocast = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    found = {"loss_scaler": getattr(engine.optimizer, "loss_scaler", None), "gradscaler": autocast}
    return {name: scaler for name, scaler in found.items() if scaler is not None}


class NormWithLoss:
    """Replaces DeepSpeed's norm by one that is reduced together with the loss.

    DeepSpeed 0.19.8 sums over the ranks once for each group of parameters, and reads each gradient twice, once to copy
    it to fp64. The loss would need one more reduction, for which all ranks would wait before the update.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3) -> None:
        self._optimizer = optimizer

    @classmethod
    def of(cls, optimizer: Any, parallel: ParallelConfig) -> NormWithLoss | None:
        """Returns None to keep DeepSpeed's norm, for gradients on the host or in which not every rank has a share."""
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            on_host = optimizer.cpu_offload
        elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            on_host = optimizer.offload_optimizer
        else:
            return None
        return None if on_host or any(axis.divides_weights for axis in used(parallel)) else cls(optimizer)

    def take(self, share: Tensor) -> Tensor:
        """Takes the norm that DeepSpeed uses in its next step; returns the loss of all ranks.

        The norm includes the loss scale, and is −1 if it is not finite. share: this rank's share of the loss.
        """
        parts = [part for group in self._optimizer.averaged_gradients.values() for part in group]
        own = [part for part in parts if not getattr(part, "_zero_padding", False)]
        sums = torch.stack([squared_norm(own, share.device), share.double()])
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        norm = sums[0].sqrt().float()
        _mark_invalid(norm)
        if isinstance(self._optimizer, DeepSpeedZeroOptimizer):
            self._optimizer.scaled_global_norm = lambda: norm
        else:
            self._optimizer._get_norm_groups = lambda: [norm]
        return sums[1].float()


@contextmanager
def no_host_checks(precision: Precision) -> Iterator[None]:
    """Prevents DeepSpeed from waiting for the gradient norm to check whether it is finite, or has to be clipped.

    DeepSpeed would drop a step whose norm is not finite, without stepping the schedule. With fp16 the check is
    necessary, because DeepSpeed finds its loss scale by it. DeepSpeed would also copy a constant to the device for each
    norm, and the copy waits for all that is queued there.
    """
    if precision == "fp16":
        yield
        return
    with replaced(
        (bf16_optimizer, "is_invalid_grad_norm", _not_asked),
        (stage_1_and_2, "is_invalid_grad_norm", _not_asked),
        (stage3, "is_invalid_grad_norm", _not_asked),
        (bf16_optimizer, "clip_tensors_by_global_norm", _clip),
        (deepspeed_utils, "mask_nan_or_inf_with_val_inplace", _mark_invalid),
        (stage_1_and_2, "mask_nan_or_inf_with_val_inplace", _mark_invalid),
        (stage3, "mask_nan_or_inf_with_val_inplace", _mark_invalid),
    ):
        yield


def _not_asked(norm: object) -> bool:
    """Returns False, because the guard's verdict is on the device already."""
    return False


def _clip(input_tensors: Iterable[Tensor], max_norm: float, global_norm: Tensor | float, mpu: object = None) -> None:
    """Clips as DeepSpeed does, but multiplies by 1 if no clipping is necessary, which needs no check on the host."""
    factor = max_norm / (global_norm + 1e-6)
    factor = factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(factor, 1.0)
    for tensor in input_tensors:
        tensor.detach().mul_(factor)


def _mark_invalid(norm: Tensor, device: object = None) -> None:
    """Replaces a norm that is not finite by −1, as DeepSpeed does."""
    norm.masked_fill_(~norm.isfinite(), -1.0)


def synchronize_on_device(optimizer: Any) -> None:
    """Lets the current stream, instead of the host, wait for the gradients that ZeRO reduces on another stream.

    DeepSpeed synchronizes the host at the end of a micro-batch's backward pass. This is only necessary for offloaded
    gradients, because the host reads them.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.overlap_comm and not optimizer.cpu_offload:
        if isinstance(optimizer.reduction_stream, torch.cuda.Stream):
            _synchronize_reductions(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and not optimizer.offload_optimizer:
        stream = optimizer.reduce_and_partition_stream
        if isinstance(stream, torch.cuda.Stream):
            optimizer.reduce_and_partition_stream = _DeviceSynchronizedStream(stream.device)  # type: ignore[no-untyped-call]


def _synchronize_reductions(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Lets the current stream wait for the reductions of ZeRO 1 and 2, and keeps gradients until then.

    A gradient that is larger than a bucket is reduced where it is. ZeRO-2 of DeepSpeed 0.19.8 frees it if another rank
    keeps it, while the reduction may not even have begun, and the backward pass uses its memory again.
    """
    stream, end_pass = optimizer.reduction_stream, optimizer.independent_gradient_partition_epilogue

    def keep(gradient: Tensor, user: torch.cuda.Stream) -> None:
        if gradient.numel() > optimizer.reduce_bucket_size:
            gradient.record_stream(user)

    def end_pass_on_device() -> None:
        optimizer.reduce_ipg_grads()
        torch.cuda.current_stream(stream.device).wait_stream(stream)
        optimizer.overlap_comm = False  # else the host would wait for the device
        try:
            end_pass()  # its buckets are empty
        finally:
            optimizer.overlap_comm = True

    optimizer._record_gradient_stream = keep
    optimizer.independent_gradient_partition_epilogue = end_pass_on_device


class _DeviceSynchronizedStream(torch.cuda.Stream):
    """A stream whose `synchronize` lets the current stream wait, instead of the host."""

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self)


class PipelineTiedByName(PipelineModule):  # type: ignore[misc]
    """A pipeline of one layer per rank. Weights that several ranks hold are found by their names in the whole model.

    DeepSpeed's own tied layers would tie a whole layer. The layer has `hf_names`, as `llmtrain.models.RankStages`.
    """

    def __init__(self, names: Callable[[], list[list[str]]] | None, **options: Any) -> None:
        """names: returns the names of each rank's weights, if the other ranks of the pipe are not there to be asked."""
        self._names = names
        super().__init__(**options)

    @property
    def stages(self) -> Any:
        """The stages of this rank."""
        return self.forward_funcs[0]

    def holders(self, name: str) -> list[int]:
        """Returns the ranks that hold a weight of this rank's stages, given its name in the whole model."""
        tied = self.tied_comms.get(name)
        return tied["ranks"] if tied else [self.global_rank]

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, Any]]:
        """Returns this rank's copies of tied weights, and the groups in which their gradients are summed."""
        tied = [(self.stages.get_parameter(comm["weight_attr"][0]), comm["group"]) for comm in self.tied_comms.values()]
        return [(weight, group) for weight, group in tied if weight.requires_grad]

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Returns DeepSpeed's records of tied weights: group, and the path of the weight in this rank's stages.

        Also marks every copy but the first, so that the norm of the gradients counts each weight once.
        """
        own = {whole: path for path, whole in self.stages.hf_names.items()}
        by_rank: list[Any] = [None] * dist.get_world_size()
        if self._names is not None:
            names = self._names()
            by_rank = [names[self.topology().get_coord(rank).pipe] for rank in range(len(by_rank))]
        else:
            dist.all_gather_object(by_rank, sorted(own))
        stages = Counter(name for rank in self.mpu().pp_group for name in by_rank[rank])
        comms = {}
        for name in sorted({name for names in by_rank for name in names if stages[name] > 1}):
            # The slices of a tensor group are separate weights, each tied along its own pipe.
            for pipe in self.mpu().pipe_groups:
                ranks = [rank for rank in pipe if name in by_rank[rank]]
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    comms[name] = {"ranks": ranks, "group": group, "weight_attr": [own[name]], "module": self.stages}
                    self.stages.get_parameter(own[name]).ds_pipe_replicated = self.global_rank != ranks[0]
        return comms


def counted_by_another_stage(parameter: nn.Parameter) -> bool:
    """Returns whether a parameter is a tied weight that the norm of the gradients counts on another stage."""
    return getattr(parameter, "ds_pipe_replicated", False)


@contextmanager
def accumulating(engine: Any) -> Iterator[None]:
    """The context of a backward pass that is not of a loss. At its end, gradients are added to those of the step.

    DeepSpeed's pipeline engine does this within `_exec_backward_pass`, for a pass that it runs itself. But it keeps the
    bf16 gradients afterwards. Here they are freed, because only their fp32 sums are read again.
    """
    optimizer = engine.optimizer
    engine._running_engine_backward = True
    try:
        yield
    finally:
        engine._running_engine_backward = False
    if isinstance(optimizer, BF16_Optimizer):
        optimizer.update_hp_grads()
        optimizer.clear_lp_grads(set_to_none=True)
    elif getattr(optimizer, "use_grad_accum_attribute", False):
        optimizer.fill_grad_accum_attribute()


def reduce_pipeline(engine: Any) -> None:
    """Reduces the gradients of a pipeline over its ranks, as DeepSpeed's schedules do after the last pass."""
    engine._exec_reduce_tied_grads()
    engine._exec_reduce_grads()


def step_pipeline(engine: Any) -> None:
    """Makes the update of a pipeline, as DeepSpeed's schedules do at their end."""
    engine._exec_optimizer_step()


class TrainedRange(NamedTuple):
    """The range of a parameter in a flat tensor that ZeRO trains."""

    parameter: nn.Parameter
    start: int
    """Index of the range's first element within the parameter."""
    offset: int
    """Index of the range's first element within the flat tensor."""
    length: int


class Flat(NamedTuple):
    """A flat tensor that ZeRO trains."""

    tensor: Tensor
    parts: list[TrainedRange]
    group: dict[str, Any]
    """Its group in torch's optimizer, which ZeRO-3 empties between updates."""


def flat_tensors(optimizer: Any) -> Iterator[list[Flat]] | None:
    """Returns an iterator over this rank's flat tensors and the parameters in them; None for other optimizers.

    The tensors of a list are valid until the next list is requested.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _flat_of_stage_3(optimizer)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return iter([_flat_of_groups(optimizer, optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)])
    if isinstance(optimizer, BF16_Optimizer):
        return iter([_flat_of_groups(optimizer, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)])
    return None


def _flat_of_groups(optimizer: Any, groups: list[list[nn.Parameter]], flats: list[Tensor]) -> list[Flat]:
    """ZeRO 1 and 2: this rank has one range of each group, which may begin and end within parameters."""
    found = []
    for parameters, flat, group in zip(groups, flats, optimizer.optimizer.param_groups, strict=True):
        parts = []
        for parameter in parameters:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # None if no part of it is on this rank
            if mapping is not None:
                place = mapping.get_hp_fragment_address()
                parts.append(TrainedRange(parameter, mapping.lp_fragment_address.start, place.start, place.numel))
        found.append(Flat(flat, parts, group))
    return found


def _flat_of_stage_3(optimizer: Any) -> Iterator[list[Flat]]:
    """ZeRO 3: this rank has an equal range of every parameter; the last ranges are padded."""
    for index, parameters in enumerate(optimizer.fp16_groups):
        with _swapped_in(optimizer, index):
            rank = optimizer._get_sub_group_partition_rank(index)
            offset, parts = 0, []
            for parameter in parameters:
                size = parameter.partition_numel()
                start = min(rank * size, parameter.ds_numel)
                parts.append(TrainedRange(parameter, start, offset, min(size, parameter.ds_numel - start)))
                offset += size
            group = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[index]]
            yield [Flat(optimizer.fp32_partitioned_groups_flat[index], parts, group)]


@contextmanager
def _swapped_in(optimizer: Any, index: int) -> Iterator[None]:
    """Loads a group of ZeRO 3 into memory if its states are on NVMe."""
    swapped = optimizer._swappable_optimizer_subgroup(index)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(index)
    yield
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(index)


@torch.no_grad()
def update_model_weights(optimizer: Any) -> None:
    """Updates the model's weights after the fp32 weights of a ZeRO optimizer were written; called by all ranks."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index in range(len(optimizer.fp16_groups)):
            with _swapped_in(optimizer, index):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            # Small parameters stay gathered, and their gathered values are outdated.
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()  # copies of the old weights, which hpZ keeps after an evaluation
