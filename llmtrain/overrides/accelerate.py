"""The private parts of accelerate 1.15 that llmtrain replaces or reads. `llmtrain.overrides` has the list."""

from __future__ import annotations

import logging

import torch
from accelerate import tracking
from accelerate.state import AcceleratorState, DistributedType, PartialState


def join_group(device: torch.device) -> None:
    """Rebuilds accelerate's state from the existing process group.

    Without `cpu=True`, accelerate on a CPU would consider itself the only process, whatever the group.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=device.type == "cpu")


def allow_sharding_on_cpus(device: torch.device) -> None:
    """Makes accelerate's state report a device, because FSDP2 itself works on CPUs.

    accelerate 1.15 accepts an FSDP plugin only on accelerator devices; on CPUs it would silently run
    DistributedDataParallel.
    """
    if device.type == "cpu":
        PartialState().distributed_type = DistributedType.MULTI_GPU


def trackers_without_state() -> None:
    """Lets accelerate's trackers be used without an Accelerator, on rank 0 only.

    Their module logs through an adapter that needs accelerate's global state. Making the state would set the thread
    count and treat every worker as a single process on a CPU; a plain logger needs no state.
    """
    tracking.logger = logging.getLogger(tracking.__name__)
