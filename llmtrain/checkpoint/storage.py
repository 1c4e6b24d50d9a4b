"""Which ranks see the same files: a shared filesystem, or disks of the nodes' own."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from llmtrain.checkpoint.agree import attempt, broadcast, gather, raise_together, world_size
from llmtrain.engines.distributed import rank


@dataclass(frozen=True)
class Storage:
    """The filesystems that hold the checkpoints of a run. Each of them has one part of each checkpoint."""

    leaders: tuple[int, ...]
    """Of each part, the rank that makes, renames and deletes folders there."""
    hosts: tuple[str, ...]
    """Of each part, the machine of its leader."""
    part: int
    """The part that this rank sees."""
    ranks: tuple[int, ...]
    """The ranks that see the same one."""
    rank: int
    """This rank."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank acts for the others that see the same files."""
        return self.rank == self.leaders[self.part]

    def reader_of(self, writer: int) -> int:
        """Which of `ranks` checks the files of a rank: that rank, which may have them cached, or another."""
        return writer if writer in self.ranks else self.ranks[writer % len(self.ranks)]


def probe(checkpoints: Path) -> Storage:
    """Finds out who sees whose files; called by all ranks, and makes the folder where it is not there.

    Each rank makes a file, and looks for those of the others by their names: a listing may come from a cache
    of the network filesystem, a name that was never asked for cannot. Raises CheckpointError where a rank
    cannot write there.
    """
    token, own = broadcast(uuid.uuid4().hex[:8]), rank()

    def file_of(other: int) -> Path:
        return checkpoints / f".probe-{token}-{other}"

    def make() -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        file_of(own).touch()

    raise_together(attempt(make, "write into the folder of the checkpoints"))
    first = next(other for other in range(world_size()) if file_of(other).exists())
    seen = gather((first, socket.gethostname()))
    file_of(own).unlink(missing_ok=True)  # the next save of a faster rank clears such files away
    leaders = tuple(sorted({leader for leader, _ in seen}))
    return Storage(
        leaders=leaders,
        hosts=tuple(seen[leader][1] for leader in leaders),
        part=leaders.index(first),
        ranks=tuple(other for other, (leader, _) in enumerate(seen) if leader == first),
        rank=own,
    )
