"""Fetches the files that a rank reads from other nodes, if nodes have disks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from llmtrain.checkpoint.check import files_of
from llmtrain.checkpoint.manifest import File, Manifest
from llmtrain.checkpoint.storage import Storage
from llmtrain.engines.runtime.agree import attempt, broadcast, gather, raise_together, write_problem
from llmtrain.errors import CheckpointError, Problem
from llmtrain.system.durable import create, remove_tree

CHUNK_BYTES = 16 << 20
"""Size of a message: the memory that each rank needs meanwhile."""


@contextmanager
def complete(folder: Path, manifests: list[Manifest], storage: Storage, privately: bool) -> Iterator[Path]:
    """Yields a folder with all files that the ranks of this node read; called by all ranks, after verification.

    privately: whether private files are only read by the rank that wrote them; under another plan any rank may read
    them. If no node lacks a file, the folder is the checkpoint itself. Otherwise it is a folder of links and copies
    next to it, which is deleted when the context ends.
    """
    files = files_of(manifests)
    missing = gather(_missing(folder, files, storage, privately))
    wanted = sorted({name for names in missing for name in names})
    if not wanted:
        yield folder
        return
    view = folder.with_name(f".{folder.name}.view-{manifests[0].save}")
    raise_together(attempt(lambda: _link(folder, view), "link the files of a checkpoint") if storage.is_leader else [])
    try:
        for name in wanted:
            _send(folder, view, name, files[name], storage)
        yield view
    finally:
        gather(None)  # every rank has read its files
        if storage.is_leader:
            remove_tree(view)


def _missing(folder: Path, files: dict[str, File], storage: Storage, privately: bool) -> list[str]:
    """Returns the files that the ranks of this node read and that are not here."""
    here = set(storage.ranks)
    return [
        name
        for name, file in files.items()
        if (not (privately and file.private) or file.rank in here) and not (folder / name).is_file()
    ]


def _link(folder: Path, view: Path) -> None:
    remove_tree(view)
    view.mkdir()
    for path in folder.rglob("*"):
        if path.is_file():
            link = view / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())


def _send(folder: Path, view: Path, name: str, file: File, storage: Storage) -> None:
    """Sends a file in chunks from the first node that has it to those that lack it.

    Raises CheckpointError on a rank that cannot write, or that received something else than was written.
    """
    has = gather((folder / name).is_file())
    source = has.index(True)
    writes = storage.is_leader and not has[storage.rank]
    with ExitStack() as open_files:
        content = open_files.enter_context((folder / name).open("rb")) if storage.rank == source else None
        try:
            target = open_files.enter_context(create(view / name)) if writes else None
            for _ in range(0, file.bytes, CHUNK_BYTES):
                chunk = broadcast(content.read(CHUNK_BYTES) if content else b"", source)
                if target:
                    target.stream.write(chunk)
            open_files.close()
        except OSError as error:
            raise CheckpointError(write_problem(error, f"copy {name} from another node")) from None
    if target and target.fingerprint != file.fingerprint:
        problem = Problem("checkpoint.hash", str(view / name), "differs from the original after the transfer")
        raise CheckpointError(problem)
