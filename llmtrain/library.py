"""The functions of `import llmtrain`. The commands call them as well.

They raise `UserError`, and load other modules only when they are called. A recipe is an object or, as on the command
line, a file: `mine.py`, `mine.yaml:variant`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import Exit, Problem, RecipeError, StoppedError, UserError, format_value, reason
from llmtrain.system.host import MAX_WORKERS

if TYPE_CHECKING:
    from llmtrain.launch import Launcher
    from llmtrain.plan import Plan
    from llmtrain.plan.predict import PlanMemory
    from llmtrain.plan.predict.time import StepTime
    from llmtrain.recipe import Recipe
    from llmtrain.recipe.cluster import Cluster
    from llmtrain.report import RunData
    from llmtrain.train.own_loop import TrainingData, TrainingEngine
    from llmtrain.trials.verify import Certificate
    from llmtrain_lint import Reader, Result


@dataclass(frozen=True)
class Planned:
    """A legal plan with its predictions and its configuration. Its text is the output of `llmtrain plan`.

    memory: None for a model that is not a chain of layers.
    """

    plan: Plan
    memory: PlanMemory | None

    @cached_property
    def time(self) -> StepTime | None:
        """The predicted time of a step; None for devices of unknown speed."""
        from llmtrain.plan.predict.time import predict

        return predict(self.plan)

    @cached_property
    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration; empty for a plan without DeepSpeed."""
        from llmtrain.plan.ds_config import render

        return render(self.plan)

    def document(self) -> dict[str, Any]:
        """Returns what `llmtrain plan --json` prints."""
        known = {"memory": self.memory and self.memory.summary(), "time": self.time and self.time.model_dump()}
        return {**self.plan.summary(), **known, "ds_config": self.ds_config or None}

    def lines(self) -> Iterator[str]:
        """Yields readable lines: model, layout, memory, predicted time and notes."""
        from llmtrain.plan.predict.time import describe

        yield from describe(self.plan, self.memory, self.time)

    def __str__(self) -> str:
        return "\n".join(self.lines())


@contextmanager
def _naming_lines() -> Iterator[None]:
    """Adds the line numbers of a YAML recipe to an error raised within the context."""
    try:
        yield
    except UserError as error:
        from llmtrain.plan.load import with_lines

        raise with_lines(error) from None


@_naming_lines()
def plan(recipe: Recipe | str | PathLike[str], cluster: Cluster | None = None, *, trace: bool = False) -> Planned:
    """Resolves a recipe for a cluster, and predicts its memory and the time of a step.

    cluster: by default the one that the recipe's file describes, or else this machine. trace: whether to trace the
    model to measure what each layer saves for the backward pass; this loads torch. Raises RecipeError with all faults
    and the nearest legal plans.
    """
    from llmtrain.plan.load import declared
    from llmtrain.plan.predict import memory_of
    from llmtrain.plan.rules import resolve
    from llmtrain.plan.search.cheapest import suggesting
    from llmtrain.recipe.cluster import local_cluster
    from llmtrain.train.start import check_stages

    wanted, written_for = declared(recipe)
    cluster = cluster or written_for or local_cluster()
    with suggesting(wanted, cluster):
        resolved = resolve(wanted, cluster)
    if resolved.model.source != "arithmetic":  # otherwise a process that may load torch makes this check
        check_stages(resolved)
    traced = None
    if trace:
        from llmtrain.models.activation_bytes import traced_layers

        traced = traced_layers(resolved)
    return Planned(resolved, memory_of(resolved, traced))


@_naming_lines()
def train(
    recipe: Recipe | str | PathLike[str],
    *,
    nproc: int | None = None,
    run_dir: str | PathLike[str] | None = None,
    resume: str | PathLike[str] = "auto",
    max_steps: int | None = None,
    max_restarts: int = 0,
    allow_change: Sequence[str] = (),
) -> RunData:
    """Trains a recipe on this machine in separate processes, and returns the run.

    nproc: number of workers; by default one per GPU, or one on a CPU. run_dir: by default `runs/NAME`. resume: `auto`
    continues from the newest checkpoint, `never` starts anew, and a folder is the checkpoint to continue from.
    max_steps: step after which to stop. max_restarts: how many times a job that died is restarted. allow_change:
    fields that may have other values than at the start of the run, such as `optim.lr`. Call this function in the main
    thread: on a signal, the run saves and stops, and StoppedError is raised. Raises other UserErrors for
    recipes that cannot be started and for workers that died.
    """
    from llmtrain.launch import discover
    from llmtrain.plan.load import declared
    from llmtrain.run_dir import RunDir, check_allowed, default_run_dir
    from llmtrain.train.start import LocalStart

    _check_call("train", nproc=nproc, max_steps=max_steps, max_restarts=max_restarts)
    check_allowed(allow_change)
    if rank := discover(os.environ, sys.argv):
        message = f"starts workers, but {rank.launcher} has started this process as a worker"
        raise RecipeError(Problem("library.worker", "llmtrain.train", message, f"{rank.launcher} mine.py"))
    wanted, _ = declared(recipe)
    folder = RunDir(Path(run_dir)) if run_dir else default_run_dir(wanted, variant_of(recipe))
    start = LocalStart(
        load=lambda: (wanted, replace(folder, allowed=tuple(allow_change))),
        nproc=nproc,
        resume=os.fspath(resume),
        max_steps=max_steps,
        max_restarts=max_restarts,
    )
    if (code := start.train()) != Exit.DONE:
        raise StoppedError(code, folder.path)
    return load_run(folder.path)


@_naming_lines()
def prepare(
    recipe: Recipe | str | PathLike[str],
    *,
    model: Callable[..., Any] | str | None = None,
    run_dir: str | PathLike[str] | None = None,
    resume: str | PathLike[str] = "auto",
    allow_change: Sequence[str] = (),
    launcher: Launcher | None = None,
) -> tuple[TrainingEngine, TrainingData]:
    """Sets up a recipe for a training loop of your own, on each rank; returns its engine and its data.

    For a program that torchrun, deepspeed, accelerate, mpirun or srun starts on every rank; without a launcher, it is
    the only one. model: a function or class that builds a model of your own from the fields of `model.config`, in place
    of the one that the recipe names. launcher: a `llmtrain.launch.Launcher` of your own, which may have started the
    program. Other arguments as for `train`. Iterating over the data yields this rank's part of
    each global batch; `TrainingEngine` trains on it. Call it in the main thread, and under
    `if __name__ == "__main__":` if the file also defines code that the recipe names. From then on, an error ends the
    program with the exit code of `llmtrain train`, and a user's error prints no traceback.
    """
    from llmtrain.launch import discover
    from llmtrain.launch.discovery.rank import Rank
    from llmtrain.plan.facts.helper_process import is_helper
    from llmtrain.plan.load import declared, is_running
    from llmtrain.recipe.own_code import share_program
    from llmtrain.run_dir import RunDir, check_allowed, default_run_dir
    from llmtrain.system.streams import quiet_libraries

    _check_call("prepare")
    if is_helper() or is_running():
        message, fix = "is called while its file is imported for what it defines", 'if __name__ == "__main__":'
        raise RecipeError(Problem("loop.main", "llmtrain.prepare", message, fix))
    rank = discover(os.environ, sys.argv, launcher) or Rank.alone()
    with quiet_libraries():
        from llmtrain.train.own_loop import end_on_error, prepare_loop

    end_on_error(rank)
    check_allowed(allow_change)
    wanted, _ = declared(recipe)
    if model is not None:
        wanted, _ = declared(wanted.with_(**{"model.architecture": None, "model.build": _path_of_model(model)}))
    share_program()
    folder = RunDir(Path(run_dir)) if run_dir else default_run_dir(wanted, variant_of(recipe))
    return prepare_loop(wanted, rank, replace(folder, allowed=tuple(allow_change)), os.fspath(resume))


def _path_of_model(model: Callable[..., Any] | str) -> str:
    """Returns the import path of a function or class that builds a model. Raises RecipeError for anything else."""
    from llmtrain.recipe.own_code import import_path

    try:
        return import_path(model)
    except ValueError as error:
        fix = "pass the function or class that builds it: each rank builds its part, and the plan tries tiny copies"
        raise RecipeError(Problem("loop.model", "llmtrain.prepare: model", str(error), fix)) from None


@_naming_lines()
def verify(
    recipe: Recipe | str | PathLike[str],
    *,
    nproc: int | None = None,
    plans: str = "all",
    steps: int = 10,
    run_dir: str | PathLike[str] | None = None,
) -> Certificate:
    """Trains every plan on this machine, and compares each with a plain PyTorch loop.

    recipe: for a file without a named variant, its variant `verify` is used if it exists. nproc: largest number of
    workers. plans: `all`, or names and patterns separated by commas. steps: optimizer steps of each run. run_dir: by
    default `runs/NAME-verify`. `Certificate.deviating` lists the plans that differ. Call this function in the main
    thread.
    """
    from llmtrain.data import Progress, prepare
    from llmtrain.overrides import untried_versions
    from llmtrain.plan.load import declared
    from llmtrain.plan.search.enumerate import enumerate_plans
    from llmtrain.recipe.cluster import local_cluster
    from llmtrain.run_dir import RunDir, default_run_dir
    from llmtrain.system.stops import say
    from llmtrain.system.streams import plain_console
    from llmtrain.train.start import without_unsplittable
    from llmtrain.trials.verify import certify
    from llmtrain.trials.verify.job import choose_plans, comparable

    _check_call("verify", nproc=nproc, steps=steps)
    wanted = comparable(declared(recipe, "verify")[0], steps)
    cluster = local_cluster(nproc)
    runnable, refused = enumerate_plans(wanted, cluster.world_size, cluster.device)
    chosen, refused = without_unsplittable(choose_plans(runnable, refused, plans), refused)
    if chosen:  # the reference has the kind of attention that the plans chose for the family
        wanted = wanted.with_(**{"model.attention": chosen[0].plan.recipe.model.attention})
    for line in untried_versions():
        say(f"warning: {line}")
    prepare(wanted, Progress(plain_console(stderr=True)))
    folder = RunDir(Path(run_dir)) if run_dir else default_run_dir(wanted, "verify")
    return certify.verify(wanted, chosen, refused, steps, folder)


@contextmanager
def lint_errors() -> Iterator[None]:
    """Makes an error of the linter within the context a RecipeError."""
    from llmtrain_lint import UsageError

    try:
        yield
    except UsageError as error:
        raise RecipeError(Problem(*problem) for problem in error.problems) from None


@lint_errors()
def lint(
    configuration: str | PathLike[str] | Mapping[str, Any],
    *,
    reader: Reader | None = None,
    world_size: int | None = None,
    data_parallel: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    deepspeed: str | None = None,
    allow: Collection[str] = (),
) -> Result:
    """Finds settings of a DeepSpeed configuration that are refused, ignored, changed or misread.

    configuration: a file, or its content as a dictionary. reader: the program that reads it; guessed by default.
    world_size, data_parallel: the numbers of ranks for which the batch sizes are checked. arguments: the Trainer's
    arguments to compare with. deepspeed: a version or a range; by default the installed version. allow: rules, or
    `rule:key`, that are not reported. An unreadable file is also a finding. Raises RecipeError for wrong arguments.
    """
    from llmtrain_lint import Use, examine, parse_allowed

    use = Use(reader, world_size, data_parallel, dict(arguments or {}), deepspeed)
    if not isinstance(configuration, Mapping):
        return examine(os.fspath(configuration), Path(configuration), use, parse_allowed(allow, "allow"))
    try:
        text = json.dumps(configuration, indent=2)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(Problem("lint.json", "configuration", f"is not JSON: {reason(error)}")) from None
    return examine("", text, use, parse_allowed(allow, "allow"))


def load_run(path: str | PathLike[str]) -> RunData:
    """Reads a run directory: recipe, plan, metrics, events and checkpoints. The run may still be active.

    Raises RecipeError if the folder holds no run. Unreadable files are left out and listed in `problems`.
    """
    from llmtrain.report import read_run as read

    return read(Path(path))


def variant_of(recipe: Recipe | str | PathLike[str]) -> str | None:
    """Returns the variant that the name of a recipe's file ends with, or None."""
    return None if not isinstance(recipe, str | PathLike) else os.fspath(recipe).partition(":")[2] or None


def _check_call(function: str, **numbers: int | None) -> None:
    """Refuses numbers that the command line refuses, too, and calls in other threads."""
    problems = []
    for name, value in numbers.items():
        minimum, maximum = int(name != "max_restarts"), MAX_WORKERS if name == "nproc" else math.inf
        if value is not None and not (type(value) is int and minimum <= value <= maximum):
            limits = f"of at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum:,}"
            message = f"must be an integer {limits}, not {format_value(value)}"
            problems.append(Problem("library.number", name, message))
    if problems:
        raise RecipeError(problems)
    if threading.current_thread() is not threading.main_thread():
        message = "was called in another thread, which cannot receive the signals that stop a run"
        raise RecipeError(Problem("library.thread", f"llmtrain.{function}", message, "call it in the main thread"))
