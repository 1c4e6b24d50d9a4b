"""The options of `llmtrain train`, in the form in which every launcher takes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmtrain.commands.plan import named_cluster

if TYPE_CHECKING:
    from llmtrain.cluster import Cluster
    from llmtrain.recipe import Recipe
    from llmtrain.run_dir import RunDir

LauncherName = Literal["local", "torchrun", "accelerate", "deepspeed", "slurm", "kubernetes"]


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """All options, as they were given."""

    recipe: str
    """Path of the recipe's file, followed by `:VARIANT` if one is given."""
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
        """The path of the recipe's file, as it was given."""
        return self.recipe.partition(":")[0]

    @property
    def variant(self) -> str | None:
        """The recipe's variant, or None."""
        return self.recipe.partition(":")[2] or None

    @property
    def absolute(self) -> str:
        """The recipe argument with an absolute path, for use in another working directory."""
        _, colon, variant = self.recipe.partition(":")
        return f"{Path(self.path).absolute()}{colon}{variant}"

    @property
    def sets(self) -> tuple[str, ...]:
        """The assignments as command-line options."""
        return tuple(part for assignment in self.assignments for part in ("--set", assignment))

    @property
    def arguments(self) -> tuple[str, ...]:
        """A worker's options after the recipe, without the run directory."""
        steps = ("--max-steps", str(self.max_steps)) if self.max_steps else ()
        return (*self.sets, "--resume", self.resume, *steps)

    @property
    def script(self) -> tuple[str, ...]:
        """The recipe's file and the options of a worker that a launcher starts, without the run directory."""
        named = ("--variant", self.variant) if self.variant else ()
        return (str(Path(self.path).absolute()), *named, *self.arguments)

    def load(self) -> tuple[Recipe, Cluster | None]:
        """Loads the recipe and the cluster that it names, if any. Raises RecipeError as `load_recipe` does."""
        from llmtrain.plan.load import load_recipe

        return load_recipe(self.recipe, self.assignments)

    def cluster(self, written_for: Cluster | None) -> Cluster:
        """Returns the cluster that the options describe.

        Options that are not given default to `written_for`, then to this machine.
        """
        return named_cluster(written_for, self.nodes, self.gpus_per_node, self.device)

    def folder(self, declared: Recipe) -> RunDir:
        """Returns the run directory: the one given, or the default for the recipe."""
        from llmtrain.run_dir import RunDir, default_run_dir

        return RunDir(self.run_dir) if self.run_dir else default_run_dir(declared, self.variant)
