"""The counters of a DeepSpeed engine: steps, the position of the schedule, and the loss scale."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine as _Engine

from llmtrain.engines.held import weights_changed
from llmtrain.engines.state import PROGRESS_FILE, resume_schedule
from llmtrain.errors import CheckpointError, Problem

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Attributes of DeepSpeed's engine."""


def progress(engine: _Engine) -> dict[str, Any]:
    """Returns the counters as JSON values, equal on all ranks."""
    return {
        "schedule": engine.lr_scheduler.last_epoch,
        "deepspeed": {name: getattr(engine, name) for name in COUNTERS},
        "loss_scale": _loss_scale(engine),
    }


def resumed(engine: _Engine, progress: dict[str, Any]) -> None:
    """Restores the model's weights and the counters after the optimizer's tensors have been loaded.

    All ranks call it. Counters that only DeepSpeed keeps are missing if another engine wrote the checkpoint.
    Raises CheckpointError if the saved loss scaler has other fields than this one.
    """
    weights_changed(engine.optimizer)
    resume_schedule(engine.lr_scheduler, progress["schedule"])
    for name, value in progress.get("deepspeed", {"global_steps": progress["schedule"]}).items():
        setattr(engine, name, value)
    saved, scalers, own = progress.get("loss_scale", {}), _scalers(engine), _loss_scale(engine)
    for name in saved.keys() & scalers.keys():
        if saved[name].keys() != own[name].keys():
            message = f"of '{name}' it has {', '.join(sorted(saved[name]))}, and not {', '.join(sorted(own[name]))}"
            raise CheckpointError(Problem("checkpoint.progress", PROGRESS_FILE, message))
        if name == "loss_scaler":
            vars(scalers[name]).update(saved[name])
        else:
            scalers[name].load_state_dict(saved[name])


def _scalers(engine: _Engine) -> dict[str, Any]:
    """Returns DeepSpeed's scaler for fp16 and torch's for autocast_fp16, which DeepSpeed keeps in one of two places."""
    autocast = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    found = {"loss_scaler": getattr(engine.optimizer, "loss_scaler", None), "gradscaler": autocast}
    return {name: scaler for name, scaler in found.items() if scaler is not None}


def _loss_scale(engine: _Engine) -> dict[str, dict[str, Any]]:
    scalers = _scalers(engine)
    found = {}
    if "loss_scaler" in scalers:
        values = vars(scalers["loss_scaler"])
        found["loss_scaler"] = {key: value for key, value in values.items() if isinstance(value, int | float)}
    if "gradscaler" in scalers:
        found["gradscaler"] = scalers["gradscaler"].state_dict()
    return found
