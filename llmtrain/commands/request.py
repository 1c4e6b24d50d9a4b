"""What the command line of `llmtrain train` says, for whichever launcher does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmtrain.commands.options import named_cluster

if TYPE_CHECKING:
    from llmtrain.cluster import Cluster
    from llmtrain.recipe import Recipe
    from llmtrain.run_dir import RunDir

LauncherName = Literal["local", "torchrun", "accelerate", "deepspeed", "slurm", "kubernetes"]


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """All options, as they were given."""

    recipe: str
    """Path of its file, with `:VARIANT` behind it where one is named."""
    assignments: list[str]
    launcher: LauncherName
    nproc: int | None
    run_dir: Path | None
    resume: str
    max_steps: int | None
    max_restarts: int
    dry_run: bool
    as_json: bool
    nodes: int | None
    gpus_per_node: int | None
    device: str | None
    hostfile: Path | None
    include: str
    exclude: str
    runner: Literal["pdsh", "openmpi"] | None
    slurm: list[str]
    kubernetes: list[str]

    @property
    def path(self) -> str:
        """Of the recipe's file, as it was given."""
        return self.recipe.partition(":")[0]

    @property
    def variant(self) -> str | None:
        """Of the recipe, where one is named."""
        return self.recipe.partition(":")[2] or None

    @property
    def absolute(self) -> str:
        """The recipe, as it is called from another folder."""
        _, colon, variant = self.recipe.partition(":")
        return f"{Path(self.path).absolute()}{colon}{variant}"

    @property
    def sets(self) -> tuple[str, ...]:
        """The assignments as options."""
        return tuple(part for assignment in self.assignments for part in ("--set", assignment))

    @property
    def arguments(self) -> tuple[str, ...]:
        """What a worker is told behind its recipe, but for the run directory."""
        steps = ("--max-steps", str(self.max_steps)) if self.max_steps else ()
        return (*self.sets, "--resume", self.resume, *steps)

    @property
    def script(self) -> tuple[str, ...]:
        """The recipe's file and its arguments, as a worker of a launcher runs it, but for the run directory."""
        named = ("--variant", self.variant) if self.variant else ()
        return (str(Path(self.path).absolute()), *named, *self.arguments)

    def load(self) -> tuple[Recipe, Cluster | None]:
        """The recipe, and the cluster that it names. Raises RecipeError as `load_recipe`."""
        from llmtrain.plan.load import load_recipe

        return load_recipe(self.recipe, self.assignments)

    def cluster(self, written_for: Cluster | None) -> Cluster:
        """What the options name, which fall back on the recipe's own, then on this machine."""
        return named_cluster(written_for, self.nodes, self.gpus_per_node, self.device)

    def folder(self, declared: Recipe) -> RunDir:
        """The run directory: as it was given, or where runs of the recipe lie by default."""
        from llmtrain.run_dir import RunDir, default_run_dir

        return RunDir(self.run_dir) if self.run_dir else default_run_dir(declared, self.variant)
