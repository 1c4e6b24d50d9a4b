"""Which worker this process is under `mpirun` of Open MPI, or of MPICH and Intel MPI (Hydra, which speaks PMI); pure.

They tell who is who, and not where ranks meet: that is MASTER_ADDR and MASTER_PORT, or this machine, or that of mpirun.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from llmtrain.launch.rank import FIRST_PORT, PORTS, Launcher, Rank, Reader


@dataclass(frozen=True)
class Mpi(Launcher):
    """An `mpirun`."""

    job: str | None = None
    """Variable that is the same for all ranks of a job, and for them only; it chooses their port."""
    export: str = ""
    """How its command line hands variables to the ranks."""
    head: str | None = None
    """Variable that says where mpirun itself runs."""
    own: str | None = None
    """Variable that says whose child this rank is: where rank 0 has the same in both, it is beside mpirun."""


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
        own="OMPI_MCA_orte_local_daemon_uri",
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


def read(mpi: Mpi, reader: Reader) -> Rank:
    """This process; what is wrong is noted in `reader`."""
    local, world = reader.number(mpi.local_world_size, least=1), reader.number(mpi.world_size, least=1)
    return Rank(
        rank=reader.number(mpi.rank),
        local_rank=reader.number(mpi.local_rank),
        world_size=world,
        local_world_size=local,
        master_addr=_address(mpi, reader, is_alone=local == world),
        master_port=_port(mpi, reader),
        launcher=mpi.name,
    )


def _address(mpi: Mpi, reader: Reader, is_alone: bool) -> str:
    """is_alone: whether all ranks are on this machine."""
    told = reader.env.get("MASTER_ADDR", "").strip()
    if told or is_alone:
        return told or "127.0.0.1"
    head = reader.env.get(mpi.head or "", "")
    # `JOB.0;tcp://10.0.0.1,172.17.0.1:39399;tcp6://[fd00::1]:40000`
    listed = re.search(r";tcp://([0-9.,]+):[0-9]+", head)
    addresses = listed[1].split(",") if listed else []
    is_rank_0 = reader.env.get(mpi.rank, "").strip() == "0"
    message = "is not set, and the ranks are on several machines"
    if len(addresses) == 1:
        if not is_rank_0 or reader.env.get(mpi.own or "") == head:
            return addresses[0]
        message += ", rank 0 on another than mpirun"
    elif addresses:
        message += f"; that of mpirun has the addresses {', '.join(addresses)}"
    fix = f"`{mpi.export.format('MASTER_ADDR=HOST')}`, where HOST is the machine of rank 0"
    reader.refuse("MASTER_ADDR", message, fix)
    return ""


def _port(mpi: Mpi, reader: Reader) -> int:
    if reader.env.get("MASTER_PORT"):
        return reader.port("MASTER_PORT")
    job = reader.env.get(mpi.job or "", "")
    if not job:
        fix = f"`{mpi.export.format('MASTER_PORT=29500')}`, a port that is free on the machine of rank 0"
        reader.refuse("MASTER_PORT", "is not set, and this launcher names no job to choose one by", fix)
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS
