"""From a checkpoint to a Hugging Face folder, in one process, on the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from llmtrain.checkpoint.check import verify
from llmtrain.checkpoint.state import read_plan
from llmtrain.engines.deepspeed import WEIGHT_DTYPES
from llmtrain.engines.state import Source
from llmtrain.errors import CheckpointError, Problem
from llmtrain.models import model_configuration
from llmtrain.plan import Plan


def export(checkpoint: Path, tokenizer: Path, out: Path) -> None:
    """Writes weights, configuration and tokenizer to `out`, as `from_pretrained` reads them.

    The weights keep the type that the forward pass read (bf16 of a bf16 run), so that the exported
    model has the run's evaluation loss. Written under a temporary name and renamed, so `out` is whole
    or not there. Raises CheckpointError for a damaged checkpoint, or where `out` has content.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(Problem("export.exists", str(out), "is not empty", "name a new folder"))
    verify(checkpoint)
    plan = read_plan(checkpoint)
    model = empty_model(plan)
    weights = weights_of(checkpoint, model)
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    text = AutoTokenizer.from_pretrained(tokenizer)
    for config in (model.config, model.generation_config or GenerationConfig()):
        config.eos_token_id, config.pad_token_id = text.eos_token_id, text.pad_token_id
        config.bos_token_id = text.bos_token_id
    model.save_pretrained(temporary, state_dict=weights)
    text.save_pretrained(temporary)
    if out.exists():
        out.rmdir()
    temporary.rename(out)


def empty_model(plan: Plan) -> PreTrainedModel:
    """The model of a plan without memory, in the type that its forward pass reads."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_configuration(plan.recipe),
            dtype=WEIGHT_DTYPES.get(plan.recipe.parallel.precision, torch.float32),
            trust_remote_code=plan.recipe.model.trust_remote_code,
        )
    return model


def weights_of(checkpoint: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight of a checkpoint, in the shape and type that `model` has for it; it may be on the meta device."""
    source = Source(checkpoint)
    like = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: source.whole(name).view(like[name].shape).to(like[name].dtype) for name in source.all}
