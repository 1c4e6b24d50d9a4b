"""Runs functions of tests one after the other, as the only rank of a process group on the first GPU.

Started by the fixture `gpu`, with the file descriptor of a connection to it. A process of its own, because the other
tests import DeepSpeed for CPUs and run Triton's kernels in its interpreter.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from numpy.typing import NDArray
from torch._dynamo import lookup_backend

from llmtrain.engines import build_engine
from llmtrain.engines.engine import Engine
from llmtrain.engines.runtime.distributed import init_process_group
from llmtrain.launch.discovery.rank import Rank
from llmtrain.launch.rendezvous import reserved_port
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from llmtrain.trials.verify.train import drawn_weights
from tests.gpu.conftest import EMULATED
from tests.helpers.traces import Trace, trace

GPU = torch.device("cuda", 0)


def plan_of(recipe: Recipe) -> Plan:
    return resolve(recipe, Cluster(device="gpu"))


def engine_of(recipe: Recipe) -> tuple[Engine, tuple[int, int]]:
    """The engine, and its micro-batch size and accumulation."""
    plan = plan_of(recipe)
    shape = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps
    return build_engine(plan, render(plan), GPU), shape


def train(recipe: Recipe, steps: int) -> Trace:
    engine, shape = engine_of(recipe)
    return trace(engine, range(steps), *shape)


def initial_weights(recipe: Recipe) -> dict[str, NDArray]:
    """The weights from which the GPU starts. Its generator draws others than a CPU's from the same seed."""
    return {name: weight.float().cpu().numpy() for name, weight in drawn_weights(recipe, GPU).items()}


def waits_forbidden() -> AbstractContextManager[None]:
    """Makes it an error if the host waits for the device."""
    if EMULATED:
        from _cuda_on_host import forbid_waits

        return _set(forbid_waits, True, False)
    return _set(torch.cuda.set_sync_debug_mode, "error", "default")


@contextmanager
def _set(change: Callable[[Any], object], during: object, after: object) -> Any:
    change(during)
    try:
        yield
    finally:
        change(after)


def _stand_in() -> object:
    """For what only a GPU has: the kernel of attention by boundaries, compiled graphs, and a generator of its own.

    Returns what must live.
    """
    seed = torch.cuda.manual_seed
    torch.cuda.manual_seed = lambda number: seed(number + 1)
    from llmtrain.engines import forward
    from llmtrain.models import compiled
    from tests.cuda_on_host.test_varlen import _install

    compiled._inductor = lookup_backend("aot_eager")
    forward.check_compiler = lambda fields, on_cpu: None
    return _install([])


def main() -> None:
    alive = _stand_in() if EMULATED else None
    connection = Connection(int(sys.argv[1]))
    with reserved_port() as port:
        rank = Rank(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=port,
            launcher="test",
        )
        init_process_group(rank, on_cpu=False)
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            answer = None, function(*arguments)
        except BaseException:
            answer = traceback.format_exc(), None
        connection.send_bytes(pickle.dumps(answer))
        del function, arguments, answer
        gc.collect()
        torch.cuda.empty_cache()
    del alive
    os._exit(0)  # tearing the group down takes time, and shows nothing


if __name__ == "__main__":
    main()
