"""The run directory: the locations of a run's files, and how they are written and read."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from llmtrain.errors import CheckpointError, Problem, RecipeError, UserError, format_value
from llmtrain.plan.plan import KernelChoice, Plan
from llmtrain.recipe import Recipe, TrainedTokenizer
from llmtrain.system.durable import write_atomically
from llmtrain.system.host import available_cores, installed_version
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json, read_text

T = TypeVar("T")
MAX_ID_BYTES = 4096

# A run may be continued with other values of these fields. Every other field affects the model, its optimizer, the
# arithmetic or the order of the samples, so another value defines another run. (If `data.special_tokens` changes
# tokens, the data key differs from the one in the checkpoints.)
MAY_CHANGE = re.compile(
    r"name|code_dir|callbacks(\..*)?|model\.(attention|trust_remote_code)|data\.(cache_dir|special_tokens)"
    r"|batch\.(global|micro)_batch_size|train\.(max_steps|epochs|early_stopping(\..*)?)|parallel\.(backend|accelerate|zero_stage|pipeline|tensor|sequence|sequence_ring|expert)"
    r"|parallel\.(pipeline_schedule|pipeline_chunks|hierarchical_partition)"
    r"|parallel\.(activation_checkpointing|checkpoint_every|offload_activations|tiled_mlp|offload_optimizer|offload_param|nvme_path)"
    r"|kernels\.(blocks|loss|matmul|threads)|(evaluation|samples|tasks|checkpoint|guard|logging|watchdog|profile|export)\..*"
)

# A run may be continued with other values of these fields if its user permits it: the state of the optimizer and the
# tokens stay valid, but the run is no longer the one that its recipe declared at the start.
MAY_CHANGE_IF_ALLOWED = re.compile(
    r"optim\.(lr|betas(\.\d+)?|eps|weight_decay|schedule|warmup_steps|warmup_ratio|decay_steps|min_lr_ratio|clip_grad_norm)"
    r"|data\.sources(\..*)?"
)

PACKAGES = (
    *("llmtrain", "torch", "deepspeed", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors"),
    *("numpy", "pydantic", "tensorboard", "wandb", "mlflow", "horovod"),
)

# Environment variables that explain a run's speed or numbers. Only variables with these names are recorded, and none
# that could be a secret.
VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG|PYTORCH_(CUDA_)?ALLOC_CONF|DS_ACCELERATOR"
    r"|GLIBC_TUNABLES|MALLOC_\w+|LD_PRELOAD|OMP_(NUM_THREADS|WAIT_POLICY)|GOMP_SPINCOUNT|MKL_NUM_THREADS|KMP_AFFINITY|PYTHONHASHSEED"
    r"|NCCL_\w+|GLOO_SOCKET_IFNAME|TORCH_NCCL_\w+"
    r"|HF_HOME|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
    r"|SLURM_(JOB_ID|JOB_NODELIST|NNODES|NTASKS|RESTART_COUNT|CPUS_PER_TASK)|LLMTRAIN_(CACHE|LAUNCHER)"
)
SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


def write_json(path: Path, document: Any) -> None:
    """Replaces a file with a JSON document, atomically. Raises RecipeError if it cannot be written."""
    with _writing(path):
        write_atomically(path, json.dumps(document, indent=2) + "\n")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a RecipeError that names the file which cannot be written."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {error.filename or path}: {error.strerror or error}"
        raise RecipeError(
            Problem("run_dir.write", "--run-dir", message, "free some space, or choose another folder")
        ) from None


def default_run_dir(recipe: Recipe, variant: str | None = None) -> RunDir:
    """Returns `runs/NAME` or `runs/NAME-VARIANT` in the working directory."""
    return RunDir(Path("runs") / (f"{recipe.name}-{variant}" if variant else recipe.name))


class _RunPath:
    """A path in a run directory."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, run: RunDir, _: object = None) -> Path:
        return run.path.joinpath(*self._names)


@dataclass(frozen=True)
class RunDir:
    """Paths of a run directory, and the files that declare the run: recipe, plan, ds_config, environment, launch."""

    path: Path
    allowed: tuple[str, ...] = ()
    """The fields with which the run may be continued with other values, at its user's request."""

    recipe_file = _RunPath("recipe.json")
    """The recipe."""
    plan_file = _RunPath("plan.json")
    """The recipe resolved for its cluster, which a worker reads."""
    ds_config_file = _RunPath("ds_config.json")
    """The plan as DeepSpeed JSON; does not exist if another engine runs the steps."""
    launch_file = _RunPath("launch.json")
    """How the workers were last started."""
    environment_file = _RunPath("environment.json")
    """Versions, machine and commit of the last start."""
    id_file = _RunPath("run_id")
    """The id of the run, which is created once and identifies its checkpoints."""
    history_file = _RunPath("history.json")
    """The values with which the run was trained, by step."""
    metrics_file = _RunPath("metrics.jsonl")
    """One JSON object per logged step or evaluation."""
    events_file = _RunPath("events.jsonl")
    """One JSON object for each start, stop, death, skipped update and rollback."""
    samples_file = _RunPath("samples.jsonl")
    """One JSON object for each text that the model wrote during training."""
    trackers_file = _RunPath("trackers.json")
    """The run's ids in trackers that assign ids; a resumed run continues under the same ids."""
    tensorboard = _RunPath("tensorboard")
    """Event files of TensorBoard."""
    checkpoints = _RunPath("checkpoints")
    """One folder per checkpoint."""
    tokenizer = _RunPath("tokenizer")
    """Copy of the tokenizer, with which a run can be exported without its data."""
    first_batch = _RunPath("first_batch.html")
    """The first batch of a run on conversations, as an HTML page."""
    export = _RunPath("export")
    """The Hugging Face folder of the finished model."""
    report = _RunPath("report.html")
    """The HTML page of the run, written at its end."""
    profile = _RunPath("profile")
    """Profiles of recorded windows of steps."""
    profile_request = _RunPath("profile", "request.json")
    """The `ProfileConfig` by which `llmtrain profile` asks the ranks of a running job to record steps."""
    logs = _RunPath("logs")
    """Output and errors of the workers."""
    eval_log = _RunPath("logs", "eval.log")
    """Output of the processes that computed scores on downstream tasks during the run."""

    def eval_file(self, step: int) -> Path:
        """Scores of a step's checkpoint on downstream tasks."""
        return self.path / "eval" / f"step_{step:08d}.json"

    def log_file(self, rank: int) -> Path:
        """Output of a worker and its libraries."""
        return self.logs / f"rank_{rank}.log"

    def error_file(self, rank: int) -> Path:
        """The `Failure` of a worker, if any."""
        return self.logs / f"rank_{rank}.error.json"

    def keep_failures(self, attempt: int) -> None:
        """Renames the error files of an attempt, because the next attempt would overwrite them; it appends to logs."""
        for file in self.logs.glob("rank_*.error.json"):
            file.rename(file.with_name(f"attempt_{attempt}.{file.name}"))

    def check(self, recipe: Recipe) -> None:
        """Raises the error that `create` would raise for a recipe. Writes nothing."""
        if problems := self._problems(recipe):
            raise RecipeError(problems)

    def create(self, plan: Plan, ds_config: Mapping[str, Any]) -> None:
        """Writes the files that declare the run, to a new folder or to the folder of a run that is continued.

        ds_config: empty if DeepSpeed does not run the steps, in which case no such file is written. Raises RecipeError,
        without changing anything, if the folder has other content or a run that was started with another recipe. In the
        latter case, the error names every relevant field that differs.
        """
        self.check(plan.recipe)
        with _writing(self.path):
            for folder in (self.logs, self.checkpoints, self.tensorboard):
                folder.mkdir(parents=True, exist_ok=True)
            self.write_plan(plan.model_copy(update={"kernels": self._kernels()}))
            if ds_config:
                write_json(self.ds_config_file, dict(ds_config))
            else:
                self.ds_config_file.unlink(missing_ok=True)
            if not self.id_file.exists():
                write_atomically(self.id_file, uuid.uuid4().hex[:12] + "\n")
            self.write_environment()
            # The recipe is written last, because a folder with a recipe counts as a run.
            write_json(self.recipe_file, plan.recipe.model_dump(mode="json"))

    def write_plan(self, plan: Plan) -> None:
        """Replaces the plan of the run with one that includes its kernels."""
        write_json(self.plan_file, plan.model_dump(mode="json"))

    def _kernels(self) -> KernelChoice | None:
        """Returns the kernels that the run has used so far. With others, it would not continue bit for bit."""
        try:
            return self.read_plan().kernels
        except UserError:
            return None

    def read_plan(self) -> Plan:
        """Returns the plan of the run.

        Raises RecipeError if the folder has none, and CheckpointError if it is unreadable.
        """
        return self._read(self.plan_file, lambda file: read_json(file, Plan))

    def read_ds_config(self) -> dict[str, Any]:
        """Returns the DeepSpeed configuration that `create` wrote."""
        if not self.ds_config_file.exists():
            return {}
        return self._read(self.ds_config_file, lambda file: read_json(file, dict[str, Any]))

    def read_id(self) -> str:
        """Returns the id of the run. Raises RecipeError if there is none, and CheckpointError if it is unreadable."""
        return self._read(self.id_file, _identity)

    def read_recipe(self) -> Recipe:
        """Returns the recipe with which the run was last started. Raises the same errors as `read_id`."""
        return self._read(self.recipe_file, lambda file: read_json(file, Recipe))

    def _read(self, file: Path, read: Callable[[Path], T]) -> T:
        try:
            return read(file)
        except FileNotFoundError:
            raise RecipeError(
                Problem("run_dir.missing", str(self.path), f"is not a run: it has no {file.name}")
            ) from None
        except UNREADABLE as error:
            fix = "restore the file, or start a new run with --run-dir"
            problem = Problem("run_dir.damaged", str(file), f"cannot be read: {file_fault(error)}", fix)
        raise CheckpointError(problem)

    def keep_tokenizer(self, folder: Path, chat_template: str | None, stop_ids: list[int]) -> None:
        """Copies a tokenizer to the run directory, with the chat template and the tokens at which generation stops.

        Raises RecipeError if it cannot be written.
        """
        with _writing(self.tokenizer):
            self.tokenizer.mkdir(exist_ok=True)
            for file in folder.iterdir():
                shutil.copyfile(file, self.tokenizer / file.name)  # without permissions, which the umask determines
            if chat_template is not None:
                (self.tokenizer / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
            write_json(self.tokenizer / "generation_config.json", {"eos_token_id": stop_ids})

    def write_first_batch(self, page: str) -> None:
        """Writes the page of the first batch. Raises RecipeError if it cannot be written."""
        with _writing(self.first_batch):
            write_atomically(self.first_batch, page)

    def write_environment(self) -> None:
        """Records versions, machine, commit and the relevant variables of this process."""
        write_json(self.environment_file, environment())

    def write_launch(self, launcher: str, world_size: int, command: list[str]) -> None:
        """Records how the workers were started.

        command: the command line of one worker. It is written to `launch.json`, so it must not contain secrets.
        """
        document = {
            "launcher": launcher,
            "world_size": world_size,
            "command": command,
            "host": socket.gethostname(),
            "folder": str(Path.cwd()),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_json(self.launch_file, document)

    def _problems(self, recipe: Recipe) -> list[Problem]:
        existing = next((path for path in (self.path, *self.path.parents) if path.exists()), None)
        if existing is not None and not existing.is_dir():
            return [Problem("run_dir.folder", "--run-dir", f"{existing} is a file", "choose another folder")]
        if not self.recipe_file.exists():
            return self._foreign_content()
        if not self._started():
            return []  # There is nothing to continue yet, so a corrected recipe may use the folder.
        return forbidden_changes(self.read_recipe(), recipe, f"the run in {self.path}", self.allowed)

    def _foreign_content(self) -> list[Problem]:
        """Returns a problem if a folder without a recipe contains more than an interrupted `create` leaves behind."""
        own_names = {file.name for file in (self.plan_file, self.ds_config_file, self.environment_file, self.id_file)}
        own_names |= {self.logs.name, self.checkpoints.name, self.tensorboard.name}
        entries = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        others = sorted(name for name in entries - own_names if not name.startswith("."))
        if not others:
            return []
        message = f"{self.path} is not empty and contains no run ({others[0]} is in it)"
        return [Problem("run_dir.folder", "--run-dir", message, "choose a new folder, or that of a run")]

    def _started(self) -> bool:
        """Whether training has progressed far enough for something to be continued or lost."""
        logged = self.metrics_file.exists() and self.metrics_file.stat().st_size > 0
        # A first save that was killed leaves only hidden files, which cannot be continued from.
        return logged or any(self.checkpoints.glob("[!.]*"))


def _identity(file: Path) -> str:
    name = read_text(file, MAX_ID_BYTES).strip()
    if not re.fullmatch(r"[\w-]{1,64}", name):
        raise ValueError(f"contains {name[:40]!r}, which is not the id of a run")
    return name


def forbidden_changes(old: Recipe, new: Recipe, what: str, allowed: Sequence[str] = ()) -> list[Problem]:
    """Returns a problem for each change of a recipe that a started run may not have.

    what: describes the run or the file that has the old recipe. allowed: fields, or parts of the recipe, whose change
    the user permits.
    """
    before, now = old.dotted(), new.dotted()
    fields = [field for field in {**now, **before} if before.get(field) != now.get(field)]
    problems = []
    for field in fields:
        reason = _reason_not_changeable(field, new)
        is_permitted = any(field == permitted or field.startswith(f"{permitted}.") for permitted in allowed)
        if _may_change(field, new) or (is_permitted and not reason):
            continue
        fix = "restore the value to continue the run, or start another run with --run-dir"
        if is_permitted:
            fix = f"--allow-change cannot permit this: {reason}; {fix}"
        elif not reason:
            name = "data.sources" if field.startswith("data.sources") else field
            fix += f"; --allow-change {name} continues the run with the new value"
        old_value, new_value = format_value(before.get(field)), format_value(now.get(field))
        if old_value == new_value:  # they differ in the last digits
            old_value, new_value = repr(before.get(field)), repr(now.get(field))
        message = f"{what} was started with {old_value}, but the recipe now has {new_value}"
        problems.append(Problem("run_dir.recipe", field, message, fix))
    return problems


def check_allowed(allowed: Sequence[str]) -> None:
    """Raises RecipeError for fields that `--allow-change` cannot permit to change."""
    problems = []
    for field in allowed:
        if MAY_CHANGE.fullmatch(field):
            message, fix = "may change without this option", "leave it out"
        elif not MAY_CHANGE_IF_ALLOWED.fullmatch(field):
            message, fix = f"cannot be permitted: {OTHER_STATE}", "name a field such as optim.lr or data.sources"
        else:
            continue
        problems.append(Problem("run_dir.allow_change", "--allow-change", f"{format_value(field)} {message}", fix))
    if problems:
        raise RecipeError(problems)


OTHER_STATE = "the state of the run belongs to its value, or is not affected by it"


def _reason_not_changeable(field: str, recipe: Recipe) -> str:
    """Returns why a run cannot be continued with another value of a field; empty if it can."""
    if not MAY_CHANGE_IF_ALLOWED.fullmatch(field):
        return OTHER_STATE
    if field.startswith("data.") and isinstance(recipe.data.tokenizer, TrainedTokenizer):
        return "the tokenizer is trained on the sources, so the tokens would have other meanings"
    if field.startswith("data.") and recipe.train.epochs is not None:
        return "with train.epochs, the number of steps depends on the sources"
    return ""


def _may_change(field: str, recipe: Recipe) -> bool:
    """Whether a run may be continued with another value of a field.

    With epochs, the batch size may not change, because it determines the number of steps.
    """
    return MAY_CHANGE.fullmatch(field) is not None and not (
        field == "batch.global_batch_size" and recipe.train.epochs is not None
    )


def check_unchanged(old: Recipe, new: Recipe, what: str) -> None:
    """Raises RecipeError with all problems of `forbidden_changes`."""
    if problems := forbidden_changes(old, new, what):
        raise RecipeError(problems)


def identity_of(recipe: Recipe) -> str:
    """Returns a digest of all fields that may not change within a run.

    It leaves out fields with their default value, so that it stays the same if a later version adds fields.
    """
    fields = {
        name: value for name, value in recipe.dotted(exclude_defaults=True).items() if not MAY_CHANGE.fullmatch(name)
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def environment(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the environment of a run: versions, machine, commit and the relevant variables."""
    env = os.environ if env is None else env
    return {
        "packages": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": available_cores(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": _git(),
        "variables": {
            name: value for name, value in sorted(env.items()) if VARIABLES.fullmatch(name) and not SECRET.search(name)
        },
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of installed packages; by default, of those that can affect a run's numbers."""
    found = {package: installed_version(package) for package in packages}
    return {package: version for package, version in found.items() if version is not None}


def _git() -> dict[str, Any] | None:
    """Returns the commit of the working directory and whether tracked files are modified; None outside a repository."""
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    # Without this option, a killed run could leave a lock in the user's repository.
    git = ("git", "--no-optional-locks")
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, timeout=20, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "modified": bool(changes)}
