"""A small checkpoint that is written by hand, quickly and without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.manifest import File, Manifest
from llmtrain.run_dir import RunDir, identity_of
from llmtrain.system.durable import fingerprint
from tests.helpers.small_plan import small_plan

RUN = "0123456789ab"
KINDS = ("weight", "exp_avg", "exp_avg_sq")
PIECES = "engine/rank_00000.0.safetensors"


def pieces() -> list[dict[str, Any]]:
    """Two weights, one of them in two boxes."""
    whole = {"shape": [2, 3], "boxes": [{"first": [0, 0], "size": [2, 3]}], "dim": 0}
    parts = {"shape": [4], "boxes": [{"first": [0], "size": [1]}, {"first": [1], "size": [3]}], "dim": 0}
    about = {"start": 0, "kinds": list(KINDS), "steps": 1.0}
    return [
        {"name": "a.weight", "region": whole, "numel": 6, **about},
        {"name": "b.weight", "region": parts, "numel": 4, **about},
    ]


def head_of(listed: list[dict[str, Any]], dtype: str = "F32") -> dict[str, Any]:
    """Returns the header of a safetensors file with these pieces."""
    head: dict[str, Any] = {"__metadata__": {"pieces": json.dumps(listed)}}
    at = 0
    for index, piece in enumerate(listed):
        for kind in piece["kinds"]:
            end = at + 4 * piece["numel"]
            head[f"{index}.{kind}"] = {"dtype": dtype, "shape": [piece["numel"]], "data_offsets": [at, end]}
            at = end
    return head


def write_head(file: Path, head: Any, size: int) -> None:
    """Writes a safetensors file with `size` bytes of tensors."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


def make_run(folder: Path, step: int = 1) -> RunDir:
    """Makes a run directory with one checkpoint."""
    run = RunDir(folder)
    run.create(small_plan(), {})
    run.id_file.write_text(RUN + "\n")
    made = run.checkpoints / f"step_{step:08d}"
    (made / "engine").mkdir(parents=True)
    write_head(made / PIECES, head_of(pieces()), 3 * 4 * 10)
    (made / "engine" / "progress.json").write_text(json.dumps({"schedule": step}))
    (made / "trainer.json").write_text(TrainerState(step=step, samples=8, data="key").text())
    (made / "plan.json").write_text(small_plan().model_dump_json())
    seal(made, step)
    (run.checkpoints / "latest").write_text(made.name + "\n")
    return run


def seal(made: Path, step: int = 1) -> None:
    """Writes the manifest of the existing files: their hashes are right, whatever they contain."""
    files = {
        path.relative_to(made).as_posix(): File(**vars(fingerprint(path)), rank=0, private=False)
        for path in sorted(made.rglob("*"))
        if path.is_file() and path.name != "MANIFEST.json"
    }
    Manifest(
        save="save",
        part=0,
        hosts=["here"],
        run=RUN,
        recipe=identity_of(small_plan().recipe),
        step=step,
        samples=8,
        eval_loss=None,
        written=f"2026-01-01T00:00:{step:02d}.000000+00:00",
        world_size=1,
        layout={"dp": 1},
        versions={"torch": "2"},
        files=files,
    ).write(made)
