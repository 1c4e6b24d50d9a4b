"""Reads models, adapters and tokenizers that others wrote, or refuses them with one message.

For a damaged folder, `transformers`, PEFT and `tokenizers` raise anything, or fill in random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llmtrain.errors import CheckpointError, Problem, UserError, abbreviate, reason
from llmtrain.models.adapter_files import wrong_values
from llmtrain.models.hub_names import remote_code_errors
from llmtrain.models.images import runnable_llama4
from llmtrain.models.pretrained import is_finite, stored_as_integers
from llmtrain.overrides.transformers import checked_loading
from llmtrain.plan.facts.classifier import SUFFIX
from llmtrain.plan.facts.wrapper import is_wrapper
from llmtrain.system.hub import probe_hub_for, stored_file
from llmtrain.system.untrusted import file_fault, is_folder, read_json, require_regular_files, utf8_name

AGAIN = "write or download it again"
INSTALL = "install that package; an adapter of a quantized base needs none if it is merged (export --merge)"


@contextmanager
def reading(folder: Path | str, failed: str) -> Iterator[None]:
    """Raises CheckpointError, which names the folder, for anything that a library raises while it reads or runs it.

    failed: what did not work, such as `its tokenizer cannot be read`. Raises RecipeError like `remote_code_errors`.
    """
    _check_files(Path(folder))
    try:
        with remote_code_errors(str(folder)):
            yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = f"{failed}: {type(error).__name__}: {reason(error)}"
        fix = INSTALL if isinstance(error, ImportError) else AGAIN
        raise CheckpointError(Problem("model.folder", str(folder), message, fix)) from error


def _check_files(folder: Path) -> None:
    try:
        if is_folder(folder):
            require_regular_files(folder)
    except OSError as error:
        raise CheckpointError(Problem("model.folder", str(error.filename or folder), file_fault(error))) from None


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a folder or hub repository; its own code is never run. Raises CheckpointError."""
    with reading(folder, "its tokenizer or its config.json cannot be read"), utf8_name(Path(folder)) as named:
        made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(named), trust_remote_code=False)
        return made


def load_causal_lm(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """Returns the model of a folder, with the adapter if it holds one.

    Raises CheckpointError unless the model and the adapter have exactly the weights that they need, as finite floating
    point numbers, and RecipeError if there is code that may not be run.
    """

    def check(model: PreTrainedModel, source: str, differences: Any) -> None:
        name = str(folder) if source == str(named) else source
        if problems := list(_differences(name, model, differences)) or list(_wrong_values(name, model)):
            raise CheckpointError(problems)

    with reading(folder, "its model cannot be loaded"), utf8_name(folder) as named:
        if (folder / "adapter_config.json").is_file():
            import peft

            lora = peft.PeftConfig.from_pretrained(str(named))
            probe_hub_for(str(lora.base_model_name_or_path), lora.revision)
            if isinstance(lora, peft.LoraConfig) and (wrong := wrong_values(lora)):
                raise CheckpointError(Problem("model.adapter", str(folder), f"its adapter has {wrong}", AGAIN))
        _check_head(folder)
        kind = AutoModelForMultimodalLM if _is_multimodal(named) else AutoModelForCausalLM
        with checked_loading(check):
            model: PreTrainedModel = kind.from_pretrained(str(named), trust_remote_code=trust_remote_code)
        return runnable_llama4(model)


def _is_multimodal(folder: Path) -> bool:
    """Whether a folder holds a multimodal model whose text model llmtrain trains, or an adapter of one."""
    name, revision = str(folder), None
    if (file := folder / "adapter_config.json").is_file():
        settings = read_json(file, dict[str, Any])
        name, revision = str(settings.get("base_model_name_or_path")), settings.get("revision")
    config = stored_file(name, "config.json", revision)
    return config is not None and is_wrapper(str(read_json(config, dict[str, Any]).get("model_type")))


def _check_head(folder: Path) -> None:
    """Raises CheckpointError for a classifier, which has no logits of tokens."""
    file = folder / "config.json"
    for name in (read_json(file, dict[str, Any]).get("architectures") or ()) if file.is_file() else ():
        if str(name).endswith(SUFFIX):
            message = f"holds a classifier ({name}), which has no head over the vocabulary: it cannot continue texts"
            fix = f"load it with AutoModel{SUFFIX}"
            raise CheckpointError(Problem("model.classifier", str(folder), message, fix))


def _differences(name: str, model: PreTrainedModel, report: Any) -> Iterator[Problem]:
    """Yields how the weights of a model's files differ from those that it needs.

    found: what `transformers` reports about them.
    """
    if report.missing_keys:
        message = f"lacks {len(report.missing_keys)} of its model's weights: {abbreviate(sorted(report.missing_keys))}"
        yield Problem("model.weights", name, message, AGAIN)
    if report.mismatched_keys:
        weight, here, needed = min(report.mismatched_keys)
        message = (
            f"{len(report.mismatched_keys)} of its weights have other shapes than its model's, such as '{weight}': "
        )
        yield Problem("model.weights", name, f"{message}{list(here)}, not {list(needed)}", AGAIN)
    if report.unexpected_keys and not _is_part(name, model):
        message = f"{len(report.unexpected_keys)} of its weights do not belong to its model: "
        fix = "use the configuration that was written with the weights"
        yield Problem("model.weights", name, message + abbreviate(sorted(report.unexpected_keys)), fix)
    for error in (*report.error_msgs, *report.conversion_errors.values()):
        yield Problem("model.weights", name, f"its weights cannot be loaded: {reason(ValueError(error))}", AGAIN)


def _is_part(name: str, model: PreTrainedModel) -> bool:
    """Whether a model is the text model of a larger one, whose other weights `transformers` leaves out."""
    file = stored_file(name, "config.json")
    return file is not None and read_json(file, dict[str, Any]).get("model_type") != model.config.model_type


def _wrong_values(name: str, model: PreTrainedModel) -> Iterator[Problem]:
    """Yields which weights are not finite floating point numbers."""
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    if is_folder(Path(name)) and not is_quantized and (names := stored_as_integers(Path(name), model)):
        message = f"{len(names)} of its weights are integers, not floating point numbers: {abbreviate(names)}"
        yield Problem("model.weights", name, message, AGAIN)
    if names := [name for name, parameter in model.named_parameters() if not is_finite(parameter)]:
        message = f"{len(names)} of its weights contain NaN or infinity: {abbreviate(names)}"
        yield Problem("model.weights", name, message, AGAIN)
