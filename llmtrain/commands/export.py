"""`llmtrain export`: writes a checkpoint as a Hugging Face folder, merges adapters, and uploads to the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmtrain.commands.checkpoint import best_checkpoint, one_checkpoint
from llmtrain.commands.options import TrustOption
from llmtrain.errors import Problem, RecipeError
from llmtrain.system.stops import interrupt_on_sigterm
from llmtrain.system.streams import quiet_libraries

SHARD_SIZE = "5GB"


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The options of the command line."""

    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="Run directory or checkpoint folder; with --push and without OUT, an exported folder.",
        ),
    ]
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Folder to create.")] = None
    best: Annotated[
        bool, typer.Option("--best", help="The best checkpoint of a run by checkpoint.best_metric, not the newest.")
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Data type of the weights; default: that of the forward pass."),
    ] = None
    max_shard_size: Annotated[str, typer.Option(help="Largest size of one weight file.")] = SHARD_SIZE
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the tokenizer; default: the run's own.")] = None
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter, of a run or a PEFT folder, into its base.")
    ] = False
    base: Annotated[
        str | None, typer.Option(help="Folder or hub name of an adapter's base; default: that of the run.")
    ] = None
    into: Annotated[
        Literal["trained", "full"],
        typer.Option(
            help="With --merge, for a 4-bit base: add the adapter to the quantized weights of training, or to the "
            "original ones."
        ),
    ] = "trained"
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Of a multimodal model: write the text model alone.")
    ] = False
    trust_remote_code: TrustOption = False
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Upload the folder to this hub repository; a new repository is private."
        ),
    ] = None
    form: Annotated[
        Literal["hugging-face", "deepspeed-universal", "dcp"],
        typer.Option(
            "--format",
            help="hugging-face: weights; deepspeed-universal, dcp (torch.distributed.checkpoint): the training state, "
            "with which other programs continue.",
        ),
    ] = "hugging-face"
    public: Annotated[bool, typer.Option("--public", help="With --push: use a public repository.")] = False


def export_model(request: ExportRequest) -> None:
    """Write a checkpoint as a folder for other programs.

    A Hugging Face folder contains the weights (safetensors), configuration, tokenizer and model card. --format writes
    the training state instead.

    --push uploads it to the hub. The token is read from HF_TOKEN, or from where `hf auth login` stores it.
    """
    from llmtrain.checkpoint.folder import check_new

    if problems := list(_conflicts(request)):
        raise RecipeError(problems)
    if request.out is None:
        _push(request.path, request)
        return
    is_peft = request.merge and (request.path / "adapter_config.json").is_file()
    chosen = best_checkpoint if request.best else one_checkpoint
    source = request.path if is_peft else chosen(request.path)
    if request.push:
        from llmtrain.checkpoint.hub.push import open_repository

        check_new(request.out)
        open_repository(request.push, request.public)
    _write(source, request.out, is_peft, request)
    print(f"merged {source} into {request.out}" if request.merge else f"exported {source} to {request.out}")
    if request.push:
        _push(request.out, request)


def _conflicts(request: ExportRequest) -> Iterator[Problem]:
    if request.into != "trained" and not request.merge:
        yield Problem("export.merge", "--into", "is only supported with --merge", "add --merge")
    if request.form != "hugging-face":
        others = {**_of_weights(request), "--merge": request.merge, "--push": request.push}
        for option in (option for option, value in others.items() if value):
            message = f"does not apply to --format {request.form}, which writes fp32 weights and optimizer states"
            yield Problem("export.format", option, message, "leave it out")
    if request.public and not request.push:
        yield Problem("export.push", "--public", "is only supported with --push", "add --push OWNER/NAME")
    if request.out is None and not request.push:
        yield Problem("export.out", "OUT", "is required", "name a folder to create")
    elif request.out is None:
        written = {
            "--best": request.best,
            **_of_weights(request),
            "--merge": request.merge,
            "--trust-remote-code": request.trust_remote_code,
        }
        for option, value in written.items():
            if value:
                yield Problem("export.out", option, "needs OUT, a folder to create", "name it before --push")


def _of_weights(request: ExportRequest) -> dict[str, object]:
    """Returns the options that only concern a folder of weights; those that are not given are false."""
    return {
        "--dtype": request.dtype,
        "--max-shard-size": request.max_shard_size != SHARD_SIZE,
        "--tokenizer": request.tokenizer,
        "--base": request.base,
        "--text-only": request.text_only,
    }


def _write(source: Path, out: Path, is_peft: bool, request: ExportRequest) -> None:
    """Writes the folder. Loads torch."""
    interrupt_on_sigterm()
    with quiet_libraries():
        if request.form != "hugging-face":
            from llmtrain.checkpoint.foreign.exported import export_state

            export_state(source, out, request.form, trust_remote_code=request.trust_remote_code)
            return
        from llmtrain.checkpoint.export import export, size_in_bytes
        from llmtrain.checkpoint.merge import merge, merge_checkpoint

        how: dict[str, Any] = {
            "dtype": request.dtype,
            "most_bytes": size_in_bytes(request.max_shard_size),
            "base": request.base,
            "text_only": request.text_only,
            "trust_remote_code": request.trust_remote_code,
        }
        if is_peft:
            merge(source, out, request.tokenizer, into=request.into, **how)
            return
        tokenizer = request.tokenizer or source.parent.parent / "tokenizer"
        if request.merge:
            merge_checkpoint(source, tokenizer, out, into=request.into, **how)
        else:
            export(source, tokenizer, out, **how)


def _push(folder: Path, request: ExportRequest) -> None:
    from llmtrain.checkpoint.hub.push import check_exported, open_repository, push

    assert request.push is not None
    check_exported(folder)
    if request.out is None:
        open_repository(request.push, request.public)
    print(f"pushed {folder} to {push(folder, request.push)}")
