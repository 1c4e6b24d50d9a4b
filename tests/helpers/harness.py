"""Runs a function on several ranks at once, with gloo or with the device of `tests/cuda_on_host`.

The processes are forked from a server that has torch, deepspeed and transformers imported already,
since importing them costs each process some seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

from llmtrain.launch.rendezvous import reserved_port

SECONDS_BEFORE_END = 4
FORK_SERVER: BaseContext = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tests.helpers.preloaded"])


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 400) -> list[Any]:
    """Runs `function(rank, *arguments)` on each rank of a new process group; returns the results by rank.

    The first exception of any rank is raised here with its traceback; the other ranks are ended.
    """
    pipes: list[Connection] = []
    processes = []
    with reserved_port() as port:
        for rank in range(world_size):
            here, there = FORK_SERVER.Pipe()
            process = FORK_SERVER.Process(target=_rank_main, args=(rank, world_size, port, there, function, arguments))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout)
        if not ready:
            raise TimeoutError(f"ranks {[pipes.index(pipe) for pipe in waiting]} did not finish in {timeout} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                error, results[rank] = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if error:
                raise AssertionError(f"rank {rank} failed:\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int, world_size: int, port: int, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _silence()
    try:
        import torch

        from llmtrain.engines.runtime.distributed import init_process_group
        from llmtrain.launch.discovery.rank import Rank

        torch.set_num_threads(1)
        torch.manual_seed(rank)  # what imports have drawn differs from one server to the next
        init_process_group(
            Rank(
                rank=rank,
                local_rank=rank,
                world_size=world_size,
                local_world_size=world_size,
                master_addr="127.0.0.1",
                master_port=port,
                launcher="test",
            ),
            on_cpu=os.environ["DS_ACCELERATOR"] == "cpu",
        )
        pipe.send((None, function(rank, *arguments)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    finally:
        # If all have answered, `run_ranks` kills them. Until then a rank stays for a while, because its end resets the
        # connections that another one may still be opening; but only then does a rank that waits for it fail.
        with contextlib.suppress(EOFError, OSError):
            pipe.poll(SECONDS_BEFORE_END)
        os._exit(0)


def _silence() -> None:
    """Discards the output of torch and DeepSpeed; a failure is returned through the pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
