"""The memory layout of a rank's weights in DeepSpeed: flat groups, padded and split into partitions, and buffers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from llmtrain.plan.facts.classifier import HEAD
from llmtrain.plan.facts.families import WHOLE_MATRICES
from llmtrain.plan.facts.weights import HeldRows, Weight, Weights
from llmtrain.plan.optimizers import block_of, is_matrix_of_layer, states_kept
from llmtrain.plan.plan import Plan
from llmtrain.plan.schedules import PipelineSchedule

MAX_LIVE_PARAMETERS = 1_000_000_000
"""Largest number of elements that ZeRO-3 holds gathered; it delays further ones."""
SUB_GROUP_SIZE = 1_000_000_000
"""Elements that ZeRO-3 updates at once."""
MIN_BUCKET = 40_000_000
"""Smallest number of elements of a reduction, if the model has as many."""
BUCKET_PER_REPLICA = 1_000_000
"""Smallest number of elements of a reduction for each replica."""
DDP_BUCKET_MIB = 25
"""Size of a reduction of DistributedDataParallel, torch's own default."""

Division = Literal["none", "flat", "each"]
"""How ranks divide what they all hold: not at all, as one flat group (ZeRO-1 and 2), or each parameter by itself."""


def bucket_elements(plan: Plan) -> int:
    """Returns the elements of a reduction: max(40e6, 1e6 × dp), as in Megatron-LM.

    Each of the dp chunks of a ring is then large enough for the bandwidth. DeepSpeed allocates the whole buffer, so
    there are no more elements than in a rank's share of the model, and it requires an even number.
    """
    elements = min(max(MIN_BUCKET, BUCKET_PER_REPLICA * plan.data_parallel_size), _trained_share(plan))
    return max(elements + elements % 2, 2)


def _trained_share(plan: Plan) -> int:
    """Returns the trained parameters of a rank, as if they were divided equally."""
    trained = plan.model.trained_parameters or plan.model.parameters
    return trained // (plan.divisor("layers") * plan.divisor("matrices"))


def has_bf16_optimizer(plan: Plan) -> bool:
    """Whether DeepSpeed chooses `BF16_Optimizer` (`engine.py:_do_optimizer_sanity_check`)."""
    parallel = plan.recipe.parallel
    routed = parallel.precision == "bf16" and parallel.grad_accum_dtype == "fp32" and plan.parallel.zero_stage == 1
    return routed and parallel.offload_optimizer == "none"


def overlaps_reduction(plan: Plan) -> bool:
    """Whether ZeRO-1 or 2 reduces a bucket of gradients while the backward pass fills another one (`overlap_comm`).

    `BF16_Optimizer` and pipelines reduce after the last backward pass. On CPUs DeepSpeed waits for each reduction.
    """
    parallel = plan.parallel
    is_able = parallel.strategy == "deepspeed" and parallel.zero_stage in (1, 2) and not plan.stages
    is_able &= plan.gradient_ranks > 1 and not has_bf16_optimizer(plan) and not plan.cluster.spec.on_cpu
    return is_able and bucket_elements(plan) < _trained_share(plan)


def persistence_threshold(plan: Plan) -> int:
    """Returns the size of the largest parameter that ZeRO-3 does not shard: norms and biases are not worth messages."""
    return 10 * plan.model.hidden_size


@dataclass(frozen=True)
class FlatGroup:
    """An optimizer group: trained parameters of one rank that are partitioned together; or its frozen parameters."""

    sizes: tuple[int, ...]
    """Elements of each parameter, in the model's order."""
    ranks: int
    """Ranks that hold the same parameters, and shard their states."""
    states: int = 0
    """Number of fp32 tensors that the optimizer keeps of it."""
    in_layers: bool = False
    """Whether the optimizer updates it in the way of `OptimizerRow.layer_states`."""
    factors: tuple[int, ...] = ()
    """fp32 values kept in factors (`OptimizerRow.factors`) of each parameter; empty for other optimizers."""
    codes: int = 0
    """Bytes kept of each element (`OptimizerRow.codes`)."""
    rows: tuple[tuple[HeldRows, ...], ...] = ()
    """For each parameter with codes, its rows on each tensor parallel rank; one entry if all ranks hold the same."""
    expert_ranks: int = 1
    """Ranks over which the experts in it are distributed."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(self.sizes)

    @property
    def tensor_ranks(self) -> int:
        """Number of tensor parallel ranks that hold different columns."""
        return max(map(len, self.rows), default=1)

    @property
    def padded(self) -> int:
        """Padded size: a multiple of twice the ranks, to align each partition of a half type to 4 bytes.

        See `nccl_start_alignment_factor`.
        """
        return -(-self.elements // (2 * self.ranks)) * 2 * self.ranks

    @property
    def partition(self) -> int:
        """Elements of a rank's partition of the flat group (ZeRO-1 and 2)."""
        return self.padded // self.ranks

    @property
    def is_cut(self) -> bool:
        """Whether one of these partitions ends within a parameter."""
        return not {*range(self.partition, self.elements, self.partition)} <= {*self.ends}

    @property
    def by_parameter(self) -> int:
        """Elements of a rank's share if each parameter is padded and split by itself (ZeRO-3)."""
        return sum(-(-size // self.ranks) for size in self.sizes)

    def touched(self, rank: int) -> int:
        """Returns the sum of the elements of all parameters of which the partition of a rank contains a part."""
        return sum(self.sizes[self._inside(rank)])

    def factors_touched(self, rank: int) -> int:
        """Returns the sum of the factors of all these parameters."""
        return sum(self.factors[self._inside(rank)])

    def blocks_touched(self, rank: int, tensor: int = 0) -> int:
        """Returns the number of blocks of which the partition of a rank contains a part.

        tensor: the tensor parallel rank.
        """
        start, end = rank * self.partition, (rank + 1) * self.partition
        found = 0
        for index in range(*self._inside(rank).indices(len(self.rows))):
            size, rows, first = self.sizes[index], self.rows[index], self.ends[index] - self.sizes[index]
            found += len(rows[tensor % len(rows)].blocks(max(start - first, 0), min(end - first, size)))
        return found

    def blocks_of_shares(self, rank: int, ranks: int, tensor: int = 0) -> int:
        """Returns the number of blocks of which a rank has a part if `ranks` split each parameter by itself."""
        found = 0
        for (size, rows), number in Counter(zip(self.sizes, self.rows, strict=False)).items():
            own = -(-size // ranks)
            found += number * len(rows[tensor % len(rows)].blocks(min(rank * own, size), min((rank + 1) * own, size)))
        return found

    def cut_blocks(self, division: Division) -> tuple[int, int]:
        """Returns the number of blocks that tensor parallelism divides, and of others that ZeRO divides."""
        parameters: Iterable[tuple[int, tuple[HeldRows, ...], int, int]]
        if division == "flat":
            each = zip(self.sizes, self.rows, self.ends, strict=False)
            parameters = ((size, rows, (size - end) % self.partition, 1) for size, rows, end in each)
        else:
            counted = Counter(zip(self.sizes, self.rows, strict=False))
            parameters = ((size, rows, 0, number) for (size, rows), number in counted.items())
        sliced = divided = 0
        for size, every, first, number in parameters:
            part = {"none": size, "flat": self.partition, "each": -(-size // self.ranks)}[division]
            cut = frozenset[int]().union(*(rows.cut for rows in every))
            sliced += number * len(cut) * (size // every[0].elements)
            ends = range(first or part, size, part)
            places = {rows.place(rows.number(end)) for rows in every for end in ends if rows.is_cut(end)}
            divided += number * sum(block not in cut for _, block in places)
        return sliced, divided

    def _inside(self, rank: int) -> slice:
        """Returns the range of the parameters of which the partition of a rank contains a part."""
        start, end = rank * self.partition, min((rank + 1) * self.partition, self.elements)
        if start >= end:
            return slice(0)
        return slice(bisect_right(self.ends, start), bisect_left(self.ends, end) + 1)

    @cached_property
    def ends(self) -> list[int]:
        """Index after the last element of each parameter."""
        return list(accumulate(self.sizes))


def max_over_ranks(groups: list[FlatGroup], touched: Callable[[FlatGroup, int], int] = FlatGroup.touched) -> int:
    """Returns the maximum over the ranks of `touched`, summed over groups.

    A group of experts has fewer ranks, further apart. A rank whose partitions lie within one parameter of each group
    has no more than the next rank with a partition in which a parameter ends, so only ranks of the second kind are
    examined.
    """
    ranks = max(group.ranks for group in groups)
    ends = {
        (group.ranks, (end - 1) // group.partition) for group in groups for end in group.ends if group.partition and end
    }
    first = {-(-own * ranks // of) for of, own in ends}
    last = {-(-(own + 1) * ranks // of) - 1 for of, own in ends}
    return max(
        (sum(touched(group, rank * group.ranks // ranks) for group in groups) for rank in first | last), default=0
    )


def optimizer_groups(plan: Plan, weights: Weights, stage: int) -> list[FlatGroup]:
    """Returns the optimizer groups of a rank of a stage: matrices, vectors, and distributed experts."""
    trained = _groups(plan, weights, [weight for weight in rank_weights(plan, weights, stage) if weight.trained])
    idle = FlatGroup((1,), plan.gradient_ranks, _states(plan, in_layers=False, is_matrix=False))
    return trained or [idle]  # the parameter of a stage that trains nothing


def frozen_groups(plan: Plan, weights: Weights, stage: int) -> list[FlatGroup]:
    """Returns what a rank of a stage holds without training it, grouped in the same way; without 4-bit weights."""
    own = rank_weights(plan, weights, stage)
    return _groups(plan, weights, [weight for weight in own if not (weight.trained or weight.packed)])


def _states(plan: Plan, in_layers: bool, is_matrix: bool) -> int:
    return states_kept(plan.optimizer_row, plan.recipe.optim, in_layers, is_matrix)


def _groups(plan: Plan, weights: Weights, own: list[Weight]) -> list[FlatGroup]:
    parallel, row = plan.parallel, plan.optimizer_row
    in_layers = updated_in_layers(plan, weights)
    # Keys: (is not a matrix, is not updated in the way of `layer_states`, is a distributed expert).
    distinct = {id(weight): weight for weight in own}  # equal layers share their weights
    keys = {
        number: (not weight.is_matrix, number not in in_layers, parallel.expert > 1 and weight.is_expert)
        for number, weight in distinct.items()
    }
    found: dict[tuple[bool, bool, bool], list[Weight]] = {}
    for weight in own:
        found.setdefault(keys[id(weight)], []).append(weight)
    groups = []
    for (is_vector, outside, spread), members in sorted(found.items(), key=lambda item: item[0]):
        size_of = {
            number: weight.elements // parallel.expert if spread else tensor_parallel_elements(plan, weights, weight)
            for number, weight in distinct.items()
            if keys[number] == (is_vector, outside, spread)
        }
        # Tensor parallel ranks hold experts of their own, or the same ones as other replicas.
        ranks = plan.gradient_ranks * parallel.tensor // parallel.expert if spread else plan.gradient_ranks
        states = _states(plan, in_layers=not outside, is_matrix=not is_vector)
        factors = tuple(weight.lines for weight in members) if row.factors else ()
        codes = 0 if is_vector else len(row.codes)
        rows = tuple(held_rows(plan, weights, weight) for weight in members) if codes else ()
        sizes = tuple(size_of[id(weight)] for weight in members)
        over = parallel.expert if spread else 1
        groups.append(FlatGroup(sizes, ranks, states, not outside, factors, codes, rows, over))
    return groups


def updated_in_layers(plan: Plan, weights: Weights) -> set[int]:
    """Returns the ids of the weights that the optimizer updates in a way of its own."""
    if plan.optimizer_row.layer_states is None:
        return set()
    named = [(f"0.{weight.name}", weight) for run in weights.runs for weight in run.weights]
    named += [(weight.name, weight) for weight in weights.outside]
    return {id(weight) for name, weight in named if is_matrix_of_layer(name, len(weight.shape))}


def rank_weights(plan: Plan, weights: Weights, rank: int) -> Iterable[Weight]:
    """Returns the weights of a rank of the pipe, stage by stage; one that two of its stages use occurs once."""
    if not plan.stages:
        return weights.of_layers(0, weights.layers, first=True, last=True)
    found: list[Weight] = []
    stages = PipelineSchedule.of(plan.parallel).stages_of(rank)
    for stage in stages:
        own = stage_weights(plan, weights, stage)
        is_again = stage == plan.parallel.stages - 1 and weights.tied and 0 in stages
        found += own[len(weights.head) :] if is_again else own
    return found


def stage_weights(plan: Plan, weights: Weights, stage: int) -> list[Weight]:
    """Returns the weights of a stage of a pipeline."""
    (first, last), is_last = plan.stages[stage].layers, stage == plan.parallel.stages - 1
    return list(weights.of_layers(first, last + 1, first=stage == 0, last=is_last))


SPLIT_ROWS = (
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "c_attn", "c_fc"),
    *("fc1", "fc_in", "dense_h_to_4h", "query_key_value"),
)
"""Projections whose outputs are split over tensor parallel ranks, with their biases."""
SPLIT_COLUMNS = ("o_proj", "down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "dense")
"""Projections whose inputs are split over them; a bias is added once."""
Split = Literal["rows", "columns", ""]
"""How a matrix [outputs, inputs] is split over tensor parallel ranks; not at all if empty."""


def split_of(plan: Plan, module: str) -> Split:
    """Returns how the matrix of a module, or of an adapter beside it, is split. module: as in `Weight.module`."""
    if module in WHOLE_MATRICES.get(plan.model.model_type, ()):
        return ""
    return "rows" if module in SPLIT_ROWS else "columns" if module in SPLIT_COLUMNS else ""


def held_rows(plan: Plan, weights: Weights, weight: Weight) -> tuple[HeldRows, ...]:
    """Returns what each tensor parallel rank holds of the rows of a matrix; one entry if all hold whole rows."""
    block, width, tensor = block_of(plan.recipe.optim), weight.stored[-1], plan.divisor("matrices")
    is_split = split_of(plan, weight.module) == ("rows" if weight.transposed else "columns")
    if not is_split or tensor_parallel_elements(plan, weights, weight) == weight.elements:
        return (HeldRows(width, ((0, width),), block),)
    parts = 3 if weight.module == "c_attn" else 1  # queries, keys and values
    own = width // (parts * tensor)
    columns = (tuple(((part * tensor + rank) * own, own) for part in range(parts)) for rank in range(tensor))
    return tuple(HeldRows(width, held, block) for held in columns)


def tensor_parallel_elements(plan: Plan, weights: Weights, weight: Weight) -> int:
    """Returns the elements of a weight that a tensor parallel rank holds (the families' `base_model_tp_plan`).

    It holds all elements of distributed experts, of which it has fewer.
    """
    ranks = plan.parallel.tensor
    if ranks == 1 or (weight.is_expert and plan.parallel.expert > 1):
        return weight.elements
    if weight.name == HEAD:
        return weight.elements
    if any(weight is table for table in (*weights.embedding[:1], *weights.head)):
        # llmtrain splits embedding and head if the vocabulary is divisible.
        return weight.elements // ranks if weight.shape[0] % ranks == 0 else weight.elements
    module, _, kind = weight.name.rpartition(".")
    module, _, adapter = module.partition(".lora_")
    name = module.rpartition(".")[2] if kind in ("weight", "bias") else kind
    split = split_of(plan, name)
    is_split = adapter != "A" if split == "rows" else split == "columns" and kind != "bias" and adapter in ("", "A")
    return weight.elements // ranks if is_split else weight.elements
