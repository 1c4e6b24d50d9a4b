"""The port at which rank 0 listens and the other ranks meet it (`MASTER_PORT`), for each way of starting workers.

Workers of this machine meet at a port that their launcher reserves; hosts that are reached by ssh, at one that is free
on the first host; tasks of srun or mpirun, at one that each derives from the job's number, as the script of a Slurm job
does for all of its tasks; and commands that are started by hand use the port of torchrun. Under srun, mpirun and ssh, a
MASTER_PORT of the user takes precedence.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TORCHRUN_PORT = 29500
"""The default of torchrun, in commands that are printed for users."""
FIRST_PORT, PORTS = 20000, 10000
"""A range of ports from which the system assigns none to programs that ask for any."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a TCP port of this machine on which rank 0 can listen, and which no other process gets meanwhile.

    The port stays bound here. Rank 0 can bind it too, since torch's store and this socket both set SO_REUSEADDR and
    only one of them listens. The kernel does not give a bound port to a process that asks for a free one.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as reservation:
        if dual:
            reservation.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def free_port() -> int:
    """Returns a port that is free on this host now. Raises OSError if all of the range are taken."""
    start = secrets.randbelow(PORTS)
    for offset in range(PORTS):
        port = FIRST_PORT + (start + offset) % PORTS
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError(f"all ports from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are taken")


def port_of_job(number: int) -> int:
    """Returns the port that all ranks of a job derive from its number. `slurm/train.sbatch` uses the same range."""
    return FIRST_PORT + number % PORTS
