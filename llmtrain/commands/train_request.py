"""The options of `llmtrain train`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmtrain.commands.options import (
    DeviceOption,
    NodesOption,
    PerNodeOption,
    RecipeArgument,
    SetOption,
    named_cluster,
)
from llmtrain.system.host import MAX_WORKERS

if TYPE_CHECKING:
    from llmtrain.recipe import Recipe
    from llmtrain.recipe.cluster import Cluster
    from llmtrain.run_dir import RunDir


LauncherName = Literal["local", "torchrun", "accelerate", "deepspeed", "slurm", "kubernetes"]


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """All options of the command line, as given."""

    recipe: RecipeArgument
    """Path of the recipe's file, optionally followed by `:VARIANT`."""
    assignments: SetOption = field(default_factory=list)
    nproc: Annotated[
        int | None,
        typer.Option(help="Number of workers; default: one per GPU, or one on a CPU.", min=1, max=MAX_WORKERS),
    ] = None
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: runs/NAME[-VARIANT].")] = None
    resume: Annotated[
        str,
        typer.Option(
            help="auto: continue from the newest checkpoint, if there is one; never: start over; PATH: continue from "
            "that checkpoint."
        ),
    ] = "auto"
    allow_change: Annotated[
        list[str],
        typer.Option(
            metavar="FIELD",
            help="Continue the run although this field has another value than at its start, such as optim.lr or "
            "data.sources. Repeatable.",
        ),
    ] = field(default_factory=list)
    max_steps: Annotated[int | None, typer.Option(help="Stop after this step and save a checkpoint.", min=1)] = None
    max_restarts: Annotated[
        int, typer.Option(help="How many times to restart a job that died, from its last checkpoint.", min=0)
    ] = 0
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Do not train: run a scaled-down copy of the plan here, on CPUs, and report. With "
            "--launcher, print what would be started.",
        ),
    ] = False
    nodes: NodesOption = None
    gpus_per_node: PerNodeOption = None
    device: DeviceOption = None
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print the report as one JSON document.")] = (
        False
    )
    launcher: Annotated[
        LauncherName,
        typer.Option(
            help="torchrun, accelerate: start the workers of this machine with this tool; deepspeed: start "
            "them on the hosts of a hostfile over ssh; slurm: submit a job; kubernetes: print a "
            "manifest (needs --dry-run)."
        ),
    ] = "local"
    launched_by: Annotated[
        str,
        typer.Option(
            metavar="MODULE:NAME",
            help="A llmtrain.launch.Launcher of your own, next to the recipe or installed, that has started this "
            "process as a worker.",
        ),
    ] = ""
    hostfile: Annotated[Path | None, typer.Option(help="deepspeed: file with lines of the form HOST slots=N.")] = None
    include: Annotated[str, typer.Option(help="deepspeed: hosts and devices to use, such as h1@h2:0,2.")] = ""
    exclude: Annotated[str, typer.Option(help="deepspeed: hosts and devices to leave out.")] = ""
    runner: Annotated[
        Literal["pdsh", "openmpi"] | None,
        typer.Option(help="deepspeed: how to reach the hosts, like --launcher of `deepspeed` itself; default: pdsh."),
    ] = None
    slurm: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="slurm: an option of the job, such as time=24:00:00 or partition=NAME. Repeatable.",
        ),
    ] = field(default_factory=list)
    kubernetes: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="kubernetes: an option of the manifest, such as image=IMAGE or pvc=CLAIM. Repeatable.",
        ),
    ] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path of the recipe's file, as given."""
        return self.recipe.partition(":")[0]

    @property
    def variant(self) -> str | None:
        """The recipe's variant, or None."""
        return self.recipe.partition(":")[2] or None

    @property
    def absolute_path(self) -> str:
        """The absolute path of the recipe's file, for use in another working directory."""
        return str(Path(self.path).absolute())

    @property
    def absolute(self) -> str:
        """The recipe argument with an absolute path."""
        return f"{self.absolute_path}{self.recipe.removeprefix(self.path)}"

    @property
    def sets(self) -> tuple[str, ...]:
        """The assignments as command-line options."""
        return tuple(part for assignment in self.assignments for part in ("--set", assignment))

    @property
    def arguments(self) -> tuple[str, ...]:
        """A worker's options after the recipe, without the run directory."""
        steps = ("--max-steps", str(self.max_steps)) if self.max_steps else ()
        changes = (part for field_name in self.allow_change for part in ("--allow-change", field_name))
        return (*self.sets, "--resume", self.resume, *changes, *steps)

    def script(self, path: str) -> tuple[str, ...]:
        """Returns the arguments with which a launcher's Python runs a worker, without the run directory.

        path: path of the recipe's file on the worker's machine. The file itself is not run as a program, because it may
        lack the lines for that.
        """
        return ("-m", "llmtrain", "train", f"{path}{self.recipe.removeprefix(self.path)}", *self.arguments)

    def cluster(self, written_for: Cluster | None) -> Cluster:
        """Returns the cluster that the options describe: with --nproc, that many workers of this machine.

        Missing options are taken from `written_for` if it is given, otherwise from this machine.
        """
        from llmtrain.recipe.cluster import local_cluster

        if self.nproc:
            return local_cluster(self.nproc)
        return named_cluster(written_for, self.nodes, self.gpus_per_node, self.device)

    def folder(self, declared: Recipe) -> RunDir:
        """Returns the run directory: the one given, or the default for the recipe."""
        from llmtrain.run_dir import RunDir, default_run_dir

        folder = RunDir(self.run_dir) if self.run_dir else default_run_dir(declared, self.variant)
        return replace(folder, allowed=tuple(self.allow_change))
