"""Bytes of weights, optimizer states and gradients on each rank, as DeepSpeed 0.19.8 and torch allocate them.

Each formula names its source; tests count the tensors of real engines. Scalars (a step count per parameter, norms) are
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from llmtrain.plan.draft import BYTES_OF, COMPUTE_DTYPE, WEIGHT_DTYPE
from llmtrain.plan.facts.weights import TABLES, WORKSPACE, Weight, Weights, packed_bytes
from llmtrain.plan.optimizers import CODE_TABLES, OWN_TEMPORARIES, STRETCH, STRETCH_BYTES, block_of, states_kept
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict.activations import lowest_kept_layer
from llmtrain.plan.predict.flat import (
    MAX_LIVE_PARAMETERS,
    SUB_GROUP_SIZE,
    Division,
    FlatGroup,
    bucket_elements,
    frozen_groups,
    has_bf16_optimizer,
    max_over_ranks,
    optimizer_groups,
    overlaps_reduction,
    persistence_threshold,
    rank_weights,
    stage_weights,
    tensor_parallel_elements,
    updated_in_layers,
)
from llmtrain.plan.predict.parts import Parts, PassGradients, State
from llmtrain.plan.schedules import PipelineSchedule

STAGE0_BUCKET = 500_000_000
"""Elements that DeepSpeed averages at once at stage 0 (`engine.py:buffered_allreduce_fallback`)."""
HOROVOD_FUSION = 128 * 2**20
"""Horovod's fusion buffer (`HOROVOD_FUSION_THRESHOLD`)."""
MAX_COUNTED_RANKS = 64
"""Largest number of ranks whose blocks are counted; other ranks may have a few more or fewer."""


def weight_bytes(plan: Plan) -> int:
    """Returns the bytes per element of the weights that the forward pass reads."""
    return BYTES_OF[WEIGHT_DTYPE[plan.recipe.parallel.precision]]


def sum_bytes(plan: Plan) -> int:
    """Returns the bytes per element of accumulated gradients."""
    return BYTES_OF[plan.recipe.parallel.grad_accum_dtype]


RankGroups = tuple[list[FlatGroup], list[FlatGroup]]
"""Results of `optimizer_groups` and `frozen_groups`, which depend on the degrees and the pipeline schedule only."""


def state_of(plan: Plan, weights: Weights, stage: int, held: RankGroups | None = None) -> State:
    """Returns the state of the fullest rank of a pipeline stage. held: what it holds, if that is known."""
    parallel = plan.parallel
    if parallel.strategy == "fsdp2":
        return _fsdp2(plan, weights)
    groups, frozen = held or (optimizer_groups(plan, weights, stage), frozen_groups(plan, weights, stage))
    if parallel.strategy != "deepspeed" or parallel.zero_stage == 0:
        state = _replicated(plan, groups)
    elif parallel.zero_stage == 3:
        return _zero3(plan, groups, frozen)
    else:
        state = _bf16_optimizer(plan, weights, stage, groups) if has_bf16_optimizer(plan) else _zero12(plan, groups)
    in_passes, in_step = ("forward", "backward"), ("forward", "backward", "update")
    if frozen:  # only ZeRO-3 shards them
        state = state.plus(in_step, parameters=weight_bytes(plan) * sum(group.elements for group in frozen))
    if packed := [weight for weight in rank_weights(plan, weights, stage) if weight.packed]:
        sizes = [weight.elements // weight.matrices for weight in packed]
        stored = [weight.matrices // (parallel.expert if weight.is_expert else 1) for weight in packed]
        in_4_bit = sum(number * packed_bytes(size) for number, size in zip(stored, sizes, strict=True))
        state = state.plus(in_step, parameters=in_4_bit + TABLES)
        state = state.plus(in_passes, live_parameters=WORKSPACE * max(sizes))
    return state


def checkpoint_bytes(plan: Plan, weights: Weights, stage: int) -> int:
    """Returns the bytes that a rank of a stage saves: the fp32 weights and moments of its share, in any engine.

    Frozen weights of a new model are saved, too, as they are held.
    """
    groups = optimizer_groups(plan, weights, stage)
    in_partitions = plan.parallel.strategy == "deepspeed" and plan.parallel.zero_stage in (1, 2)
    trained = 4 * sum(map(_share, groups)) + _moments(groups, _share, "flat" if in_partitions else "each", tables=0)
    if plan.recipe.model.omits_base_weights:
        return trained
    held = 4 if plan.parallel.strategy == "fsdp2" else weight_bytes(plan)
    return trained + held * sum(map(_share, frozen_groups(plan, weights, stage)))


def _share(group: FlatGroup) -> int:
    return -(-group.elements // group.ranks)


def _moments(
    groups: list[FlatGroup], own: Callable[[FlatGroup], int], division: Division = "none", tables: int = CODE_TABLES
) -> int:
    """Returns the bytes of the optimizer's states.

    own: the elements of a group that this rank updates. division: how ranks divide a group; of one that is divided as a
    whole, a rank has the factors of some parameters only. tables: bytes of the tables that codes refer to.
    """
    factors = sum(sum(group.factors) for group in groups)
    if factors and division == "flat":
        factors = max_over_ranks(groups, FlatGroup.factors_touched)
    moments = 4 * (sum(group.states * own(group) for group in groups) + factors)
    if codes := max(group.codes for group in groups):
        moments += sum(group.codes * own(group) for group in groups) + 4 * codes * _blocks(groups, division) + tables
    return moments


def _blocks(groups: list[FlatGroup], division: Division) -> int:
    """Returns the largest number of blocks with scales that a rank has."""
    tensor = range(max(group.tensor_ranks for group in groups))
    if division == "flat":
        return max(max_over_ranks(groups, partial(FlatGroup.blocks_touched, tensor=number)) for number in tensor)
    if division == "none":
        return max(sum(group.blocks_of_shares(0, 1, number) for group in groups) for number in tensor)
    ranks = max(group.ranks for group in groups)
    return max(
        sum(group.blocks_of_shares(rank * group.ranks // ranks, group.ranks, number) for group in groups)
        for rank in range(min(ranks, MAX_COUNTED_RANKS))
        for number in tensor
    )


def _workspace(plan: Plan, groups: list[FlatGroup], own: Callable[[FlatGroup], int], evenly: bool = False) -> int:
    """Returns the largest number of bytes that an optimizer needs during an update, besides its states.

    An optimizer of whole matrices (`engines/optimizers/matrices.py`) needs, for the elements that this rank updates,
    the update in fp32 and the result that it receives; for the rank's share of the group, what is sent, received and
    joined; and five tensors as large as a whole matrix, or as the experts of a layer that a rank holds. An optimizer
    with factors needs two fp32 tensors as large as a part of a matrix, one with codes needs memory for some rows at a
    time, both where the states are; so are the temporary tensors of a class of the user's.

    own: the elements of a group that this rank updates. evenly: whether every rank has an equal part of each matrix.
    """
    if plan.optimizer is not None:
        offloads = plan.recipe.parallel.offload_optimizer != "none"
        return 0 if offloads else 4 * OWN_TEMPORARIES * max(own(group) for group in groups)
    if any(group.factors or group.codes for group in groups):
        if plan.recipe.parallel.offload_optimizer != "none":
            return 0
        largest = [(max(group.sizes), group) for group in groups if group.factors or group.codes]
        part = max(-(-size // group.ranks) if evenly else min(size, own(group)) for size, group in largest)
        return 8 * part if largest[0][1].factors else STRETCH_BYTES * min(part, STRETCH)
    each = BYTES_OF[COMPUTE_DTYPE[plan.recipe.parallel.precision]]
    parts = plan.divisor("matrices")
    return max(
        (
            4 * own(group) + each * (own(group) + 4 * _share(group) + 5 * parts * max(group.sizes))
            for group in groups
            if group.in_layers
        ),
        default=0,
    )


def _replicated(plan: Plan, groups: list[FlatGroup]) -> State:
    """ZeRO-0, DistributedDataParallel, Horovod and nn.DataParallel: nothing is sharded, gradients last for the step."""
    elements = sum(group.elements for group in groups)
    lower = weight_bytes(plan) < 4
    strategy = plan.recipe.parallel.strategy
    sent = {"deepspeed": 4 * min(elements, STAGE0_BUCKET), "horovod": HOROVOD_FUSION}.get(strategy, 0)
    kept = Parts(
        parameters=weight_bytes(plan) * elements,
        masters=4 * elements if lower else 0,
        optimizer=_moments(groups, lambda group: group.elements),
    )
    # DistributedDataParallel's buckets are the gradients (`gradient_as_bucket_view`), and exist from its first pass on.
    gradients = 4 * elements
    early = gradients if _accumulates(plan) or strategy == "ddp" else 0
    # Those of earlier micro-batches are its own tensors (`no_sync`), which become views of the buckets one by one.
    bound = gradients if _accumulates(plan) and strategy == "ddp" else 0
    # The lower gradients of one micro-batch are kept until the pass ends, then added to those of the masters.
    backward = kept.plus(gradients=gradients + (weight_bytes(plan) * elements if lower else 0))
    return State(
        forward=kept.plus(gradients=early, buckets=bound),
        backward=backward.plus(communication=sent if plan.gradient_ranks > 1 else 0),
        update=kept.plus(gradients=gradients, communication=_workspace(plan, groups, lambda group: group.elements)),
    )


def _zero12(plan: Plan, groups: list[FlatGroup]) -> State:
    """ZeRO-1 and 2 (`zero/stage_1_and_2.py`), unless `BF16_Optimizer` replaces them."""
    stage, weight, summed = plan.parallel.zero_stage, weight_bytes(plan), sum_bytes(plan)
    offloads = plan.recipe.parallel.offload_optimizer != "none"
    elements = sum(group.elements for group in groups)
    partition = sum(group.partition for group in groups)
    largest = max(size for group in groups for size in group.sizes)
    compact = weight != summed and summed == 4  # `_use_compact_grad_partition_buffer`
    # Sums of parts of parameters, or of the parameters of which a partition contains a part.
    reduced = 4 * partition if compact else weight * max_over_ranks(groups)
    # Stage 1 stages its sums in the bucket, stage 2 the gradients (`_gradient_reduction_buffer_dtype`).
    staged = summed if stage == 1 else weight
    # One is filled while another one is reduced.
    bucket = bucket_elements(plan) * staged * (2 if overlaps_reduction(plan) else 1)
    # The parts of a bucket are joined, and converted if sums have another type (`allreduce_bucket`).
    joined = bucket_elements(plan) * (staged if staged == summed else staged + summed)
    moments = _moments(groups, lambda group: group.partition, "flat")
    kept = Parts(parameters=weight * sum(group.padded for group in groups))
    host = 0
    if offloads:
        kept = kept.plus(buckets=weight * largest)  # `temp_grad_buffer_for_gpu_offload`
        # The states, the sums that the update reads, the updated weights and a gradient in transfer.
        host = moments + 8 * partition + weight * partition + weight * largest
        if not compact:
            # Stage 1 sums on the device, stage 2 whole parameters in `accumulated_grads_in_cpu`.
            host += reduced if _accumulates(plan) and stage == 2 else 0
            reduced = 0
    else:
        kept = kept.plus(masters=4 * partition, optimizer=moments)
    whole = summed * elements if stage == 1 else reduced
    # The bucket is created with the first gradient (`setup_buckets`). Stage 2 gives it back after each pass, stage 1
    # after the last one. A pipeline reduces then, and creates another one for it (`reduce_gradients`).
    is_pipeline = bool(plan.stages)
    is_kept = stage == 1 and _accumulates(plan)
    # The first bucket that is reduced within a pass starts the partition's sums (`copy_grads_in_partition`). Compact
    # sums are those of earlier micro-batches, too (`_get_compact_grad_partition_buffer`).
    starts_early = overlaps_reduction(plan) or (stage == 2 and bucket_elements(plan) < elements)
    starts_early &= not (compact and _accumulates(plan))
    return State(
        forward=kept.plus(gradients=whole if _accumulates(plan) else 0, buckets=bucket if is_kept else 0),
        late=Parts(buckets=0 if is_kept else bucket, gradients=reduced if starts_early else 0),
        backward=kept.plus(
            gradients=whole if is_pipeline else reduced,
            buckets=bucket * (2 if is_pipeline else 1),
            communication=joined
            if plan.gradient_ranks > 1 or stage == 2
            else 0,  # stage 2 also joins them for one rank
        ),
        # The sums of one group at a time as a flat fp32 tensor. A bucket in which sums were staged stays.
        update=kept.plus(
            gradients=reduced + (0 if compact or offloads else 4 * max(g.partition for g in groups)),
            buckets=bucket if stage == 1 and compact and plan.gradient_ranks > 1 else 0,
            communication=_workspace(plan, groups, lambda group: group.partition),
        ),
        host=host,
    )


def _bf16_optimizer(plan: Plan, weights: Weights, rank: int, groups: list[FlatGroup]) -> State:
    """ZeRO-1 in bf16 with fp32 sums (`bf16_optimizer.py`): a permanent flat fp32 gradient of all weights."""
    partition = sum(group.partition for group in groups)
    padded = sum(group.padded for group in groups)
    elements = sum(group.elements for group in groups)
    kept = Parts(
        parameters=2 * padded,
        masters=4 * partition,
        optimizer=_moments(groups, lambda group: group.partition, "flat"),
        gradients=4 * padded,
    )
    own = 2 * elements
    joined = 4 * min(elements, STAGE0_BUCKET) if plan.gradient_ranks > 1 else 0
    # Each gradient is converted before it is added (`_update_hp_grad`).
    converted = 4 * max(size for group in groups for size in group.sizes)
    workspace = _workspace(plan, groups, lambda group: group.partition)
    if plan.stages:  # gradients of a pass are added to the sums at its end, and freed
        return State(
            forward=kept,
            pass_gradients=_pass_gradients(plan, weights, rank, groups),
            backward=kept.plus(communication=joined),
            update=kept.plus(communication=workspace),
        )
    # Gradients of one micro-batch are zeroed, not freed, while others follow.
    return State(
        forward=kept.plus(gradients=own if _accumulates(plan) else 0),
        backward=kept.plus(gradients=own, communication=max(joined, converted)),
        update=kept.plus(gradients=own, communication=workspace),
    )


def _pass_gradients(plan: Plan, weights: Weights, rank: int, groups: list[FlatGroup]) -> PassGradients:
    """Returns the largest sizes of the bf16 gradients of one pass of a pipeline."""
    schedule, sizes = PipelineSchedule.of(plan.parallel), dict[int, int]()

    def size_of(weight: Weight) -> int:
        if id(weight) not in sizes:  # equal layers share their weights
            sizes[id(weight)] = 2 * tensor_parallel_elements(plan, weights, weight)
        return sizes[id(weight)]

    def of(weights_of_part: Iterable[Weight]) -> int:
        return sum(size_of(weight) for weight in weights_of_part if weight.trained)

    # A pass computes the gradients of one stage, those of the embedding at its end.
    stages = {stage: of(stage_weights(plan, weights, stage)) for stage in schedule.stages_of(rank)}
    last = max(size - (of(weights.embedding) if stage == 0 else 0) for stage, size in stages.items())
    if (index := lowest_kept_layer(plan, rank)) is not None:
        last -= of(weight for weight in weights.layer(index) if "attn" in weight.name)
    return PassGradients(
        first=of(weights.head) if rank == schedule.rank_of(schedule.stages - 1) else 0,
        last=last,
        # They are added to the sums one by one, each as an fp32 copy (`BF16_Optimizer._update_hp_grad`).
        whole=max(stages.values()) + 4 * max(size for group in groups for size in group.sizes),
    )


def _zero3(plan: Plan, groups: list[FlatGroup], frozen: list[FlatGroup]) -> State:
    """ZeRO-3 (`zero/stage3.py`): each parameter padded and split by itself, small ones also kept unsharded."""
    every = [*groups, *frozen]
    parallel, weight, summed = plan.recipe.parallel, weight_bytes(plan), sum_bytes(plan)
    partition = sum(group.by_parameter for group in groups)
    threshold = persistence_threshold(plan)
    # Weights that are complete on the device of the only rank are not copied.
    copied = [group for group in every if group.ranks > 1 or parallel.offload_param != "none"]
    persistent = sum(size for group in copied for size in group.sizes if size <= threshold)
    gathered = sum(group.elements for group in copied) - persistent
    kept = Parts(
        parameters=weight * persistent,
        live_parameters=weight * min(gathered, MAX_LIVE_PARAMETERS),
        buckets=bucket_elements(plan) * summed,
    )
    host, held = 0, weight * sum(group.by_parameter for group in every)
    if (near := plan.parallel.hierarchical_partition) > 1:
        sizes = [(size, group.ranks) for group in copied for size in group.sizes if size > threshold]
        held += weight * sum(-(-size // ranks) * ranks // near for size, ranks in sizes)
    if parallel.offload_param == "none":
        kept = kept.plus(parameters=held)
    elif parallel.offload_param == "cpu":
        host += held
    sums, flat = summed * partition, 4 * min(partition, SUB_GROUP_SIZE)
    moments = _moments(groups, lambda group: group.by_parameter, "each")
    workspace = _workspace(plan, groups, lambda group: min(group.by_parameter, SUB_GROUP_SIZE), evenly=True)
    if parallel.offload_optimizer == "none":
        kept = kept.plus(masters=4 * partition, optimizer=moments, gradients=sums)
        return State(forward=kept, backward=kept, update=kept.plus(gradients=flat, communication=workspace), host=host)
    host += sums + 4 * partition  # accumulated, and as the update reads them
    if parallel.offload_optimizer == "cpu":
        host += 4 * partition + moments
    return State(forward=kept, backward=kept, update=kept.plus(communication=workspace), host=host)


def _fsdp2(plan: Plan, weights: Weights) -> State:
    """FSDP2 (`torch.distributed.fsdp.fully_shard`): fp32 shards, gathered by layers in the type of the computation.

    The model is built completely, cast to fp32 and then sharded (`accelerate/utils/fsdp_utils.py`).
    """
    computed = weight_bytes(plan)
    every = list(weights.of_layers(0, weights.layers, first=True, last=True))
    own = [weight for weight in every if weight.trained]
    elements, trained = weights.elements, sum(weight.elements for weight in own)
    shards, of_trained = (_rows_shared(group, plan.data_parallel_size) for group in (every, own))
    layer = max(plan.model.layer_parameters, default=0)
    # Without resharding after the forward pass everything is gathered; else two layers, and the weights outside layers.
    outside = elements - sum(plan.model.layer_parameters)
    live = elements if plan.parallel.zero_stage == 2 else outside
    in_layers, optim = updated_in_layers(plan, weights), plan.recipe.optim
    row, ranks = plan.optimizer_row, plan.data_parallel_size
    moments = 4 * sum(
        states_kept(row, optim, id(weight) in in_layers, weight.is_matrix) * _rows_shared([weight], ranks)
        + (weight.lines if row.factors else 0)
        for weight in own
    )
    if row.codes:
        block, matrices = block_of(optim), [weight for weight in own if weight.is_matrix]
        scales = sum(
            4 * -(-weight.stored[-1] // block) * _rows_shared([weight], ranks) // weight.stored[-1]
            for weight in matrices
        )
        moments += len(row.codes) * (_rows_shared(matrices, ranks) + scales) + CODE_TABLES
    kept = Parts(parameters=4 * shards, optimizer=moments, live_parameters=computed * live)
    layers = Parts(live_parameters=computed * min(elements - live, 2 * layer))
    # While micro-batches follow, complete gradients are summed (`no_sync`); the last one scatters them.
    whole = 4 * trained if _accumulates(plan) else 0
    return State(
        start=Parts(parameters=4 * (elements + shards)),
        forward=kept.plus(gradients=whole),
        late=layers,
        backward=(kept + layers).plus(gradients=4 * of_trained, buckets=4 * layer),
        update=kept.plus(
            gradients=4 * of_trained,
            communication=_workspace(plan, optimizer_groups(plan, weights, 0), _share, evenly=True),
        ),
    )


def _rows_shared(weights: Iterable[Weight], ranks: int) -> int:
    """Returns the elements of the first rank's shards.

    Weights are split along dimension 0, which is short for experts.
    """
    return sum(-(-weight.stored[0] // ranks) * (weight.elements // weight.stored[0]) for weight in weights)


def _accumulates(plan: Plan) -> bool:
    return plan.batch.gradient_accumulation_steps > 1
