"""Determines which ranks see the same files: a shared file system, or separate disks of the nodes."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from llmtrain.engines.runtime.agree import attempt, broadcast, gather, raise_together, world_size
from llmtrain.engines.runtime.distributed import rank


@dataclass(frozen=True)
class Storage:
    """The file systems that hold the checkpoints of a run. Each of them has one part of each checkpoint."""

    leaders: tuple[int, ...]
    """For each part, the rank that creates, renames and deletes folders there."""
    hosts: tuple[str, ...]
    """For each part, the machine of its leader."""
    part: int
    """The part that this rank sees."""
    ranks: tuple[int, ...]
    """The ranks that see the same part."""
    rank: int
    """This rank."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank acts for the others that see the same files."""
        return self.rank == self.leaders[self.part]

    def reader_of(self, writer: int) -> int:
        """Returns which of `ranks` checks the files of a rank: that rank, which may have them cached, or another."""
        return writer if writer in self.ranks else self.ranks[writer % len(self.ranks)]


def probe(checkpoints: Path) -> Storage:
    """Determines which ranks see the same files; called by all ranks. Creates the folder if it does not exist.

    Each rank creates a file and looks for those of the others by name: a directory listing may come from a cache of the
    network file system, but a name that was never looked up cannot. Raises CheckpointError if a rank cannot write
    there.
    """
    token, this_rank = broadcast(uuid.uuid4().hex[:8]), rank()

    def file_of(other: int) -> Path:
        return checkpoints / f".probe-{token}-{other}"

    def make() -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        file_of(this_rank).touch()

    raise_together(attempt(make, "write into the folder of the checkpoints"))
    first = next(other for other in range(world_size()) if file_of(other).exists())
    seen = gather((first, socket.gethostname()))
    file_of(this_rank).unlink(missing_ok=True)  # a faster rank's next save may have removed it already
    leaders = tuple(sorted({leader for leader, _ in seen}))
    return Storage(
        leaders=leaders,
        hosts=tuple(seen[leader][1] for leader in leaders),
        part=leaders.index(first),
        ranks=tuple(other for other, (leader, _) in enumerate(seen) if leader == first),
        rank=this_rank,
    )
