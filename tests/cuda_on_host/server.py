"""Runs functions in ranks on the device, each forked from this process, which has imported torch and DeepSpeed.

Started by the fixture `gpus`, with the file descriptor of a connection to it.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import deepspeed
import torch

from tests.helpers import harness, preloaded  # noqa: F401


def on_device(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` on one rank; nothing may be left undone, or done on the device of another rank."""
    import _cuda_on_host as device  # exists once torch is imported
    from torch.distributed import get_world_size
    from torch.distributed.distributed_c10d import _get_default_store

    store, ranks = _get_default_store(), get_world_size()
    try:
        result = function(rank, *arguments)
        torch.cuda.synchronize()
        assert device.contexts() == [rank], f"rank {rank} made contexts on the devices {device.contexts()}"
    finally:
        device.rank_ended(store, rank)
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < ranks:  # the store ends with this rank
        time.sleep(0.01)
    return result


def main() -> None:
    assert deepspeed.get_accelerator().device_name() == "cuda"
    harness.FORK_SERVER = multiprocessing.get_context("fork")  # the device cannot be preloaded into a fork server
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            world_size, function, arguments, timeout = connection.recv()
        except EOFError:
            return
        try:
            answer = harness.run_ranks(world_size, on_device, function, *arguments, timeout=timeout), None
        except (AssertionError, TimeoutError) as failure:
            answer = None, str(failure)
        connection.send(answer)


if __name__ == "__main__":
    main()
