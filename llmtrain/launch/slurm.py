"""Slurm: a job script for a plan, and its way into the queue; pure."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.site import parse_site
from llmtrain.launch.templating import render_template
from llmtrain.recipe import Part, PositiveInt

RULE = "slurm.option"
LONGEST_WARNING_S = 65535
"""`sbatch --signal` takes no longer time."""


class SlurmOptions(Part):
    """What a site wants to know of a job, and the plan does not say. Given by `--slurm KEY=VALUE`."""

    model_config = ConfigDict(strict=False)

    partition: str | None = None
    """Partition; the site's default unless given."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    time: str = "24:00:00"
    """Time limit, as `sbatch --time` takes it."""
    mem: str | None = None
    """Host memory of each node, as `sbatch --mem` takes it; 0 is all of it."""
    cpus_per_task: PositiveInt | None = None
    """CPU cores of each worker."""
    tasks: PositiveInt | None = None
    """Workers in all, where the nodes have different numbers of devices: Slurm spreads them over `--nodes`."""
    output: str | None = None
    """Log file, in the patterns of `sbatch --output`; default `NAME-JOB.log` in the working folder."""
    warn_s: int = Field(300, ge=1, le=LONGEST_WARNING_S)
    """Seconds ahead of the time limit at which the run saves and goes back into the queue."""
    max_requeues: int = Field(20, ge=0)
    """Times that a job is started again, whatever ended it."""
    container: str | None = None
    """Image that the workers run in; it has llmtrain in it."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """What starts containers: enroot by its Slurm plugin pyxis, or apptainer."""
    mounts: tuple[str, ...] = ()
    """Folders in the container, `HOST:CONTAINER`."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the workers start, such as `module load cuda`."""
    sweep: tuple[str, ...] = ()
    """Recipe assignments, FIELD=VALUE: a job array trains with each of them, in a folder of its own."""
    directives: tuple[str, ...] = ()
    """More options of `sbatch`, such as `--constraint=ib`."""

    @field_validator("*")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not (text and text.isprintable()):
                raise ValueError(f"{text!r} is empty or has a character that no line of a job script can hold")
        return value

    @field_validator("mounts")
    @classmethod
    def _of_a_container(cls, mounts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if mounts and info.data.get("container") is None:
            raise ValueError("are of a container, and none is given")
        return mounts

    @field_validator("directives")
    @classmethod
    def _sbatch_options(cls, directives: tuple[str, ...]) -> tuple[str, ...]:
        for directive in directives:
            if re.match(r"--[a-z]", directive) is None:
                raise ValueError(f"'{directive}' is no option such as --constraint=ib")
        return directives


def parse_options(assignments: Sequence[str]) -> SlurmOptions:
    """The options of `--slurm KEY=VALUE…`. Raises RecipeError naming everything that is wrong with them."""
    return parse_site(SlurmOptions, "--slurm", RULE, assignments)


@dataclass(frozen=True)
class Job:
    """A run of llmtrain as a Slurm job."""

    name: str
    cluster: Cluster
    nodes: int
    """Machines. Where they have different numbers of devices, the cluster counts each device as a node."""
    command: tuple[str, ...]
    """Arguments of `llmtrain train`; without --run-dir where there is a sweep."""
    run_dir: Path
    """Where the run lies; of a sweep, the folder of its runs."""
    folder: Path
    """Working folder."""
    options: SlurmOptions

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        runs = f"{len(self.options.sweep)} runs of " if self.is_array else ""
        devices = f"{self.cluster.world_size} {self.cluster.device} on {self.nodes} nodes"
        return f"{runs}{self.name}, {devices}"

    @property
    def is_array(self) -> bool:
        """Whether it is a job array."""
        return bool(self.options.sweep)


def render_job(job: Job) -> str:
    """The batch script of a job. Raises RecipeError for a path that no line of a script can hold."""
    options = job.options
    return render_template(
        "train.sbatch.j2",
        comment=[job.summary],
        directives=[*_directives(job), *options.directives],
        program=_program(options),
        srun_options=_container(options, job.folder),
        command=shlex.join(job.command),
        array=job.is_array,
        choices=shlex.join(options.sweep),
        run_dir=shlex.quote(str(job.run_dir)),
        setup=options.setup,
        max_requeues=options.max_requeues,
    )


def _directives(job: Job) -> list[str]:
    options = job.options
    pattern = "%x-%A_%a.log" if job.is_array else "%x-%j.log"
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
        "array": f"0-{len(options.sweep) - 1}" if job.is_array else None,
        "signal": f"B:USR1@{options.warn_s}",
    }
    lines = [_directive(name, str(value)) for name, value in given.items() if value is not None]
    # Shared nodes are the exception for GPUs; what else runs there is the site's to say.
    return [*lines, "--open-mode=append", "--requeue"]


def _tasks(options: SlurmOptions, cluster: Cluster) -> dict[str, object]:
    """How many workers, and where: one for each device."""
    gpus = not cluster.spec.on_cpu
    if options.tasks is None:
        per_node = cluster.devices_per_node
        return {"ntasks-per-node": per_node, "gpus-per-node": per_node if gpus else None}
    return {"ntasks": options.tasks, "gpus-per-task": 1 if gpus else None}


def _directive(name: str, value: str) -> str:
    """An option as sbatch reads it from a line of a script. Raises RecipeError where none can hold the value."""
    if not value.isprintable() or not value:
        message = f"{value!r} has a character that no #SBATCH line can hold"
        raise RecipeError(Problem("slurm.text", f"--{name}", message, "name it otherwise, or use a link"))
    if re.fullmatch(r"[\w%+=:,./@-]+", value):
        return f"--{name}={value}"
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'--{name}="{escaped}"'


def _program(options: SlurmOptions) -> str:
    """What starts llmtrain: this interpreter, or the one of the container."""
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


def committed() -> dict[str, str]:
    """The scripts of `slurm/`, by file name: for any recipe, whose arguments they are given."""
    own = ["job-name=llmtrain", "output=%x-%j.log"]
    several = ["nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "time=24:00:00"]
    again = [f"signal=B:USR1@{SlurmOptions().warn_s}", "open-mode=append", "requeue"]
    train: dict[str, Any] = {"command": "", "choices": "", "run_dir": "", "srun_options": "", "setup": ()}
    train |= {"program": "python -m llmtrain", "max_requeues": SlurmOptions().max_requeues}
    one: dict[str, Any] = {"program": "python -m llmtrain", "setup": ()}
    scripts = {
        "train.sbatch": render_template(
            "train.sbatch.j2", comment=TRAIN, directives=_options([*own, *several, *again]), array=False, **train
        ),
        "train_array.sbatch": render_template(
            "train.sbatch.j2",
            comment=TRAIN_ARRAY,
            directives=_options([own[0], "output=%x-%A_%a.log", "array=0-2", *several, *again]),
            array=True,
            **train,
        ),
    }
    for name, comment, shape in (
        ("prepare_data", PREPARE_DATA, ["nodes=1", "ntasks=1", "cpus-per-task=16", "time=12:00:00"]),
        ("verify", VERIFY, ["nodes=1", "ntasks=1", "cpus-per-task=16", "gpus-per-node=8", "time=04:00:00"]),
    ):
        scripts[f"{name}.sbatch"] = render_template(
            "one_node.sbatch.j2",
            comment=comment,
            directives=_options([f"job-name=llmtrain_{name}", own[1], *shape]),
            subcommand=name.removeprefix("prepare_"),
            **one,
        )
    return scripts


TRAIN = (
    "Trains a recipe on the nodes of a Slurm job, one task for each device:",
    "",
    "    sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 slurm/train.sbatch recipes/NAME.py --run-dir runs/NAME",
    "",
    "Ahead of the time limit it saves, goes back into the queue, and continues when it starts again. On CPUs:",
    "--gpus-per-node=0.",
)
TRAIN_ARRAY = (
    "Trains a recipe several times, with another value of a field each, as a job array: seeds, or a sweep.",
    "",
    "    sbatch --array=0-1 slurm/train_array.sbatch runs/seeds train.seed=1 train.seed=2 -- recipes/NAME.py",
    "",
    "Each run lies in RUNS_FOLDER/FIELD=VALUE, and saves, requeues and continues by itself, as train.sbatch does.",
)
PREPARE_DATA = (
    "Tokenizes and packs a recipe's data, so that no GPU waits for it:",
    "",
    "    sbatch slurm/prepare_data.sbatch recipes/NAME.py",
)
VERIFY = (
    "Proves on one node that every plan of a recipe trains what plain PyTorch does:",
    "",
    "    sbatch slurm/verify.sbatch recipes/NAME.py",
)


def _options(words: Iterable[str]) -> list[str]:
    return [f"--{word}" for word in words]


def submit(script: str) -> str:
    """Hands a script to sbatch; the number of the job. Raises RecipeError where it is refused."""
    try:
        result = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        message = "there is no sbatch here"
        fix = "submit it on a login node of the cluster, or print it with --dry-run"
        raise RecipeError(Problem("slurm.missing", "--launcher", message, fix)) from None
    if result.returncode:
        said = result.stderr.strip().replace("sbatch: error: ", "").replace("\n", "; ")
        raise RecipeError(Problem("slurm.refused", "sbatch", said, "look at the script with --dry-run"))
    return result.stdout.strip().partition(";")[0]  # `;CLUSTER` follows where there are several


def following(job: Job, number: str) -> list[str]:
    """How to follow a submitted job, line by line."""
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
