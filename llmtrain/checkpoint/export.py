"""From a checkpoint to a Hugging Face folder, in one process, on the CPU."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from llmtrain.checkpoint.experts import weights_of_experts
from llmtrain.checkpoint.state import check, read_plan
from llmtrain.engines import rank_files
from llmtrain.engines.deepspeed import TAG, WEIGHT_DTYPES
from llmtrain.engines.reference import saved_weights
from llmtrain.engines.tensor import join_shards
from llmtrain.errors import CheckpointError, Problem
from llmtrain.models import model_configuration
from llmtrain.models.tensor import Split, plan_split
from llmtrain.plan import Plan
from llmtrain.plan.families import EXPERT_PRESETS


def export(checkpoint: Path, tokenizer: Path, out: Path) -> None:
    """Writes weights, configuration and tokenizer to `out`, as `from_pretrained` reads them.

    The weights keep the type that the forward pass read (bf16 of a bf16 run), so that the exported
    model has the run's evaluation loss. Written under a temporary name and renamed, so `out` is whole
    or not there. Raises CheckpointError for a damaged checkpoint, or where `out` has content.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(Problem("export.exists", str(out), "is not empty", "name a new folder"))
    check(checkpoint)
    plan = read_plan(checkpoint)
    dtype = WEIGHT_DTYPES.get(plan.recipe.parallel.precision, torch.float32)
    model = _empty_model(plan, dtype)
    weights = _weights(checkpoint, plan, dtype)
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


def _empty_model(plan: Plan, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_configuration(plan.recipe), dtype=dtype, trust_remote_code=plan.recipe.model.trust_remote_code
        )
    return model


def _weights(checkpoint: Path, plan: Plan, dtype: torch.dtype) -> dict[str, Tensor]:
    if plan.recipe.parallel.strategy in ("horovod", "data_parallel"):
        return saved_weights(checkpoint)
    if plan.recipe.parallel.strategy in ("ddp", "fsdp2"):
        return {name: tensor.to(dtype) for name, tensor in rank_files.whole_weights(checkpoint).items()}
    folder = checkpoint / TAG
    if plan.layout.ep > 1:
        joined = weights_of_experts(folder, EXPERT_PRESETS[plan.model.model_type], plan.layout)
        return {name: tensor.to(dtype) for name, tensor in joined.items()}
    if plan.layout.pp > 1:
        split = plan_split(_empty_model(plan, dtype), plan.layout.tp) if plan.layout.tp > 1 else Split({}, {})
        return _weights_of_stages(folder, plan.layout.pp, split)
    shards = [_weights_of_rank(folder, rank, plan, dtype) for rank in range(plan.layout.tp)]
    return join_shards(folder, shards)


def _weights_of_rank(folder: Path, rank: int, plan: Plan, dtype: torch.dtype) -> dict[str, Tensor]:
    """What tensor parallel rank `rank` holds, of all data parallel ranks."""
    if plan.layout.zero_stage < 3:
        file = folder / f"mp_rank_{rank:02d}_model_states.pt"
        weights: dict[str, Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)["module"]
        return weights
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with tempfile.TemporaryDirectory() as view:
        # DeepSpeed's converter takes all files of a folder for shards of one model.
        for file in folder.glob(f"*_mp_rank_{rank:02d}_*_states.pt"):
            (Path(view) / file.name).symlink_to(file.absolute())
        whole: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(Path(view).parent), Path(view).name)
    return {name: tensor.to(dtype) for name, tensor in whole.items()}


def _weights_of_stages(folder: Path, stages: int, split: Split) -> dict[str, Tensor]:
    """Joins a pipeline: of each stage a file of each tensor parallel rank, whose names are below `model.`."""
    weights: dict[str, Tensor] = {}
    for stage in range(stages):
        files = sorted(folder.glob(f"layer_{stage:02d}-*model_states.pt"))
        parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]
        for own in parts[0]:
            name = own.removeprefix("model.")
            shard = split.shards.get(name)
            if name not in weights:  # the first copy of a tied weight is as good as any other
                weights[name] = shard.whole([part[own] for part in parts]) if shard else parts[0][own]
    return weights
