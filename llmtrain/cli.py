"""The command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmtrain.checkpoint.commands import app as checkpoint_app
from llmtrain.checkpoint.commands import one_checkpoint
from llmtrain.errors import CheckpointError, Exit, Problem, RecipeError, UserError, nearest

if TYPE_CHECKING:
    from llmtrain.cluster import Cluster
    from llmtrain.plan import Plan
    from llmtrain.plan.memory import PlanMemory
    from llmtrain.recipe import Recipe
    from llmtrain.run_dir import RunDir

app = typer.Typer(
    help="Train language models with DeepSpeed: one recipe, every strategy, the same training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoint_app, name="checkpoint")

MOST_WORKERS = 1024
"""Of one machine."""
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE[:VARIANT]", help="Recipe file, recipes/NAME.py.")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a field, as in optim.lr=3e-4. May be given again."),
]
NodesOption = Annotated[int | None, typer.Option(help="Machines; default those the recipe names.", min=1)]
PerNodeOption = Annotated[int | None, typer.Option(help="Devices on each.", min=1)]
DeviceOption = Annotated[str | None, typer.Option(help="a100, h100, h200, b200, mi300x, cpu, or the recipe's own.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; a user's mistake becomes a message and an exit code."""
    try:
        app(arguments)
    except UserError as error:
        print(error.report(), file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (`llmtrain plan ... | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.DONE)


@app.command()
def train(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    nproc: Annotated[
        int | None, typer.Option(help="Workers; default all GPUs, else one.", min=1, max=MOST_WORKERS)
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default runs/NAME[-VARIANT].")] = None,
    resume: Annotated[str, typer.Option(help="auto: from the newest checkpoint; never; or its folder.")] = "auto",
    max_steps: Annotated[int | None, typer.Option(help="Stop and save after this step.", min=1)] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Start nothing of it: run the plan made small, here, on CPUs, and report; of a job print the script.",
        ),
    ] = False,
    nodes: NodesOption = None,
    gpus_per_node: PerNodeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    launcher: Annotated[Literal["local", "slurm"], typer.Option(help="slurm: submit a job.")] = "local",
    slurm: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="slurm: time=24:00:00, partition, ... May be given again."),
    ] = [],  # noqa: B006  (typer copies it)
) -> None:
    """Train a recipe on this machine, as one worker of the launcher that started this process, or as a job.

    --nodes, --gpus-per-node and --device are those of a job or a dry run, which is of the recipe's own cluster by
    default; with --nproc a dry run is of so many workers on this machine.
    """
    if launcher == "slurm":
        _check_job(nproc, as_json)
        arguments = _job_arguments(recipe, assignments, resume, max_steps)
        _enqueue(
            recipe, assignments, _JobRequest(nodes, gpus_per_node, device, slurm, dry_run), run_dir, resume, arguments
        )
        return
    if slurm:
        message = "describes a job, and none is asked for"
        raise RecipeError(Problem("launch.options", "--slurm", message, "--launcher slurm"))
    from llmtrain.cluster import Cluster, local_cluster
    from llmtrain.ds_config import render
    from llmtrain.launch import accelerate_processes, discover
    from llmtrain.plan.load import load_recipe
    from llmtrain.run_dir import RunDir, default_run_dir

    rank = discover(os.environ, sys.argv)
    _check_dry_run(dry_run, rank is not None, nproc, nodes, gpus_per_node, device, as_json)
    if dry_run:
        _dry_run(recipe, assignments, nproc, (nodes, gpus_per_node, device), run_dir, as_json)
        return
    declared, _ = load_recipe(recipe, assignments)
    cluster = local_cluster(nproc or accelerate_processes())
    if rank is not None:
        nodes, per_node = rank.shape
        cluster = Cluster(nodes=nodes, devices_per_node=per_node, device=cluster.device)
    folder = RunDir(run_dir) if run_dir else default_run_dir(declared, recipe.partition(":")[2] or None)
    try:
        plan = _runnable(declared, cluster, folder, resume, rank.world_size if rank else None)
    except UserError as error:
        if rank is not None and not rank.is_main:
            sys.exit(error.exit_code)  # rank 0 says it
        raise
    ds_config = render(plan)
    if rank is None:
        sys.exit(_launch(plan, ds_config, folder, resume, max_steps))
    from llmtrain.worker import work

    if rank.is_main:
        folder.create(plan, ds_config)
        folder.write_launch(rank.launcher, rank.world_size, sys.argv)
    work(rank, folder, plan, ds_config, resume, max_steps)


def _runnable(declared: Any, cluster: Cluster, folder: RunDir, resume: str, workers: int | None) -> Plan:
    """The plan, after everything that can be known before a worker starts; `workers` where a launcher started some."""
    from llmtrain.metrics.trackers import check_trackers
    from llmtrain.precheck import runnable_plan

    plan = runnable_plan(declared, cluster, workers)
    check_trackers(declared)
    folder.check(declared)
    if resume == "never" and any(folder.checkpoints.glob("step_*")):
        raise RecipeError(
            Problem(
                "resume.never",
                "--resume",
                f"{folder.path} holds checkpoints, which a new run would replace",
                "name another --run-dir, or continue with --resume auto",
            )
        )
    if resume not in ("auto", "never"):
        _check_named(Path(resume), folder)
    return plan


def _check_named(checkpoint: Path, folder: RunDir) -> None:
    """Refuses what is no checkpoint, and one of another run where that would replace checkpoints of this one."""
    from llmtrain.checkpoint.manifest import manifest_files

    if not manifest_files(checkpoint):
        raise CheckpointError(Problem("resume.path", "--resume", f"{checkpoint} is no checkpoint folder"))
    is_own = checkpoint.resolve().parent == folder.checkpoints.resolve()
    if not is_own and any(folder.checkpoints.glob("step_*")):
        message = f"{checkpoint} is of another run, and {folder.path} has checkpoints of its own"
        raise CheckpointError(Problem("resume.path", "--resume", message, "name another --run-dir"))


def _launch(plan: Plan, ds_config: dict[str, Any], folder: RunDir, resume: str, max_steps: int | None) -> int:
    """Tries the cut of a pipeline and prepares the data here, then trains with one worker per device."""
    from rich.console import Console

    from llmtrain.checkpoint.before import check_data, check_resume
    from llmtrain.data import Progress, Schedule, prepare, report
    from llmtrain.launch import run_workers
    from llmtrain.plan.memory import memory_of
    from llmtrain.precheck import check_stages

    console = Console()
    _print_plan(plan, console, memory_of(plan))
    if resume == "auto" and _is_finished(plan, folder):
        console.print(f"{folder.path} is finished: {plan.recipe.train.max_steps:,} steps", highlight=False)
        return Exit.DONE
    checkpoint = check_resume(plan, folder, resume, is_local=True)
    check_stages(plan)
    prepared = prepare(plan.recipe, Progress(console))
    console.print(report(prepared))
    if checkpoint:
        check_data(checkpoint, prepared.key)
    Schedule.of(plan, prepared, dp_rank=0)  # says what is too short for a batch, before anything is started
    folder.create(plan, ds_config)
    command = [sys.executable, "-m", "llmtrain.worker", str(folder.path), "--resume", resume]
    if max_steps:
        command += ["--max-steps", str(max_steps)]
    console.print(f"run directory {folder.path}", highlight=False, soft_wrap=True)
    return run_workers(command, plan.workers, folder)


@dataclass(frozen=True)
class _JobRequest:
    """What the command line says of a job."""

    nodes: int | None
    per_node: int | None
    device: str | None
    options: list[str]
    dry_run: bool


def _check_job(nproc: int | None, as_json: bool) -> None:
    """Raises RecipeError for options that are not a job's."""
    fixes = {"--nproc": (nproc, "--gpus-per-node"), "--json": (as_json, "leave it out")}
    problems = [
        Problem("launch.options", name, "was given, but is no option of a job", fix)
        for name, (value, fix) in fixes.items()
        if value
    ]
    if problems:
        raise RecipeError(problems)


def _job_arguments(recipe: str, assignments: list[str], resume: str, max_steps: int | None) -> tuple[str, ...]:
    """`llmtrain train` as the workers of a job call it, but for the run directory."""
    path, colon, variant = recipe.partition(":")
    sets = (part for assignment in assignments for part in ("--set", assignment))
    steps = ("--max-steps", str(max_steps)) if max_steps else ()
    return (f"{Path(path).absolute()}{colon}{variant}", *sets, "--resume", resume, *steps)


def _enqueue(
    recipe: str,
    assignments: list[str],
    request: _JobRequest,
    run_dir: Path | None,
    resume: str,
    arguments: tuple[str, ...],
) -> None:
    """Checks everything that can be known before a job starts, then prints its script or submits it."""
    from rich.console import Console

    from llmtrain.checkpoint.before import check_resume
    from llmtrain.cluster import Cluster
    from llmtrain.launch.slurm import Job, following, parse_options, render_job, submit
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.memory import memory_of
    from llmtrain.run_dir import RunDir, default_run_dir

    options = parse_options(request.options)
    declared, written_for = load_recipe(recipe, assignments)
    cluster = _cluster(written_for, request.nodes, request.per_node, request.device)
    machines = cluster.nodes
    if options.tasks:
        cluster = Cluster(nodes=options.tasks, device=cluster.device)
    folder = RunDir(run_dir) if run_dir else default_run_dir(declared, recipe.partition(":")[2] or None)
    path = folder.path.absolute()
    for choice in options.sweep:
        varied, _ = load_recipe(recipe, [*assignments, choice])
        _runnable(varied, cluster, RunDir(path / choice.replace("/", "_")), resume, cluster.world_size)
    if not options.sweep:
        arguments = (*arguments, "--run-dir", str(path))
        plan = _runnable(declared, cluster, folder, resume, cluster.world_size)
        check_resume(plan, folder, resume, is_local=False)
        _print_plan(plan, Console(stderr=True), memory_of(plan))
    job = Job(declared.name, cluster, machines, arguments, path, Path.cwd(), options)
    script = render_job(job)
    print(script if request.dry_run else "\n".join(following(job, submit(script))), end="" if request.dry_run else "\n")


def _check_dry_run(dry_run: bool, is_worker: bool, nproc: int | None, *cluster: int | str | bool | None) -> None:
    """Raises RecipeError for options of a dry run without one, and for those that exclude each other."""
    nodes, per_node, device, as_json = cluster
    given = {"--nodes": nodes, "--gpus-per-node": per_node, "--device": device, "--json": as_json}
    named = [name for name, value in given.items() if value]
    problems = []
    if named and not dry_run:
        message = "is given without --dry-run: a run takes its devices from this machine, or from its launcher"
        fix = "add --dry-run or --launcher slurm, or leave it out"
        problems += [Problem("train.dry_run", name, message, fix) for name in named]
    if dry_run and is_worker:
        message = "starts its own ranks, and a launcher has started this process"
        problems.append(Problem("train.dry_run", "--dry-run", message, "llmtrain train RECIPE --dry-run"))
    if dry_run and nproc and (nodes or per_node or device):
        message = "says workers of this machine, and --nodes, --gpus-per-node and --device another cluster"
        problems.append(Problem("train.dry_run", "--nproc", message, "leave one of them out"))
    if problems:
        raise RecipeError(problems)


def _dry_run(
    recipe: str,
    assignments: list[str],
    nproc: int | None,
    cluster: tuple[int | None, int | None, str | None],
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Runs the plan made small, and prints the report, which lies beside where the run itself would."""
    from rich.console import Console

    from llmtrain.cluster import local_cluster
    from llmtrain.dry_run.run import REPORT, dry_run
    from llmtrain.plan.load import load_recipe
    from llmtrain.precheck import check_stages, runnable_plan
    from llmtrain.run_dir import RunDir, default_run_dir

    try:
        declared, written_for = load_recipe(recipe, assignments)
        beside = run_dir or default_run_dir(declared, recipe.partition(":")[2] or None).path
        beside = beside if beside.name else beside.resolve()
        folder = RunDir(beside.parent / f"{beside.name}-dry-run")
        plan = runnable_plan(declared, local_cluster(nproc) if nproc else _cluster(written_for, *cluster))
        check_stages(plan)
        report = dry_run(plan, folder)
    except UserError as error:
        if as_json:
            print(json.dumps({"passed": False} | error.as_dict(), indent=2))
            sys.exit(error.exit_code)
        raise
    if as_json:
        print(json.dumps(report.document(), indent=2))
        print(f"report {folder.path / REPORT}", file=sys.stderr)
        return
    console = Console()
    for line in report.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(report.table())
    console.print(f"report {folder.path / REPORT}", highlight=False, markup=False, soft_wrap=True)


def _is_finished(plan: Plan, folder: RunDir) -> bool:
    """Whether the run has taken all its steps and left what it should."""
    from llmtrain.checkpoint.folder import newest
    from llmtrain.checkpoint.manifest import read_manifests

    checkpoint = newest(folder.checkpoints)
    if checkpoint is None or (plan.recipe.export.at_end and not folder.export.is_dir()):
        return False
    return read_manifests(checkpoint)[0].step >= plan.recipe.train.max_steps


@app.command()
def plan(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    nodes: NodesOption = None,
    gpus_per_node: PerNodeOption = None,
    device: DeviceOption = None,
    search: Annotated[bool, typer.Option("--search", help="Rank all legal plans by predicted speed.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Trace what layers save (loads torch).")] = False,
    as_json: JsonOption = False,
    write: Annotated[
        Path | None, typer.Option(help="Write plan.json, ds_config.json and pictures of memory and schedule here.")
    ] = None,
) -> None:
    """Resolve a recipe on a cluster: degrees, batch and DeepSpeed configuration, or why it cannot be."""
    from rich.console import Console

    from llmtrain.ds_config import render
    from llmtrain.plan import resolve
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.memory import memory_of
    from llmtrain.plan.memory.drawn import memory_svg
    from llmtrain.plan.schedule import schedule_svg
    from llmtrain.plan.time import predict
    from llmtrain.precheck import check_stages, suggesting

    try:
        declared, written_for = load_recipe(recipe, assignments)
        cluster = _cluster(written_for, nodes, gpus_per_node, device)
        if search:
            _search(declared, cluster, as_json, write)
            return
        with suggesting(declared, cluster):
            resolved = resolve(declared, cluster)
        if resolved.model.source != "arithmetic":  # else it is asked where torch may be loaded
            check_stages(resolved)
        memory = memory_of(resolved, _trace(resolved) if trace else None)
    except RecipeError as error:
        if as_json:
            print(json.dumps(error.as_dict(), indent=2))
            sys.exit(error.exit_code)
        raise
    ds_config = render(resolved)
    time = predict(resolved)
    if write:
        write.mkdir(parents=True, exist_ok=True)
        if resolved.layout.pp > 1:
            (write / "schedule.svg").write_text(schedule_svg(resolved.layout.pp, resolved.batch), encoding="utf-8")
        if memory:
            (write / "memory.svg").write_text(memory_svg(memory), encoding="utf-8")
        (write / "plan.json").write_text(resolved.model_dump_json(indent=2) + "\n")
        if ds_config:
            (write / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n")
    if as_json:
        known = {"memory": memory and memory.summary(), "time": time and time.model_dump()}
        print(json.dumps({**resolved.summary(), **known, "ds_config": ds_config or None}, indent=2))
    else:
        _print_plan(resolved, Console(), memory)


def _trace(plan: Plan) -> tuple[int, ...]:
    """Bytes that each layer saves, from the model itself."""
    from llmtrain.models.trace import traced_layers

    return traced_layers(plan)


def _search(declared: Recipe, cluster: Cluster, as_json: bool, write: Path | None) -> None:
    """Prints the fastest legal plans."""
    from llmtrain.plan.memory import lacking
    from llmtrain.plan.search import search_plans
    from llmtrain.plan.search_report import document, lines

    if write:
        message = "writes one plan, and --search finds many"
        raise RecipeError(Problem("search.write", "--write", message, "write the one you choose, with its --set"))
    result = search_plans(declared, cluster, lacking)
    print(json.dumps(document(result), indent=2) if as_json else "\n".join(lines(result)))


def _cluster(written_for: Cluster | None, nodes: int | None, per_node: int | None, device: str | None) -> Cluster:
    """The cluster of the options, which fall back on the recipe's own, then on this machine."""
    from pydantic import ValidationError

    from llmtrain.cluster import known_devices, local_cluster
    from llmtrain.recipe import recipe_problems

    base = written_for or local_cluster()
    known = known_devices(base.own_devices)
    if device is not None and device.lower() not in known:
        listing = f"known: {', '.join(known)}"
        raise RecipeError(
            Problem("cluster.device", "--device", f"'{device}' is unknown{nearest(device.lower(), known)}", listing)
        )
    try:
        return base.resized(nodes, per_node, device)
    except ValidationError as error:
        options = {"nodes": "--nodes", "devices_per_node": "--gpus-per-node"}
        raise RecipeError(
            Problem("cluster.size", options.get(problem.field, problem.field), problem.message, "use fewer devices")
            for problem in recipe_problems(error)
        ) from None


def _print_plan(plan: Plan, console: Any, memory: PlanMemory | None) -> None:
    from llmtrain.plan.described import model_line, split_lines
    from llmtrain.plan.time import described as described_time
    from llmtrain.plan.time import predict

    lines = [model_line(plan), *split_lines(plan), *(memory.described() if memory else ())]
    if time := predict(plan):
        lines.append(described_time(time))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for one in plan.notes:
        console.print(f"note: {one['message']} [{one['rule']}]", highlight=False, markup=False, soft_wrap=True)


@app.command()
def lint(
    config: Annotated[Path, typer.Argument(metavar="DS_CONFIG.json", help="Any DeepSpeed configuration.")],
    world_size: Annotated[int | None, typer.Option(help="Check the batch sizes for so many workers.", min=1)] = None,
    allow: Annotated[list[str], typer.Option(metavar="RULE", help="Let a rule pass; repeatable.")] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Find what DeepSpeed would refuse, ignore or misread in a configuration; exit 1 on errors."""
    from llmtrain.plan.lint import allowed, lint_file

    findings = lint_file(config, world_size, allowed(allow))
    errors = [finding for finding in findings if finding.severity == "error"]
    if as_json:
        print(json.dumps({"file": str(config), "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for one in findings:
            fix = f"\n    {one.fix}" if one.fix else ""
            print(f"{config}:{one.line}:{one.column}: {one.severity}: {one.field}: {one.message} [{one.rule}]{fix}")
        print(f"{config}: {len(errors)} errors, {len(findings) - len(errors)} warnings")
    sys.exit(1 if errors else Exit.DONE)


@app.command()
def data(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    as_json: JsonOption = False,
) -> None:
    """Prepare a recipe's tokens ahead of training, and print what was made."""
    from rich.console import Console

    from llmtrain.data import Progress, prepare, report, summary
    from llmtrain.plan.load import load_recipe

    declared, _ = load_recipe(recipe, assignments)
    prepared = prepare(declared, Progress(Console(stderr=True) if as_json else Console()))
    if as_json:
        print(json.dumps(summary(prepared), indent=2))
    else:
        Console().print(report(prepared))


@app.command()
def verify(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    nproc: Annotated[
        int | None, typer.Option(help="Most workers; default all GPUs, else one.", min=1, max=MOST_WORKERS)
    ] = None,
    plans: Annotated[str, typer.Option(help="all, or names and patterns with commas: dp2-*,dp1-zero3-*.")] = "all",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.", min=1)] = 10,
    run_dir: Annotated[Path | None, typer.Option(help="Default runs/NAME-verify.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that every plan trains what plain PyTorch does, on this machine; exit 1 where one does not.

    Where no variant is named, the recipe's variant `verify` is taken if it has one.
    """
    from rich.console import Console

    from llmtrain.cluster import local_cluster
    from llmtrain.data import Progress, prepare
    from llmtrain.plan.enumerate import enumerate_plans
    from llmtrain.plan.load import load_recipe, with_variant
    from llmtrain.precheck import without_uncut
    from llmtrain.run_dir import RunDir, default_run_dir
    from llmtrain.verify import certify
    from llmtrain.verify.job import choose, comparable
    from llmtrain.verify.table import summary, table

    chosen_recipe = with_variant(recipe, "verify")
    if chosen_recipe != recipe:
        print(f"verifying {chosen_recipe}, the recipe's own variant for it", file=sys.stderr)
    declared = comparable(load_recipe(chosen_recipe, assignments)[0], steps)
    cluster = local_cluster(nproc)
    runnable, refused = enumerate_plans(declared, cluster.world_size, cluster.device)
    chosen, refused = without_uncut(choose(runnable, refused, plans), refused)
    prepare(declared, Progress(Console(stderr=True)))
    folder = RunDir(run_dir) if run_dir else default_run_dir(declared, "verify")
    certificate = certify.verify(declared, chosen, refused, steps, folder)
    if as_json:
        print(json.dumps(certificate.document(), indent=2))
    else:
        console = Console()
        console.print(table(certificate))
        for line in (*summary(certificate), f"certificate {folder.path / 'certificate.json'}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    sys.exit(1 if certificate.deviating else Exit.DONE)


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory or checkpoint folder.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Default: what the forward pass reads.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file of weights at most.")] = "5GB",
    tokenizer: Annotated[Path | None, typer.Option(help="Its folder; default the run's own.")] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder: safetensors, configuration, tokenizer, model card."""
    folder = one_checkpoint(path)
    from llmtrain.checkpoint.export import export as export_checkpoint  # after the path is known: this loads torch
    from llmtrain.checkpoint.export import size_in_bytes

    tokenizer = tokenizer or folder.parent.parent / "tokenizer"
    export_checkpoint(folder, tokenizer, out, dtype, size_in_bytes(max_shard_size))
    print(f"exported {folder} to {out}")


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Exported folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(help="Tokens to add.", min=1)] = 48,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0)] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 1,
) -> None:
    """Continue a text with an exported model."""
    from llmtrain.generate import generate as continue_text

    print(prompt + continue_text(model, prompt, tokens, temperature, seed))
