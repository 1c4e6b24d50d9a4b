"""What a checkpoint's pickles may name. DeepSpeed loads them with `weights_only=False`, so this is asked first."""

from __future__ import annotations

from pathlib import Path

import torch

from llmtrain.errors import CheckpointError, Problem

ALLOWED = {
    # What DeepSpeed 0.19.8 itself puts beside tensors in an optimizer shard.
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


def check_pickles(folder: Path) -> None:
    """Raises CheckpointError naming every pickle that would call anything beyond tensors and ALLOWED."""
    problems = [problem for path in sorted(folder.rglob("*.pt")) if (problem := _check(path))]
    if problems:
        raise CheckpointError(problems)


def _check(path: Path) -> Problem | None:
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        return Problem("checkpoint.pickle", str(path), f"cannot be read: {error}")
    if unknown := sorted(named - ALLOWED):
        return Problem("checkpoint.pickle", str(path), f"would run {', '.join(unknown)} when loaded; refused")
    return None
