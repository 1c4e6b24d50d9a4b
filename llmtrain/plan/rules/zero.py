"""Rules for ZeRO stages and offload. The engine silently ignores options that a stage does not support."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import EXPERT, PIPELINE, TENSOR, used
from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule

WITHOUT_HPZ = assignment(parallel__hierarchical_partition=1)


@rule("zero.offload_optimizer_stage", "Without ZeRO nothing is sharded, and offload is ignored.", "run")
def offload_optimizer_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses optimizer offload at ZeRO 0."""
    parallel = draft.parallel
    if parallel.offload_optimizer != "none" and parallel.zero_stage == 0:
        message = f"'{parallel.offload_optimizer}' has no effect at ZeRO 0: the optimizer states stay on the device"
        yield Fault("parallel.offload_optimizer", message, assignment(parallel__zero_stage=1))


@rule("zero.offload_param_stage", "Only ZeRO 3 shards parameters; at other stages parameter offload is ignored.", "run")
def offload_param_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses parameter offload below ZeRO 3."""
    parallel = draft.parallel
    if parallel.offload_param != "none" and parallel.zero_stage < 3:
        message = (
            f"'{parallel.offload_param}' needs ZeRO 3: at ZeRO {parallel.zero_stage} parameters stay on the device"
        )
        fix = f"{assignment(parallel__zero_stage=3)}, or {assignment(parallel__offload_param='none')}"
        yield Fault("parallel.offload_param", message, fix)


@rule("zero.nvme_stage", "Only ZeRO 3 offloads to disk; stages 1 and 2 silently use host memory instead.", "run")
def nvme_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses NVMe offload of the optimizer at ZeRO 1 and 2."""
    parallel = draft.parallel
    if parallel.offload_optimizer == "nvme" and parallel.zero_stage in (1, 2):
        message = f"'nvme' needs ZeRO 3: at ZeRO {parallel.zero_stage} the states would stay in host memory"
        fix = f"{assignment(parallel__zero_stage=3)}, or {assignment(parallel__offload_optimizer='cpu')}"
        yield Fault("parallel.offload_optimizer", message, fix)


@rule("zero.nvme_path", "A folder without NVMe offload, or NVMe offload without a folder, is a mistake.", "run")
def nvme_path(draft: Draft) -> Iterator[Fault]:
    """Refuses NVMe offload without a folder, and a folder without NVMe offload."""
    parallel = draft.parallel
    wanted = "nvme" in (parallel.offload_optimizer, parallel.offload_param)
    if wanted and not parallel.nvme_path:
        message = "is required for nvme offload: name a folder on a local disk of each node"
        yield Fault("parallel.nvme_path", message, assignment(parallel__nvme_path="/local_nvme"))
    if parallel.nvme_path and not wanted:
        message = f"'{parallel.nvme_path}' has no effect: nothing is offloaded to nvme"
        yield Fault("parallel.nvme_path", message, assignment(parallel__nvme_path="null"))


@rule(
    "zero.expert",
    "Only the engine for whole models distributes experts, and it refuses offload together with tensor parallelism.",
    "run",
    axis=EXPERT,
)
def expert(draft: Draft) -> Iterator[Fault]:
    """Refuses options that expert parallelism excludes (`module_inject/auto_ep_folding.py:validate_folding_global`)."""
    parallel = draft.parallel
    offloads = parallel.offload_optimizer != "none" or parallel.offload_param != "none"
    if parallel.autotp_ranks > 1 and offloads:
        message = f"{parallel.expert} is not supported with tensor parallelism and offload together"
        fix = f"{assignment(parallel__tensor=1)}, or no offload"
        yield Fault("parallel.expert", message, fix)
    if PIPELINE in used(parallel):
        message = f"{parallel.expert} is not supported with pipelines: their engine has no expert groups"
        yield Fault("parallel.expert", message, assignment(parallel__expert=1))


@rule("zero.hierarchical_stage", "Only ZeRO 3 gathers parameters; at other stages hpZ is ignored.", "run")
def hierarchical_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses hpZ below ZeRO 3."""
    parallel = draft.parallel
    if parallel.hierarchical_partition > 1 and parallel.zero_stage < 3:
        message = f"{parallel.hierarchical_partition} has no effect: ZeRO {parallel.zero_stage} gathers no parameters"
        fix = f"{assignment(parallel__zero_stage=3)}, or {WITHOUT_HPZ}"
        yield Fault("parallel.hierarchical_partition", message, fix)


@rule(
    "zero.hierarchical_groups",
    "hpZ forms equal groups of neighbouring ranks; each group keeps a second copy of all parameters. DeepSpeed has no "
    "such groups for experts, or for tensor parallel ranks, whose neighbours hold different slices.",
    "run",
)
def hierarchical_groups(draft: Draft) -> Iterator[Fault]:
    """Refuses hpZ groups that do not divide the ranks, save nothing, or do not hold the same weights."""
    parallel, size, ranks = draft.parallel, draft.parallel.hierarchical_partition, draft.cluster.world_size
    if size == 1:
        return
    for axis in (TENSOR, EXPERT):
        if axis in used(parallel):
            ranks_of = f"{axis.name} parallelism ({axis.degree(parallel)} ranks)"
            message = f"must be 1, not {size}: hpZ does not support {ranks_of}"
            yield Fault("parallel.hierarchical_partition", message, WITHOUT_HPZ)
    if ranks % size or size >= ranks:
        message = f"must be a proper divisor of the {ranks} ranks, not {size}"
        per_node = draft.cluster.devices_per_node
        fix = assignment(parallel__hierarchical_partition=per_node) if 1 < per_node < ranks else WITHOUT_HPZ
        yield Fault("parallel.hierarchical_partition", message, fix)


@rule(
    "zero.hierarchical_nvme",
    "hpZ allocates its copies on the device to which parameters are offloaded, and torch has no tensors on disks.",
    "read",
)
def hierarchical_nvme(draft: Draft) -> Iterator[Fault]:
    """Refuses hpZ with parameters offloaded to a disk (`partition_parameters.py:_partition_param_sec`)."""
    parallel = draft.parallel
    if parallel.hierarchical_partition > 1 and parallel.offload_param == "nvme":
        message = (
            f"{parallel.hierarchical_partition} is not supported with parameters on nvme: hpZ would keep its copies "
            "there, but torch has no tensors on disks"
        )
        fix = f"{WITHOUT_HPZ}, or {assignment(parallel__offload_param='cpu')}"
        yield Fault("parallel.hierarchical_partition", message, fix)


RULES = (
    offload_optimizer_stage,
    offload_param_stage,
    nvme_stage,
    nvme_path,
    expert,
    hierarchical_stage,
    hierarchical_groups,
    hierarchical_nvme,
)
