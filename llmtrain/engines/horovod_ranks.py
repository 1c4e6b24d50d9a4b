"""How Horovod's ranks and torch's find each other, whichever of the two was launched.

The run itself (barriers, checkpoints, the launcher's rank) speaks through torch's process group,
as with every engine; Horovod reduces the gradients. So both are there, with the same ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import horovod.torch as hvd
from horovod.runner.http.http_server import RendezvousServer
from torch import distributed as dist


def join(local_size: int) -> None:
    """Starts Horovod in every rank of torch's process group; does nothing where it runs already.

    `horovodrun` has told each process where Horovod's ranks meet. Under other launchers rank 0 opens
    the place, and torch's process group passes it on.

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
        # All have met, before the place is closed.
        dist.barrier()


def meeting_place() -> tuple[str, int]:
    """Address and port where torch's ranks shall meet, agreed on by Horovod's; for workers of `horovodrun`.

    Called by all of them. Rank 0 picks a free port of its own machine.
    """
    hvd.init()
    mine = None
    if hvd.rank() == 0:
        host = "127.0.0.1" if hvd.local_size() == hvd.size() else os.environ["HOROVOD_HOSTNAME"]
        with socket.socket() as probe:
            probe.bind(("", 0))
            mine = (host, probe.getsockname()[1])
    # Named, since Horovod matches ranks by name, and its default is that of the object's type.
    place: tuple[str, int] = hvd.broadcast_object(mine, root_rank=0, name="meeting_place")
    return place


@contextmanager
def _rendezvous() -> Iterator[int]:
    """The port of a rendezvous server at rank 0, on every rank."""
    server = RendezvousServer() if dist.get_rank() == 0 else None
    ports: list[int] = [server.start() if server else 0]
    dist.broadcast_object_list(ports, src=0)
    try:
        yield ports[0]
    finally:
        if server:
            server.stop()


def _variables(rank: int, size: int, local_size: int, port: int) -> dict[str, str]:
    """What `horovodrun` sets for a worker (horovod/runner/gloo_run.py)."""
    node, local_rank = divmod(rank, local_size)
    variables = {
        "HOROVOD_HOSTNAME": f"node-{node}",  # only compared with those of other workers
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
        # Its default, 30 s, ends a run whose machine pauses for longer; torch's group waits as long as this.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "1800"),
    }
    if size == local_size:
        # Left alone, Horovod takes the address of the host's name, which need not resolve.
        variables["HOROVOD_GLOO_IFACE"] = os.environ.get("HOROVOD_GLOO_IFACE", "lo")
    return variables
