"""Slurm: renders the job script of a plan and submits it.

The properties of a cluster are given as `--slurm KEY=VALUE`, or as `--kubernetes KEY=VALUE` for Kubernetes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from llmtrain.errors import Problem, RecipeError, did_you_mean, format_value
from llmtrain.launch.jobs import render_template
from llmtrain.recipe import Part, PositiveInt
from llmtrain.recipe.cluster import Cluster

P = TypeVar("P", bound=Part)


def parse_job_options(kind: type[P], launcher: str, assignments: Sequence[str]) -> P:
    """Parses the assignments KEY=VALUE of a launcher's option; a key with several values is given once for each.

    kind: has a field for each key. Raises RecipeError with everything that is wrong with them.
    """
    option, rule = f"--{launcher}", f"{launcher}.option"
    fields = kind.model_fields
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if key not in fields:
            known = f"known: {', '.join(fields)}"
            name = key or format_value(assignment)
            problems.append(Problem(rule, f"{option} {name}", f"is unknown{did_you_mean(key, fields)}", known))
        elif not equals:
            problems.append(Problem(rule, f"{option} {key}", "has no value", f"{option} {key}=VALUE"))
        elif get_origin(fields[key].annotation) is tuple:
            values[key] = (*values.get(key, ()), value)
        elif key in values:
            problems.append(Problem(rule, f"{option} {key}", f"is given twice: {values[key]} and {value}"))
        else:
            values[key] = value
    try:
        options = kind(**values)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            field = " ".join([option, *map(str, fault["loc"][:1])])
            missing = fault["type"] == "missing"
            message = "is required" if missing else str(fault["msg"]).removeprefix("Value error, ")
            problems.append(Problem(rule, field, message, f"{field}=VALUE" if missing else ""))
    if problems:
        raise RecipeError(problems)
    return options


MAX_WARNING_S = 65535
"""The longest time that `sbatch --signal` accepts, in seconds."""


class SlurmOptions(Part):
    """Options of a job that are not part of the plan. Given by `--slurm KEY=VALUE`."""

    model_config = ConfigDict(strict=False)

    partition: str | None = None
    """Partition; default: that of the cluster."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    time: str = "24:00:00"
    """Time limit, in the format of `sbatch --time`."""
    mem: str | None = None
    """Host memory of each node, in the format of `sbatch --mem`; 0 is all of it."""
    cpus_per_task: PositiveInt | None = None
    """CPU cores of each worker."""
    tasks: PositiveInt | None = None
    """Total number of workers, if nodes have different numbers of devices: Slurm spreads them over `--nodes`."""
    output: str | None = None
    """Log file, with the patterns of `sbatch --output`; default: `NAME-JOB.log` in the working directory."""
    warn_s: int = Field(300, ge=1, le=MAX_WARNING_S)
    """Seconds before the time limit at which the run saves and is requeued."""
    max_requeues: int = Field(20, ge=0)
    """Largest number of times that a job is requeued."""
    container: str | None = None
    """Container image for the workers, with llmtrain in it."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """The program that starts containers: enroot with its Slurm plugin pyxis, or apptainer."""
    mounts: tuple[str, ...] = ()
    """Folders to mount in the container, `HOST:CONTAINER`."""
    setup: tuple[str, ...] = ()
    """Shell lines to run before the workers start, such as `module load cuda`."""
    sweep: tuple[str, ...] = ()
    """Recipe assignments, FIELD=VALUE: a job array trains with each of them, in a separate folder."""
    directives: tuple[str, ...] = ()
    """Further options of `sbatch`, such as `--constraint=ib`."""

    @field_validator("*")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not (text and text.isprintable()):
                raise ValueError(f"{text!r} is empty or has a character that a line of a job script cannot contain")
        return value

    @field_validator("mounts")
    @classmethod
    def _of_a_container(cls, mounts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if mounts and info.data.get("container") is None:
            raise ValueError("need a container, but none is given")
        return mounts

    @field_validator("directives")
    @classmethod
    def _sbatch_options(cls, directives: tuple[str, ...]) -> tuple[str, ...]:
        for directive in directives:
            if re.match(r"--[a-z]", directive) is None:
                raise ValueError(f"'{directive}' is not an option such as --constraint=ib")
        return directives


@dataclass(frozen=True)
class SlurmJob:
    """A run of llmtrain as a Slurm job."""

    name: str
    cluster: Cluster
    nodes: int
    """Number of machines. If they have different numbers of devices, the cluster counts each device as a node."""
    command: tuple[str, ...]
    """Arguments of `llmtrain train`, without --run-dir for a sweep."""
    run_dir: Path
    """The run directory; for a sweep, the folder of its run directories."""
    folder: Path
    """Working directory."""
    options: SlurmOptions

    @property
    def summary(self) -> str:
        """A description in one line."""
        runs = f"{len(self.options.sweep)} runs of " if self.options.sweep else ""
        devices = f"{self.cluster.world_size} {self.cluster.device} on {self.nodes} nodes"
        return f"{runs}{self.name}, {devices}"


def render_job(job: SlurmJob) -> str:
    """Renders the batch script of a job. Raises RecipeError for a path that a line of a script cannot contain."""
    options = job.options
    return render_template(
        "train.sbatch.j2",
        comment=[job.summary],
        directives=[*_directives(job), *options.directives],
        program=_program(options),
        srun_options=_container(options, job.folder),
        command=shlex.join(job.command),
        array=bool(options.sweep),
        choices=shlex.join(options.sweep),
        run_dir=shlex.quote(str(job.run_dir)),
        setup=options.setup,
        max_requeues=options.max_requeues,
    )


def _directives(job: SlurmJob) -> list[str]:
    options = job.options
    pattern = "%x-%A_%a.log" if options.sweep else "%x-%j.log"
    given = {
        "job-name": job.name,
        "chdir": str(job.folder),
        "output": options.output or pattern,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "nodes": job.nodes,
        **_tasks(options, job.cluster),
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "array": f"0-{len(options.sweep) - 1}" if options.sweep else None,
        "signal": f"B:USR1@{options.warn_s}",
    }
    lines = [_directive(name, str(value)) for name, value in given.items() if value is not None]
    # No --exclusive: whether GPU nodes are shared is for the cluster's administrators to decide.
    return [*lines, "--open-mode=append", "--requeue"]


def _tasks(options: SlurmOptions, cluster: Cluster) -> dict[str, object]:
    """Returns the options for the number of workers and their placement: one for each device."""
    gpus = not cluster.spec.on_cpu
    if options.tasks is None:
        per_node = cluster.devices_per_node
        return {"ntasks-per-node": per_node, "gpus-per-node": per_node if gpus else None}
    return {"ntasks": options.tasks, "gpus-per-task": 1 if gpus else None}


def _directive(name: str, value: str) -> str:
    """Returns an option as a line of a batch script. Raises RecipeError if a line cannot contain the value."""
    if not value.isprintable() or not value:
        message = f"{value!r} has a character that an #SBATCH line cannot contain"
        raise RecipeError(Problem("slurm.text", f"--{name}", message, "rename it, or use a link"))
    if re.fullmatch(r"[\w%+=:,./@-]+", value):
        return f"--{name}={value}"
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'--{name}="{escaped}"'


def _program(options: SlurmOptions) -> str:
    """Returns the command of llmtrain: this Python, or the one of the container."""
    if options.container is None:
        return shlex.join([sys.executable, "-m", "llmtrain"])
    if options.runtime == "pyxis":
        return "python -m llmtrain"
    binds = [part for mount in options.mounts for part in ("--bind", mount)]
    return shlex.join(["apptainer", "exec", "--nv", *binds, options.container, "python", "-m", "llmtrain"])


def _container(options: SlurmOptions, folder: Path) -> str:
    if options.container is None or options.runtime != "pyxis":
        return ""
    words = [f"--container-image={options.container}", f"--container-workdir={folder}"]
    words += [f"--container-mounts={','.join(options.mounts)}"] if options.mounts else []
    return " " + shlex.join(words)


def submit(script: str) -> str:
    """Submits a script with sbatch and returns the job id. Raises RecipeError if it is refused."""
    try:
        result = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        message = "sbatch is not installed on this machine"
        fix = "submit it on a login node of the cluster, or print it with --dry-run"
        raise RecipeError(Problem("slurm.missing", "--launcher", message, fix)) from None
    if result.returncode:
        reason = result.stderr.strip().replace("sbatch: error: ", "").replace("\n", "; ")
        raise RecipeError(Problem("slurm.refused", "sbatch", reason, "print the script with --dry-run"))
    return result.stdout.strip().partition(";")[0]  # `;CLUSTER` follows if there are several clusters


def monitoring_lines(job: SlurmJob, number: str) -> list[str]:
    """Returns lines that show how to follow a submitted job."""
    known = {"%x": job.name, "%j": number, "%A": number, "%a": "*"}
    log = next(line.partition("=")[2].strip('"') for line in _directives(job) if line.startswith("--output="))
    for pattern, text in known.items():
        log = log.replace(pattern, text)
    return [
        f"job {number}: {job.summary}",
        f"log            {job.folder / log}",
        f"state          squeue --job {number}",
        f"save, requeue  scancel --batch --signal=USR1 {number}",
        f"save, end      scancel {number}",
    ]
