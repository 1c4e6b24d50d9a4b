"""Determines the rank of this process under the `mpirun` of Open MPI, MPICH or Intel MPI (Hydra, via PMI).

They number the ranks, but give no rendezvous. It is MASTER_ADDR and MASTER_PORT, or this machine, or that of mpirun.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from llmtrain.launch.discovery.rank import Launcher, Rank, RankReader
from llmtrain.launch.rendezvous import TORCHRUN_PORT, port_of_job


@dataclass(frozen=True)
class Mpi(Launcher):
    """An `mpirun`."""

    job: str | None = None
    """Variable that has the same value for all ranks of one job only; it determines their port."""
    export: str = ""
    """The option of its command line that passes variables to the ranks."""
    head: str | None = None
    """Variable with the address of mpirun itself."""
    local_daemon: str | None = None
    """Variable with the address of this rank's parent: if it equals `head` for rank 0, rank 0 is on mpirun's machine.
    """


# The variables of each were seen on Open MPI 4.1 and MPICH 4.0; those of Open MPI 5 are in its documentation
# (https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html).
MPIS = (
    Mpi(
        "openmpi",
        markers=("OMPI_COMM_WORLD_SIZE",),
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
        export="mpirun -x {}",
        head="OMPI_MCA_orte_hnp_uri",
        local_daemon="OMPI_MCA_orte_local_daemon_uri",
    ),
    # Not PMI_RANK, which `srun --mpi=pmi2` sets as well.
    Mpi(
        "mpich",
        markers=("MPI_LOCALNRANKS",),
        rank="PMI_RANK",
        local_rank="MPI_LOCALRANKID",
        world_size="PMI_SIZE",
        local_world_size="MPI_LOCALNRANKS",
        export="mpiexec -genv {}",
    ),
)


def read(mpi: Mpi, reader: RankReader) -> Rank:
    """Reads the rank of this process; problems are collected in `reader`."""
    local, world = reader.number(mpi.local_world_size, minimum=1), reader.number(mpi.world_size, minimum=1)
    return Rank(
        rank=reader.number(mpi.rank),
        local_rank=reader.number(mpi.local_rank),
        world_size=world,
        local_world_size=local,
        master_addr=_address(mpi, reader, is_alone=local == world),
        master_port=_port(mpi, reader),
        launcher=mpi.name,
    )


def _address(mpi: Mpi, reader: RankReader, is_alone: bool) -> str:
    """Returns the address of rank 0. is_alone: whether all ranks are on this machine."""
    address = reader.env.get("MASTER_ADDR", "").strip()
    if address or is_alone:
        return address or "127.0.0.1"
    head = reader.env.get(mpi.head or "", "")
    # `JOB.0;tcp://10.0.0.1,172.17.0.1:39399;tcp6://[fd00::1]:40000`
    match = re.search(r";tcp://([0-9.,]+):[0-9]+", head)
    addresses = match[1].split(",") if match else []
    is_rank_0 = reader.env.get(mpi.rank, "").strip() == "0"
    message = "is not set, but the ranks are on several machines"
    if len(addresses) == 1:
        if not is_rank_0 or reader.env.get(mpi.local_daemon or "") == head:
            return addresses[0]
        message += ", and rank 0 is not on the machine of mpirun"
    elif addresses:
        message += f"; mpirun's machine has the addresses {', '.join(addresses)}"
    fix = f"`{mpi.export.format('MASTER_ADDR=HOST')}`, where HOST is the machine of rank 0"
    reader.refuse("MASTER_ADDR", message, fix)
    return ""


def _port(mpi: Mpi, reader: RankReader) -> int:
    if reader.env.get("MASTER_PORT"):
        return reader.port("MASTER_PORT")
    job = reader.env.get(mpi.job or "", "")
    if not job:
        fix = f"`{mpi.export.format(f'MASTER_PORT={TORCHRUN_PORT}')}`, a port that is free on the machine of rank 0"
        reader.refuse("MASTER_PORT", "is not set, and this launcher provides no job name to derive it from", fix)
    return port_of_job(zlib.crc32(job.encode()))
