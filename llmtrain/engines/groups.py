"""DeepSpeed's process groups of tensor parallelism, which it keeps in globals and makes once per process."""

from __future__ import annotations

from typing import cast

from deepspeed.module_inject import set_autotp_mode
from deepspeed.utils import groups
from torch import distributed as dist


def forget_groups() -> None:
    """Lets the next engine of this process make its own groups.

    DeepSpeed 0.19.8 takes the groups of the first tensor parallel engine for those of every later
    one, whatever degree that was given, and for those of an engine without tensor parallelism; after a
    pipeline, the next engine would join the pipeline's.
    """
    set_autotp_mode(training=False)
    groups.mpu = None
    groups.mesh_device = None
    groups._TENSOR_MODEL_PARALLEL_GROUP = None
    groups._MODEL_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = None


def make_tensor_groups(degree: int) -> None:
    """Ranks i·degree to (i+1)·degree - 1 share one replica; those equal modulo `degree` hold the same shards."""
    forget_groups()
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)


def tensor_group() -> dist.ProcessGroup:
    """The ranks that hold one replica with this one."""
    return cast(dist.ProcessGroup, groups.get_tensor_model_parallel_group())


def data_group() -> dist.ProcessGroup:
    """The ranks that hold the same shards as this one."""
    return cast(dist.ProcessGroup, groups.get_data_parallel_group())
