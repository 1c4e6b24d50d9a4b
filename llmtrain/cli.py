"""The command line of `llmtrain`, and of a recipe that is run as a program.

Each command imports what it needs only when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from llmtrain.commands import completion
from llmtrain.commands.checkpoint import app as checkpoint_app
from llmtrain.commands.compare import compare_runs
from llmtrain.commands.data import prepare_data
from llmtrain.commands.doctor import run_doctor
from llmtrain.commands.evaluate import evaluate_tasks
from llmtrain.commands.export import export_model
from llmtrain.commands.generate import generate_text
from llmtrain.commands.import_settings import import_settings
from llmtrain.commands.init import write_recipe
from llmtrain.commands.inspect import inspect_run
from llmtrain.commands.plan import show_plan
from llmtrain.commands.profile import request_profile
from llmtrain.commands.recipe import app as recipe_app
from llmtrain.commands.report import report_runs
from llmtrain.commands.train import train_recipe
from llmtrain.commands.tune import tune_kernels
from llmtrain.commands.verify import verify_plans
from llmtrain.errors import Exit, Problem, RecipeError, StoppedError, UserError
from llmtrain.library import lint_errors
from llmtrain.system.host import limit_spinning
from llmtrain.system.stops import before_the_first_step, leave, say, stopped_by
from llmtrain.system.streams import accept_any_text
from llmtrain_lint.command import lint_files

if TYPE_CHECKING:
    from llmtrain.recipe import Recipe

app = typer.Typer(
    help="Train language models with DeepSpeed: one recipe, every strategy, the same training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(recipe_app, name="recipe")


def _print_version(wanted: bool) -> None:
    if wanted:
        from llmtrain import __version__

        print(f"llmtrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declares the options that do not belong to a command."""


def command(run: Callable[[Any], None], name: str | None = None) -> Callable[..., None]:
    """Registers a function of a request as a command. The request's fields become the arguments and options.

    name: by default that of the function, whose docstring is the help of the command.
    """
    request = get_type_hints(run)["request"]
    hints = get_type_hints(request, include_extras=True)

    @wraps(run)
    def called(**options: Any) -> None:
        run(request(**options))

    parameters = (
        Parameter(option.name, Parameter.KEYWORD_ONLY, default=_default(option)) for option in fields(request)
    )
    called.__signature__ = Signature([parameter.replace(annotation=hints[parameter.name]) for parameter in parameters])  # type: ignore
    called.__annotations__ = hints
    return app.command(name)(called)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default


def main(arguments: list[str] | None = None) -> None:
    """Runs a command. A user's mistake becomes a message and an exit code."""
    accept_any_text()
    completion.prepare_completion()
    limit_spinning(os.environ)
    try:
        _check_surroundings()
        try:
            app(arguments)
            sys.stdout.flush()
        except BaseException:
            if number := stopped_by():  # whatever the error became on its way
                say(before_the_first_step(number))
                leave(Exit.RESUME)
            raise
    except StoppedError as error:
        sys.exit(error.exit_code)
    except UserError as error:
        refuse(error)
    except (BrokenPipeError, SystemExit) as end:
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        # The program that reads the output has exited (`llmtrain plan ... | head`). Typer would exit with 1.
        _drop_output()
        sys.exit(Exit.DONE)
    except OSError as error:
        # An unforeseen error of the file system or of the output is a fault of the machine, not a bug.
        _drop_output()
        print(f"error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(Exit.USAGE)


def run_script(recipe: Callable[[], Recipe]) -> None:
    """Runs `llmtrain train` for the file that defines `recipe`, with the script's own arguments.

    If a launcher started this process, the process becomes one worker. Otherwise it starts the workers. recipe: the
    function `recipe` or `recipe_VARIANT` of the file; the argument `--variant NAME` chooses another variant.
    """
    from llmtrain.launch import without_local_rank
    from llmtrain.plan.load import is_running

    if is_running():
        message = "is called while the recipe is imported, so the run would start within itself"
        raise RecipeError(Problem("recipe.main", "main()", message, 'call it under `if __name__ == "__main__":`'))
    try:
        arguments = _script_arguments(recipe, without_local_rank(sys.argv[1:]))
    except RecipeError as error:
        refuse(error)
    main(arguments)


def _script_arguments(recipe: Callable[[], Recipe], arguments: list[str]) -> list[str]:
    """Returns the arguments for `llmtrain`. Raises RecipeError for a function that `llmtrain` would not find."""
    name = getattr(recipe, "__name__", "")
    module = sys.modules.get(getattr(recipe, "__module__", ""))
    path = getattr(module, "__file__", None)
    if path is None or getattr(module, name, None) is not recipe or name.split("_")[0] != "recipe":
        message = f"main({name or type(recipe).__name__}) was called: a run is read from a file's function recipe() or "
        raise RecipeError(Problem("recipe.main", "main()", f"{message}recipe_VARIANT()", "rename the function"))
    variant = name.removeprefix("recipe").removeprefix("_")
    if "--variant" in arguments:
        at = arguments.index("--variant")
        if at + 1 == len(arguments):
            raise RecipeError(Problem("recipe.variant", "--variant", "needs a name"))
        variant = arguments[at + 1]
        arguments = arguments[:at] + arguments[at + 2 :]
    return ["train", f"{path}:{variant}" if variant else path, *arguments]


def _check_surroundings() -> None:
    """Raises RecipeError if the process runs under conditions that the libraries of a run do not support."""
    try:
        os.getcwd()  # noqa: PTH109 - only checks that it exists
    except OSError as error:
        message = f"does not exist or cannot be read ({error.strerror})"
        fix = "cd to an existing directory that you may read"
        raise RecipeError(Problem("python.folder", "working directory", message, fix)) from None
    if sys.flags.optimize > 1:
        message = "removes docstrings, without which transformers fails to import"
        raise RecipeError(Problem("python.optimize", "python -OO", message, "run it without -OO and PYTHONOPTIMIZE=2"))


def _drop_output() -> None:
    """Redirects standard output to /dev/null, so that flushing the remaining output at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def refuse(error: UserError) -> NoReturn:
    """Prints an error and exits with its exit code."""
    if loading := sys.modules.get("llmtrain.plan.load"):
        error = loading.with_lines(error)
    print(error.report(), file=sys.stderr)
    sys.exit(error.exit_code)


command(write_recipe, "init")
command(import_settings, "import")
command(train_recipe, "train")
command(show_plan, "plan")
app.command("lint")(lint_errors()(lint_files))


app.command("data")(prepare_data)
app.command("verify")(verify_plans)
app.command("profile")(request_profile)
command(report_runs, "report")
app.command("inspect")(inspect_run)
app.command("compare")(compare_runs)
app.command("tune")(tune_kernels)
command(export_model, "export")
command(generate_text, "generate")
command(evaluate_tasks, "eval")
app.command("completion")(completion.print_completion)
command(run_doctor, "doctor")
