"""Rewrites a checkpoint as the ranks of another plan would have written it, on one machine without a GPU.

Any plan can continue from any checkpoint; from one that was converted for it, each rank reads only its own files. Which
shards a rank holds is determined by the plan's engine: one rank after the other is built, in a separate process and
without the others, reads what it needs from the checkpoint, and writes it. Memory holds one rank at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import check_trusted, read_plan
from llmtrain.checkpoint.folder import PLAN_FILE, STATE_FILE, check_new, new_folder
from llmtrain.checkpoint.manifest import File, Manifest
from llmtrain.checkpoint.state import layout_of
from llmtrain.engines import Engine, build_engine
from llmtrain.engines.runtime.distributed import pretend
from llmtrain.engines.state import files as state_file
from llmtrain.engines.state.save_load import PROGRESS_FILE, CheckpointReader, load_shards
from llmtrain.engines.state.shards import CheckpointShard
from llmtrain.engines.state.writer import DiskWriter, Written
from llmtrain.errors import CheckpointError, Problem, RecipeError, UserError
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.installed import check_runnable
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from llmtrain.run_dir import check_unchanged, identity_of, versions
from llmtrain.system.durable import fingerprint
from llmtrain.system.parent import die_with


def target_plan(
    checkpoint: Path,
    fields: dict[str, object],
    resized: Callable[[Cluster], Cluster],
    trust_remote_code: bool = False,
) -> Plan:
    """Returns the plan to convert to: that of the checkpoint with other fields, on another cluster.

    trust_remote_code: whether a model's own code may be run. Raises RecipeError with all faults: fields that a run may
    not change, and illegal combinations; and CheckpointError for code that may not be run.
    """
    source = read_plan(checkpoint)
    check_trusted(checkpoint, source, trust_remote_code or "model.trust_remote_code" in fields, whole_recipe=True)
    recipe = source.recipe.with_(**fields)
    check_unchanged(source.recipe, recipe, str(checkpoint))
    return resolve(recipe, resized(source.cluster))


def convert(checkpoint: Path, out: Path, plan: Plan, report: Callable[[str], None] = print) -> None:
    """Writes to `out` a checkpoint from which `plan` can continue: of the same run, step and samples.

    It contains no random states; they are seeded anew, as under any other plan. report: receives a line for each rank.
    `out` is complete or absent. Raises CheckpointError for a damaged checkpoint, or if `out` has content or cannot be
    written, and RecipeError for a plan that does not run on CPUs.
    """
    check_new(out)
    on_cpu = _on_cpus(plan)
    manifests = verify_checkpoint(checkpoint)
    first = manifests[0]
    with new_folder(out) as folder:
        files: dict[str, File] = {}
        for rank in range(plan.workers):
            written = _in_own_process(on_cpu, rank, checkpoint, folder)
            files |= {
                name: File(**vars(file.fingerprint), rank=rank, private=file.private) for name, file in written.items()
            }
            size = sum(file.fingerprint.bytes for file in written.values())
            report(f"rank {rank}: {len(written)} files, {size / 2**20:,.1f} MiB")
        for name in (STATE_FILE, PROGRESS_FILE):
            shutil.copyfile(checkpoint / name, folder / name)
        (folder / PLAN_FILE).write_text(plan.model_dump_json(indent=1), encoding="utf-8")
        for name in (STATE_FILE, PROGRESS_FILE, PLAN_FILE):
            files[name] = File(**vars(fingerprint(folder / name)), rank=0, private=False)
        Manifest(
            save=uuid.uuid4().hex,
            part=0,
            hosts=[socket.gethostname()],
            run=first.run,
            recipe=identity_of(plan.recipe),
            step=first.step,
            samples=first.samples,
            eval_loss=first.eval_loss,
            metrics=first.metrics,
            ended=first.ended,
            written=datetime.now(UTC).isoformat(timespec="microseconds"),
            world_size=plan.workers,
            layout=layout_of(plan),
            versions=versions(),
            files=files,
        ).write(folder)


def _on_cpus(plan: Plan) -> Plan:
    """Returns a plan that splits the state in the same way, with an engine that can be built on this machine."""
    recipe, cluster = plan.recipe, plan.cluster
    if recipe.parallel.backend == "horovod":
        message = "horovod's ranks need its own launcher, and all of them hold the whole model"
        raise RecipeError(
            Problem("convert.backend", "parallel.backend", message, "continue from the checkpoint as it is")
        )
    if recipe.parallel.precision == "fp16":
        message = "DeepSpeed does not run fp16 weights on CPUs, where a checkpoint is converted"
        raise RecipeError(Problem("convert.precision", "parallel.precision", message, "continue from it as it is"))
    host = {
        f"parallel.{name}": "cpu"
        for name in ("offload_optimizer", "offload_param")
        if getattr(recipe.parallel, name) == "nvme"
    }
    here = Cluster(nodes=cluster.nodes, devices_per_node=cluster.devices_per_node, device="cpu")
    on_cpu = resolve(recipe.with_(**host, **{"parallel.nvme_path": None}) if host else recipe, here)
    check_runnable(on_cpu)
    return on_cpu


def _in_own_process(plan: Plan, rank: int, checkpoint: Path, folder: Path) -> dict[str, Written]:
    """Returns what a rank writes.

    The process is forked, since importing torch and DeepSpeed takes longer than the rest.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_rank, args=(plan, rank, checkpoint, folder, sender, os.getpid()))
    process.start()
    sender.close()
    try:
        result: dict[str, Written] | UserError | str = receiver.recv()
    except EOFError:
        result = f"rank {rank} died without an error message; it may have run out of memory"
    finally:
        if sys.exception() is not None:  # a signal: it must not write into the folder while that is removed
            process.kill()
        process.join()
    if isinstance(result, UserError):
        raise result
    if isinstance(result, str):
        raise CheckpointError(Problem("convert.rank", str(checkpoint), result))
    return result


def _run_rank(plan: Plan, rank: int, checkpoint: Path, folder: Path, pipe: Connection, parent: int) -> None:
    die_with(parent)  # otherwise it would write into the folder of the next conversion
    try:
        with Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), 1)  # DeepSpeed's log messages
        os.dup2(1, 2)
        pipe.send(_write_files_of_rank(plan, rank, checkpoint, folder))
    except UserError as error:
        pipe.send(error)
    except BaseException:
        pipe.send(f"rank {rank} failed:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        os._exit(0)


def _write_files_of_rank(plan: Plan, rank: int, checkpoint: Path, folder: Path) -> dict[str, Written]:
    pretend(rank, plan.workers)
    engine = build_engine(plan, render(plan), torch.device("cpu"))
    writer = DiskWriter(folder)
    state_file.write(writer, rank, _loaded_shards(engine, CheckpointReader(checkpoint)))
    if writer.error is not None:
        error = writer.error
        raise CheckpointError(Problem("out.write", str(folder), f"cannot be written: {error.strerror or error}"))
    return writer.files


@torch.no_grad()
def _loaded_shards(engine: Engine, reader: CheckpointReader) -> Iterator[list[CheckpointShard]]:
    for shards in engine.checkpoint_shards():
        load_shards(shards, reader)
        yield shards
