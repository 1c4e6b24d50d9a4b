"""Chooses the reader of a folder that another program wrote."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from llmtrain.checkpoint.foreign.distributed import is_distributed, read_distributed
from llmtrain.checkpoint.foreign.megatron import is_megatron, latest_iteration, read_megatron
from llmtrain.checkpoint.foreign.pickles import fail
from llmtrain.checkpoint.foreign.plain import TRAINER_STATE, is_plain, read_plain, steps_of_trainer, unread_files
from llmtrain.checkpoint.foreign.state import ForeignState, align_states
from llmtrain.checkpoint.foreign.zero import is_deepspeed, latest_folder, read_deepspeed
from llmtrain.checkpoint.manifest import manifest_files
from llmtrain.errors import reason
from llmtrain.system.untrusted import UNREADABLE, file_fault

READ = (
    "a folder of DeepSpeed, checkpoint-N of the Trainer, save_state of Accelerate, torch.distributed.checkpoint, or "
    "torch_dist of Megatron"
)
FSDP_MODEL, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""Folders of Accelerate with FSDP."""


def read_foreign(folder: Path, model: PreTrainedModel) -> ForeignState:
    """Reads the state in a folder of another program for a model; of its tensors, only what describes them.

    Raises CheckpointError for a folder that is of no known kind or not complete, and for pickles that would run code.
    """
    try:
        state = _read(folder, model)
        align_states(state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # whatever its files may hold
        message = f"has an unknown layout ({type(error).__name__}: {reason(error)})"
        fail(folder, message, "start from its weights with model.pretrained")
    return state


def _read(folder: Path, model: PreTrainedModel) -> ForeignState:
    try:
        names = {path.name for path in folder.iterdir()}
    except UNREADABLE as error:
        fail(folder, f"cannot be read: {file_fault(error)}", f"name {READ}")
    if manifest_files(folder):
        fail(folder, "is a checkpoint of llmtrain", "continue from it with llmtrain train --resume")
    if is_distributed(folder):
        return read_megatron(folder, model) if is_megatron(folder) else read_distributed(folder)
    if latest := latest_iteration(folder):
        return read_megatron(latest, model)
    if is_deepspeed(folder):
        return read_deepspeed(folder)
    if FSDP_MODEL in names and is_distributed(folder / FSDP_MODEL):
        others = [folder / FSDP_OPTIMIZER] if is_distributed(folder / FSDP_OPTIMIZER) else []
        return _of_trainer(folder, read_distributed(folder / FSDP_MODEL, others))
    if latest := latest_folder(folder):
        if not is_deepspeed(latest):
            fail(latest, "has no model states of DeepSpeed", f"name {READ}")
        return _of_trainer(folder, read_deepspeed(latest))
    if is_plain(folder):
        return read_plain(folder)
    if "metadata.json" in names or any(name.startswith("mp_rank_") for name in names):
        message = "is a checkpoint of Megatron in another format than torch_dist"
        fail(folder, message, "export it with Megatron-Bridge, and train from its weights with model.pretrained")
    fail(folder, "has no optimizer states of a known kind", f"name {READ}")


def _of_trainer(folder: Path, state: ForeignState) -> ForeignState:
    """Adds what the Trainer or Accelerate keep around the folder of another library."""
    kind = "Trainer" if (folder / TRAINER_STATE).is_file() else "Accelerate" if unread_files(folder) else ""
    state.program = f"{kind} with {state.program}" if kind else state.program
    steps = steps_of_trainer(folder)
    state.step = state.step if steps is None else steps
    state.unread = list(dict.fromkeys([*state.unread, *unread_files(folder)]))
    return state
