"""The command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.errors import CheckpointError, Exit, Problem, RecipeError, UserError, nearest

if TYPE_CHECKING:
    from llmtrain.cluster import Cluster
    from llmtrain.plan import Plan
    from llmtrain.run_dir import RunDir

app = typer.Typer(
    help="Train language models with DeepSpeed: one recipe, every strategy, the same training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
checkpoint_app = typer.Typer(help="List and verify the checkpoints of a run.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE[:VARIANT]", help="Recipe file, recipes/NAME.py.")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a field, as in optim.lr=3e-4. May be given again."),
]
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
    nproc: Annotated[int | None, typer.Option(help="Workers; default all GPUs, else one.", min=1)] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default runs/NAME[-VARIANT].")] = None,
    resume: Annotated[str, typer.Option(help="auto: from the newest checkpoint; never; or its folder.")] = "auto",
    max_steps: Annotated[int | None, typer.Option(help="Stop and save after this step.", min=1)] = None,
) -> None:
    """Train a recipe on this machine, or as one worker of the launcher that started this process."""
    from llmtrain.cluster import Cluster, local_cluster
    from llmtrain.ds_config import render
    from llmtrain.launch import accelerate_processes, discover
    from llmtrain.plan.load import load_recipe
    from llmtrain.run_dir import RunDir, default_run_dir

    rank = discover(os.environ, sys.argv)
    declared, _ = load_recipe(recipe, assignments)
    cluster = local_cluster(nproc or accelerate_processes())
    if rank is not None:
        nodes = rank.world_size // rank.local_world_size
        cluster = Cluster(nodes=nodes, devices_per_node=rank.local_world_size, device=cluster.device)
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
    if resume not in ("auto", "never") and not (Path(resume) / "MANIFEST.json").is_file():
        raise CheckpointError(Problem("resume.path", "--resume", f"{resume} is no checkpoint folder"))
    return plan


def _launch(plan: Plan, ds_config: dict[str, Any], folder: RunDir, resume: str, max_steps: int | None) -> int:
    """Tries the cut of a pipeline and prepares the data here, then trains with one worker per device."""
    from rich.console import Console

    from llmtrain.data import Progress, Schedule, prepare, report
    from llmtrain.launch import run_workers
    from llmtrain.precheck import check_stages

    console = Console()
    _print_plan(plan, console)
    if resume == "auto" and _is_finished(plan, folder):
        console.print(f"{folder.path} is finished: {plan.recipe.train.max_steps:,} steps", highlight=False)
        return Exit.DONE
    check_stages(plan)
    prepared = prepare(plan.recipe, Progress(console))
    console.print(report(prepared))
    Schedule.of(plan, prepared, dp_rank=0)  # says what is too short for a batch, before anything is started
    folder.create(plan, ds_config)
    command = [sys.executable, "-m", "llmtrain.worker", str(folder.path), "--resume", resume]
    if max_steps:
        command += ["--max-steps", str(max_steps)]
    console.print(f"run directory {folder.path}", highlight=False, soft_wrap=True)
    return run_workers(command, plan.workers, folder)


def _is_finished(plan: Plan, folder: RunDir) -> bool:
    """Whether the run has taken all its steps and left what it should."""
    from llmtrain.checkpoint.folder import newest

    checkpoint = newest(folder.checkpoints)
    if checkpoint is None or (plan.recipe.export.at_end and not folder.export.is_dir()):
        return False
    steps: int = json.loads((checkpoint / "trainer.json").read_text())["step"]
    return steps >= plan.recipe.train.max_steps


@app.command()
def plan(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    nodes: Annotated[int | None, typer.Option(help="Machines; default those the recipe names.", min=1)] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Devices on each.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="a100, h100, h200, b200, mi300x, cpu.")] = None,
    as_json: JsonOption = False,
    write: Annotated[Path | None, typer.Option(help="Write ds_config.json and plan.json to this folder.")] = None,
) -> None:
    """Resolve a recipe on a cluster: degrees, batch and DeepSpeed configuration, or why it cannot be."""
    from rich.console import Console

    from llmtrain.ds_config import render
    from llmtrain.plan import resolve
    from llmtrain.plan.load import load_recipe
    from llmtrain.precheck import check_stages, suggesting

    try:
        declared, written_for = load_recipe(recipe, assignments)
        cluster = _cluster(written_for, nodes, gpus_per_node, device)
        with suggesting(declared, cluster):
            resolved = resolve(declared, cluster)
        if resolved.model.source != "arithmetic":  # else it is asked where torch may be loaded
            check_stages(resolved)
    except RecipeError as error:
        if as_json:
            print(json.dumps(error.as_dict(), indent=2))
            sys.exit(error.exit_code)
        raise
    ds_config = render(resolved)
    if write:
        write.mkdir(parents=True, exist_ok=True)
        (write / "plan.json").write_text(resolved.model_dump_json(indent=2) + "\n")
        if ds_config:
            (write / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n")
    if as_json:
        print(json.dumps({**resolved.summary(), "ds_config": ds_config or None}, indent=2))
    else:
        _print_plan(resolved, Console())


def _cluster(written_for: Cluster | None, nodes: int | None, per_node: int | None, device: str | None) -> Cluster:
    """The cluster of the options, which fall back on the recipe's own, then on this machine."""
    from pydantic import ValidationError

    from llmtrain.cluster import DEVICES, Cluster, local_cluster

    base = written_for or local_cluster()
    if device is not None and device.lower() not in DEVICES:
        known = f"known: {', '.join(DEVICES)}"
        raise RecipeError(
            Problem("cluster.device", "--device", f"'{device}' is unknown{nearest(device.lower(), DEVICES)}", known)
        )
    try:
        return Cluster(
            nodes=nodes or base.nodes,
            devices_per_node=per_node or base.devices_per_node,
            device=(device or base.device).lower(),
        )
    except ValidationError as error:  # pragma: no cover  (typer has checked the numbers)
        raise RecipeError(str(error)) from None


def _sharding(plan: Plan) -> str:
    """What shares the work of data parallelism, if not DeepSpeed itself, and its stage."""
    parallel = plan.recipe.parallel
    stage = f"ZeRO-{plan.layout.zero_stage}"
    if parallel.backend == "deepspeed":
        return stage
    return f"accelerate {parallel.strategy} {stage}" if parallel.backend == "accelerate" else parallel.backend


def _print_plan(plan: Plan, console: Any) -> None:
    from llmtrain.plan.stages import described

    layout, batch, cluster, model = plan.layout, plan.batch, plan.cluster, plan.model
    lines = [
        f"{plan.recipe.name}: {model.model_type}, {model.parameters:,} parameters"
        + (f" ({model.active_parameters:,} active)" if model.active_parameters != model.parameters else ""),
        f"cluster  {cluster.nodes} × {cluster.devices_per_node} {cluster.device} = {cluster.world_size} "
        + (f"devices, {plan.workers} worker" if plan.workers != cluster.world_size else "workers"),
        f"layout   data {layout.dp} × pipeline {layout.pp} × tensor {layout.tp} × sequence {layout.sp}"
        f", expert {layout.ep}, {_sharding(plan)}, {plan.recipe.parallel.precision}",
        f"batch    {batch.global_batch_size} = micro {batch.micro_batch_size} × accumulation "
        f"{batch.gradient_accumulation_steps} × data {layout.dp}; {batch.tokens_per_step:,} tokens a step",
        *described(plan.stages),
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for one in plan.notes:
        console.print(f"note: {one['message']} [{one['rule']}]", highlight=False, markup=False, soft_wrap=True)


@app.command()
def lint(
    config: Annotated[Path, typer.Argument(metavar="DS_CONFIG.json", help="Any DeepSpeed configuration.")],
    world_size: Annotated[int | None, typer.Option(help="Check the batch sizes for so many workers.", min=1)] = None,
    as_json: JsonOption = False,
) -> None:
    """Find what DeepSpeed would refuse, ignore or misread in a configuration; exit 1 on errors."""
    from llmtrain.plan.lint import lint_file

    findings = lint_file(config, world_size)
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
    nproc: Annotated[int | None, typer.Option(help="Most workers; default all GPUs, else one.", min=1)] = None,
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


@checkpoint_app.command("list")
def list_checkpoints(run: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """List the whole checkpoints of a run, oldest first."""
    from llmtrain.checkpoint.folder import newest, whole

    checkpoints = _checkpoints(run)
    latest = newest(checkpoints)
    for folder in whole(checkpoints):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder}  {size / 2**20:,.1f} MiB{'  latest' if folder == latest else ''}")


@checkpoint_app.command("verify")
def verify_checkpoint(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory or checkpoint folder.")],
) -> None:
    """Compare every file of a checkpoint with its manifest, and look into its pickles without loading them."""
    folder = _checkpoint(path)
    from llmtrain.checkpoint.state import check  # after the path is known to be one: this loads torch

    check(folder)
    print(f"{folder} is whole")


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory or checkpoint folder.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
) -> None:
    """Write a checkpoint as a Hugging Face folder: safetensors, configuration, tokenizer."""
    folder = _checkpoint(path)
    from llmtrain.checkpoint.export import export as export_checkpoint  # as above

    export_checkpoint(folder, folder.parent.parent / "tokenizer", out)
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


def _checkpoints(run: Path) -> Path:
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(Problem("checkpoint.run", str(run), "is no run directory (it has no checkpoints/)"))
    return folder


def _checkpoint(path: Path) -> Path:
    """A checkpoint folder, or the newest one of a run directory."""
    from llmtrain.checkpoint.folder import MANIFEST, newest

    if (path / MANIFEST).is_file():
        return path.resolve()
    found = newest(_checkpoints(path))
    if found is None:
        raise CheckpointError(Problem("checkpoint.none", str(path), "has no whole checkpoint"))
    return found.resolve()
