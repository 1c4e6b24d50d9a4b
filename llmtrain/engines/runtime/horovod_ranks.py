"""Connects Horovod's ranks with torch's, whichever launcher started them.

The run itself (barriers, checkpoints, the launcher's rank) communicates through torch's process group, as with every
engine, and Horovod reduces the gradients. Both are therefore initialized, with the same ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import horovod.torch as hvd
from horovod.runner.http.http_server import RendezvousServer
from torch import distributed as dist

from llmtrain.engines.runtime.agree import broadcast


def start_horovod(local_size: int) -> None:
    """Starts Horovod in every rank of torch's process group; does nothing if it already runs.

    `horovodrun` tells each process the address of its rendezvous server. Under other launchers, rank 0 starts the
    server, and torch's process group broadcasts its port.

    local_size: processes on each machine; ranks are numbered machine by machine.
    """
    if hvd.is_initialized():
        return
    if os.environ.get("HOROVOD_RANK"):
        hvd.init()
        return
    with _rendezvous() as port:
        os.environ.update(_variables(dist.get_rank(), dist.get_world_size(), local_size, port))
        hvd.init()
        # All ranks have to connect before the server is stopped.
        dist.barrier()


def rendezvous_address() -> tuple[str, int]:
    """Returns the address and port of torch's rendezvous, which Horovod's ranks agree on; for workers of `horovodrun`.

    All workers call it. Rank 0 picks a free port of its own machine.
    """
    hvd.init()
    address = None
    if hvd.rank() == 0:
        host = "127.0.0.1" if hvd.local_size() == hvd.size() else os.environ["HOROVOD_HOSTNAME"]
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = (host, probe.getsockname()[1])
    # Horovod matches ranks by name, and the default name is that of the object's type, so the name is explicit.
    agreed: tuple[str, int] = hvd.broadcast_object(address, root_rank=0, name="rendezvous_address")
    return agreed


@contextmanager
def _rendezvous() -> Iterator[int]:
    """Starts a rendezvous server at rank 0, and yields its port on every rank."""
    server = RendezvousServer() if dist.get_rank() == 0 else None
    port: int = broadcast(server.start() if server else 0)
    try:
        yield port
    finally:
        if server:
            server.stop()


def _variables(rank: int, size: int, local_size: int, port: int) -> dict[str, str]:
    """Returns the variables that `horovodrun` sets for a worker (horovod/runner/gloo_run.py)."""
    node, local_rank = divmod(rank, local_size)
    variables = {
        "HOROVOD_HOSTNAME": f"node-{node}",  # only compared with the names of other workers
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(node),
        "HOROVOD_CROSS_SIZE": str(size // local_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # The default of 30 s ends a run whose machine pauses for longer; torch's group waits as long as this value.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "1800"),
    }
    if size == local_size:
        # By default, Horovod uses the address of the host's name, which may not resolve.
        variables["HOROVOD_GLOO_IFACE"] = os.environ.get("HOROVOD_GLOO_IFACE", "lo")
    return variables
