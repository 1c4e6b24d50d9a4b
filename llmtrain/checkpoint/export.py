"""Exports a checkpoint to a Hugging Face folder, in one process, on the CPU, one tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from llmtrain.checkpoint.base import base_of, check_base, export_reader, with_base
from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import check_trusted, read_plan, read_state
from llmtrain.checkpoint.folder import check_new, new_folder, write_exported
from llmtrain.checkpoint.hub.model_card import model_card
from llmtrain.checkpoint.hub.own_code import write_own_code
from llmtrain.checkpoint.multimodal import WholeExporter, check_alone, copy_processors
from llmtrain.engines.state.files import stream_tensors
from llmtrain.engines.state.save_load import CheckpointReader
from llmtrain.engines.state.writer import tensor_bytes
from llmtrain.errors import CheckpointError, Problem, RecipeError
from llmtrain.models import adapter, adapter_files, model_configuration
from llmtrain.models.hub_names import WeightExporter, aliases, empty_model
from llmtrain.models.inference.load import load_tokenizer
from llmtrain.models.own import OwnModel
from llmtrain.models.precision import weight_dtype
from llmtrain.overrides.transformers import unsaved_names
from llmtrain.plan.facts.classifier import is_classifier
from llmtrain.plan.facts.model import TextPart
from llmtrain.plan.facts.model_facts import wrapper_of
from llmtrain.recipe import Recipe
from llmtrain.system.durable import create
from llmtrain.system.hub import INDEX
from llmtrain.system.untrusted import read_json, utf8_name

Dtype = Literal["float32", "bfloat16", "float16"]
BASE = "base"
"""Folder, in the export of an adapter, of a base that exists nowhere else."""
QUANTIZED = "trained_in_nf4.json"
"""File with the names of the base's weights that were held in 4 bits while its adapter was trained."""
SHARD_BYTES = 5 * 10**9
"""Largest size of a file, as recommended by the hub; a larger tensor gets a file of its own."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(
    checkpoint: Path,
    tokenizer: Path,
    out: Path,
    *,
    dtype: Dtype | None = None,
    most_bytes: int = SHARD_BYTES,
    replace: bool = False,
    base: str | None = None,
    text_only: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Writes weights, configuration, tokenizer and a model card to `out`, for `from_pretrained`.

    For an adapter, the files that PEFT needs are written. Its base is written, to `base/`, only if it was newly
    initialised or has new tokens or rotary positions. Of a multimodal model, the whole is written, with its parts
    beside the text model as the run found them, and its processors; an adapter is one of the whole.

    dtype: data type of the weights; by default that of the forward pass (bf16 for a bf16 run), so that the exported
    model has the run's evaluation loss. most_bytes: size of the tensors in one file. Memory holds the largest weight in
    fp32 and as it is written, never the model. replace: whether `out` may have content. base: folder or hub name of the
    frozen weights, if they are not where the run found them. text_only: whether to write the text model of a multimodal
    model alone; the base of an adapter then is, too. trust_remote_code: whether a model's own code may be run.
    The folder is written under a temporary name and renamed, so `out` is complete or absent. Raises CheckpointError for
    a damaged checkpoint, for code that may not be run, for other frozen weights than the run's, or if `out` has content
    that must not be replaced, or cannot be written.
    """
    if not replace:
        check_new(out)
    manifests = verify_checkpoint(checkpoint)
    plan = with_base(read_plan(checkpoint), base)
    check_trusted(checkpoint, plan, trust_remote_code)
    reader, recipe, before = export_reader(checkpoint, plan), plan.recipe, read_state(checkpoint).base
    is_part = plan.model.part is not None and not text_only
    if before and (base is not None or is_part):
        instead = "; --text-only writes the text model alone" if is_part and recipe.model.adapter is None else ""
        check_base(checkpoint, before, base_of(plan), instead)
    weights = getattr(torch, dtype) if dtype else weight_dtype(recipe.parallel.precision)
    config = model_configuration(recipe)
    if text_only:
        check_alone(checkpoint, plan.model.part, config)
    model = empty_model(config, weights, recipe.model.trust_remote_code)
    wrapper = wrapper_of(recipe.model, config, weights) if is_part else None
    # A base with new tokens or positions, of new weights, or without the parts beside it, exists nowhere else.
    is_new = recipe.model.pretrained is None or recipe.model.changes_pretrained or text_only
    is_whole = recipe.model.adapter is None or is_new
    with new_folder(out, replace) as folder:
        whole = folder
        if recipe.model.adapter is not None:
            whole = folder / BASE
            frozen = str((out / BASE).resolve()) if is_whole else str(recipe.model.pretrained)
            part = wrapper.part if wrapper else None
            write_adapter(recipe, model.config, reader, model.dtype, frozen, folder, part)
            if not is_new:  # otherwise the exported base has their values
                _write_packed_names(recipe, model.config, folder)
            read_tokenizer(tokenizer).save_pretrained(folder)
        if is_whole:
            whole.mkdir(exist_ok=True)
            names = stored_names(checkpoint, reader, model)
            outgoing = WholeExporter(wrapper, recipe.model, names) if wrapper else WeightExporter(model, names)
            written = wrapper.model if wrapper else model
            with utf8_name(whole) as named:
                _write_settings(written, tokenizer, named, pads=bool(recipe.model.new_tokens))
            if wrapper or recipe.model.images:
                copy_processors(recipe.model, whole)
            if isinstance(model, OwnModel) and plan.code:
                write_own_code(model, plan.code, whole)
            write_weights(outgoing, reader.read_as, written.num_parameters(), most_bytes, whole)
        metrics = checkpoint.resolve().parent.parent / "metrics.jsonl"
        dtype_name = str(model.dtype).removeprefix("torch.")
        is_multimodal = wrapper is not None or recipe.model.images
        card = model_card(plan, read_state(checkpoint), manifests[0], dtype_name, metrics, whole=is_multimodal)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_exported(folder, manifests[0])


def size_in_bytes(text: str) -> int:
    """Returns the bytes of a size such as `5GB` or `512MiB`. Raises RecipeError for anything else."""
    match = re.fullmatch(r"(\d{1,18})\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        message = f"'{text}' is not a size"
        raise RecipeError(Problem("export.size", "--max-shard-size", message, "--max-shard-size 5GB"))
    return int(match[1]) * unit


def stored_names(checkpoint: Path, reader: CheckpointReader, model: PreTrainedModel) -> list[str]:
    """Returns the names under which a checkpoint stores the weights of a model; tied weights once.

    Raises CheckpointError if one is missing.
    """
    groups = aliases(model)
    stored = {groups[name][0]: name for name in reversed(reader.shards) if name in groups}
    lacking = [name for name, group in groups.items() if group[0] == name and name not in stored]
    if lacking:
        message = f"lacks {len(lacking)} weights of its model, such as '{lacking[0]}'"
        raise CheckpointError(Problem("checkpoint.pieces", str(checkpoint), message))
    ignored = unsaved_names(model)
    return [name for name in model.state_dict() if stored[groups[name][0]] == name and name not in ignored]


def _write_settings(model: PreTrainedModel, tokenizer: Path, folder: Path, pads: bool) -> None:
    """Writes the configurations of model and generation, the tokenizer, and the code of a custom model.

    pads: whether the vocabulary was padded; generation then never chooses a row without a token.
    """
    loaded = read_tokenizer(tokenizer)
    if is_classifier(model.config) and loaded.pad_token is None:
        loaded.pad_token = loaded.eos_token  # classifiers score the last token that is not this one
    generation = getattr(model, "generation_config", None) or GenerationConfig()  # a model with its own code has none
    model.generation_config = generation
    for config in (model.config, model.config.get_text_config(decoder=True), generation):
        config.eos_token_id, config.pad_token_id = loaded.eos_token_id, loaded.pad_token_id
        config.bos_token_id = loaded.bos_token_id
    if pads:
        rows = model.config.get_text_config(decoder=True).vocab_size
        unused = range(max(loaded.get_vocab().values()) + 1, rows)
        generation.suppress_tokens = list(unused) or None
    if (stops := tokenizer / "generation_config.json").is_file():
        stop_ids = read_json(stops, dict[str, list[int]])["eos_token_id"]
        generation.eos_token_id = stop_ids if len(stop_ids) > 1 else stop_ids[0]
    write_configuration(model, folder)
    loaded.save_pretrained(folder)


def write_configuration(model: PreTrainedModel, folder: Path) -> None:
    """Writes the configurations of a model and of generation, and the code of a custom model."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # for shards that are not written here
    try:
        model.save_pretrained(folder, state_dict={})
        if not (
            model.can_generate() or is_classifier(model.config)
        ):  # with its own code; `from_pretrained` then adds what generates
            model.generation_config.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def write_adapter(
    recipe: Recipe,
    config: PreTrainedConfig,
    reader: CheckpointReader,
    dtype: torch.dtype,
    base: str,
    folder: Path,
    of_whole: TextPart | None = None,
) -> None:
    """Writes an adapter as PEFT does, for `PeftModel.from_pretrained`.

    base: the folder or hub name of the frozen weights. of_whole: the place of the model in the multimodal one that is
    this base.
    """
    model = empty_model(config, dtype, recipe.model.trust_remote_code)
    settings = adapter.outline(model, recipe)
    if of_whole:
        settings = adapter.of_whole_model(settings, of_whole)
    settings.base_model_name_or_path, settings.revision = base, recipe.model.revision
    settings.save_pretrained(folder)
    part = adapter.select_trained(recipe, config)
    trained = {adapter.weight_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}
    stored = adapter_files.stored_modules(part.parameters if part else ())
    tied = aliases(model)  # PEFT's files have a table that embedding and head share twice
    files = {
        adapter_files.file_name(alias, stored, of_whole): name for name in trained for alias in tied.get(name, (name,))
    }

    def read(key: str) -> Tensor:
        name, like = files[key], trained[files[key]]
        return adapter_files.to_file(name, reader.read_as(name, like).view(like.shape).to(dtype)).contiguous()

    with create(folder / adapter_files.ADAPTER_FILE) as target:
        like = {key: adapter_files.to_file(name, trained[name].data) for key, name in files.items()}
        stream_tensors(target.stream, like, read)


def _write_packed_names(recipe: Recipe, config: PreTrainedConfig, folder: Path) -> None:
    """Lists the weights of an adapter's base that were held in 4 bits, if any were."""
    part = adapter.select_trained(recipe, config)
    if part is not None and part.packed:
        (folder / QUANTIZED).write_text(json.dumps(sorted(part.packed), indent=1) + "\n", encoding="utf-8")


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Returns a tokenizer. Raises CheckpointError if there is no such folder, or it cannot be read."""
    if not folder.is_dir():
        message = "does not exist, but an exported model needs it"
        raise CheckpointError(Problem("export.tokenizer", str(folder), message, "name it with --tokenizer FOLDER"))
    return load_tokenizer(folder)


def write_weights(
    outgoing: WeightExporter | WholeExporter,
    read: Callable[[str, Tensor], Tensor],
    parameters: int,
    most_bytes: int,
    folder: Path,
) -> None:
    """Writes safetensors files, and an index if there are several. read: as for `WeightExporter.tensor`."""
    shards = split_state_dict_into_shards_factory(
        outgoing.like,
        get_storage_size=tensor_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most_bytes,
    )
    for file, names in shards.filename_to_tensors.items():
        like = {name: outgoing.like[name] for name in names}
        with create(folder / file) as target:
            stream_tensors(target.stream, like, partial(outgoing.tensor, read=read))
    if shards.is_sharded:
        index = {
            "metadata": {"total_parameters": parameters, **shards.metadata},
            "weight_map": dict(sorted(shards.tensor_to_filename.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
