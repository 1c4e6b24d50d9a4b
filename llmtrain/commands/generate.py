"""`llmtrain generate`: continues a text, or holds a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import MAX_OPTION, TrustOption
from llmtrain.errors import Problem, RecipeError
from llmtrain.run_dir import RunDir
from llmtrain.system.streams import quiet_libraries, visible

TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """All options of the command line."""

    model: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="Run directory, or an exported folder.")]
    prompt: Annotated[str | None, typer.Option(help="Text to continue; with --chat, the only question.")] = None
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Chat with the model's chat template: one question per input line."),
    ] = False
    system: Annotated[str | None, typer.Option(help="With --chat: the system text.")] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Largest number of tokens to generate; default: {TOKENS}, or 256 per answer with --chat.", min=1
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always takes the most likely token.", min=0)
    ] = 0.8
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.", min=0, max=MAX_OPTION)] = 1
    trust_remote_code: TrustOption = False


def generate_text(request: GenerateRequest) -> None:
    """Continue a text with an exported model, or chat with it.

    The model is an exported folder, or the export of a run.
    """
    if request.chat:
        _chat(request)
        return
    if request.prompt is None or request.system is not None:
        field = "--prompt" if request.prompt is None else "--system"
        message = "is required" if request.prompt is None else "is only supported with --chat"
        raise RecipeError(Problem("generate.prompt", field, message, "or use --chat"))
    folder = model_folder(request.model)
    with quiet_libraries():
        from llmtrain.models.inference.generate import generate as continue_text

        tokens = request.tokens or TOKENS
        continuation = continue_text(
            folder, request.prompt, tokens, request.temperature, request.seed, request.trust_remote_code
        )
    print(request.prompt + continuation)


def model_folder(path: Path) -> Path:
    """Returns the folder of a model: `path`, or the export in the run directory `path`.

    Raises RecipeError if there is no model.
    """
    for folder in (path, RunDir(path).export):
        if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            return folder
    fix = f"llmtrain export {path} OUT" if RunDir(path).checkpoints.is_dir() else "name an exported folder or a run"
    raise RecipeError(Problem("generate.folder", str(path), "contains no model (no config.json, no export/)", fix))


def _chat(request: GenerateRequest) -> None:
    folder = model_folder(request.model)
    with quiet_libraries():
        from llmtrain.models.inference.generate import Chat

        chat = Chat(
            *(folder, request.tokens, request.temperature, request.seed),
            system=request.system,
            trust_remote_code=request.trust_remote_code,
        )
    for question in [request.prompt] if request.prompt is not None else _questions():
        if not question.strip():
            continue
        try:
            left_out = chat.ask(question, _write)
        except RecipeError as error:
            if request.prompt is not None:
                raise
            print(error.report(), file=sys.stderr)
            continue
        print(flush=True)
        if left_out:
            print(f"({left_out} earlier messages were left out: the model's context is full)", file=sys.stderr)


def _questions() -> Iterator[str]:
    """Yields the lines of standard input; shows a prompt on a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    import readline  # noqa: F401 - makes `input` edit lines

    print("Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _write(text: str) -> None:
    sys.stdout.write(visible(text))
    sys.stdout.flush()
