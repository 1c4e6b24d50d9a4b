"""The command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from llmtrain.checkpoint.commands import app as checkpoint_app
from llmtrain.checkpoint.commands import one_checkpoint
from llmtrain.commands.options import (
    MOST_WORKERS,
    DeviceOption,
    JsonOption,
    NodesOption,
    PerNodeOption,
    RecipeArgument,
    SetOption,
)
from llmtrain.errors import Exit, Problem, RecipeError, UserError
from llmtrain.host import limit_spinning
from llmtrain.quiet import quiet_libraries
from llmtrain.stops import Stopped, before_the_first_step, leave, say, stop_by_exception
from llmtrain.streams import take_any_text

app = typer.Typer(
    help="Train language models with DeepSpeed: one recipe, every strategy, the same training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoint_app, name="checkpoint")


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; a user's mistake becomes a message and an exit code."""
    take_any_text()
    limit_spinning(os.environ)
    try:
        _check_surroundings()
        try:
            app(arguments)
        finally:
            if sys.stdout is not None:  # a recipe may have closed it
                sys.stdout.flush()
    except UserError as error:
        refuse(error)
    except Stopped as stopped:
        say(before_the_first_step(stopped.number))
        leave(Exit.RESUME)
    except BrokenPipeError:
        # The reader of our output has gone (`llmtrain plan ... | head`).
        _drop_output()
        sys.exit(Exit.DONE)
    except OSError as error:
        # Of a file, or of our own output, that nobody foresaw: still of the machine, and no bug.
        _drop_output()
        print(f"error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(Exit.USAGE)


def _check_surroundings() -> None:
    """Raises RecipeError for what the libraries of a run cannot bear."""
    try:
        os.getcwd()  # noqa: PTH109 - nothing is done with it
    except OSError as error:
        message = f"there is none ({error.strerror})"
        fix = "it was deleted, or is closed to you: cd to another one"
        raise RecipeError(Problem("python.folder", "working directory", message, fix)) from None
    if sys.flags.optimize > 1:
        message = "takes the docstrings away, and transformers fails to import without them"
        raise RecipeError(Problem("python.optimize", "python -OO", message, "run it without -OO and PYTHONOPTIMIZE=2"))


def _drop_output() -> None:
    """Lets nothing more be written to standard output, whose rest would fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def refuse(error: UserError) -> NoReturn:
    """Says what is wrong, and ends with its exit code."""
    print(error.report(), file=sys.stderr)
    sys.exit(error.exit_code)


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
    max_restarts: Annotated[
        int, typer.Option(help="Start a job that died again, from its last checkpoint, so many times.", min=0)
    ] = 0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Start nothing of it: run the plan made small here, on CPUs, and report. With --launcher print it.",
        ),
    ] = False,
    nodes: NodesOption = None,
    gpus_per_node: PerNodeOption = None,
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: its report as one JSON document.")] = False,
    launcher: Annotated[
        Literal["local", "torchrun", "accelerate", "deepspeed", "slurm", "kubernetes"],
        typer.Option(
            help="torchrun, accelerate: by these, on this machine; deepspeed: on the hosts of a hostfile, over ssh; "
            "slurm: submit a job; kubernetes: print a manifest, with --dry-run."
        ),
    ] = "local",
    hostfile: Annotated[Path | None, typer.Option(help="deepspeed: lines of HOST slots=N.")] = None,
    include: Annotated[str, typer.Option(help="deepspeed: hosts and devices that take part, h1@h2:0,2.")] = "",
    exclude: Annotated[str, typer.Option(help="deepspeed: those that do not.")] = "",
    runner: Annotated[
        Literal["pdsh", "openmpi"] | None,
        typer.Option(help="deepspeed: what reaches the hosts, as --launcher of `deepspeed` itself; default pdsh."),
    ] = None,
    slurm: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="slurm: time=24:00:00, partition, ... May be given again."),
    ] = [],  # noqa: B006  (typer copies it)
    kubernetes: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="kubernetes: image=IMAGE, pvc=CLAIM, ... May be given again."),
    ] = [],  # noqa: B006  (typer copies it)
) -> None:
    """Train a recipe on this machine, as one worker of the launcher that started this process, or as a job.

    --nodes, --gpus-per-node and --device are those of a job or a dry run, which is of the recipe's own cluster by
    default; with --nproc a dry run is of so many workers on this machine.
    """
    stop_by_exception()
    from llmtrain.commands.request import TrainRequest
    from llmtrain.commands.train import train as start

    start(
        TrainRequest(
            recipe=recipe,
            assignments=assignments,
            launcher=launcher,
            nproc=nproc,
            run_dir=run_dir,
            resume=resume,
            max_steps=max_steps,
            max_restarts=max_restarts,
            dry_run=dry_run,
            as_json=as_json,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            device=device,
            hostfile=hostfile,
            include=include,
            exclude=exclude,
            runner=runner,
            slurm=slurm,
            kubernetes=kubernetes,
        )
    )


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
    from llmtrain.commands.planned import PlanRequest, show_plan

    show_plan(
        PlanRequest(
            recipe=recipe,
            assignments=assignments,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            device=device,
            search=search,
            trace=trace,
            as_json=as_json,
            write=write,
        )
    )


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
        print(json.dumps(summary(prepared, declared), indent=2))
    else:
        Console().print(report(prepared, declared))


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
def tune(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    nproc: Annotated[
        int | None,
        typer.Option(help="Workers that share this machine; default all GPUs, else one.", min=1, max=MOST_WORKERS),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure which kernels are fastest for a recipe on this machine's device, and keep that for its runs.

    Only what the recipe leaves open (auto) is tried: attention, the decoder's layers, the loss, threads of a CPU.
    """
    from llmtrain.commands.tune import tune_kernels

    tune_kernels(recipe, assignments, nproc, as_json)


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
    with quiet_libraries():
        from llmtrain.checkpoint.export import export as export_checkpoint  # after the path is known: this loads torch
        from llmtrain.checkpoint.export import size_in_bytes

        tokenizer = tokenizer or folder.parent.parent / "tokenizer"
        export_checkpoint(folder, tokenizer, out, dtype, size_in_bytes(max_shard_size))
    print(f"exported {folder} to {out}")


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="Run directory, or an exported folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(help="Tokens to add.", min=1)] = 48,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0)] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 1,
) -> None:
    """Continue a text with an exported model; of a run directory, with its export."""
    with quiet_libraries():
        from llmtrain.generate import generate as continue_text

        continuation = continue_text(model, prompt, tokens, temperature, seed)
    print(prompt + continuation)


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE[:VARIANT]", help="With --prebuild: what to build for.")
    ] = None,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    hostfile: Annotated[Path | None, typer.Option(help="Look at these hosts, by ssh: lines of HOST slots=N.")] = None,
    include: Annotated[str, typer.Option(help="Hosts and devices that take part, h1@h2:0,2.")] = "",
    exclude: Annotated[str, typer.Option(help="Those that do not.")] = "",
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks of the all-reduce here: all GPUs, else 2.", min=1, max=MOST_WORKERS),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds after which the all-reduce is given up.", min=1)] = 120,
    prebuild: Annotated[
        bool, typer.Option("--prebuild", help="Compile the operators of DeepSpeed that training would compile.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine, or at each host of a hostfile: what is wrong for a run, and how to mend it.

    Exit 0 where there is no fault, 5 where there is one, 2 for a wrong command line.
    """
    from llmtrain.commands.doctor import DoctorRequest, visit_doctor

    visit_doctor(
        DoctorRequest(
            recipe=recipe,
            assignments=assignments,
            hostfile=hostfile,
            include=include,
            exclude=exclude,
            nproc=nproc,
            seconds=time_limit,
            build=prebuild,
            as_json=as_json,
        )
    )
