"""Writes the training state of a checkpoint for other programs: DeepSpeed, or any that uses torch's distributed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from llmtrain.checkpoint.base import export_reader
from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import check_trusted, read_plan
from llmtrain.checkpoint.export import stored_names
from llmtrain.checkpoint.folder import check_new, new_folder
from llmtrain.checkpoint.foreign.state import STEP
from llmtrain.engines.optim import rate_of
from llmtrain.engines.state.save_load import CheckpointReader
from llmtrain.errors import CheckpointError, Problem
from llmtrain.models import model_configuration
from llmtrain.models.adapter import select_trained
from llmtrain.models.hub_names import aliases, empty_model
from llmtrain.models.loss import freeze_unused
from llmtrain.plan.optimizers import optimizer_of
from llmtrain.recipe import Recipe
from llmtrain.system.host import installed_version
from llmtrain.system.piece_headers import WEIGHT

Form = Literal["deepspeed-universal", "dcp"]
MOST_GROUPS = 64
"""Number of groups in `param_groups` of a universal checkpoint: an engine with more groups cannot load it."""
UNIVERSAL_VERSION = 0.2


class _State:
    """The state of a checkpoint by the names of a model of transformers, read one tensor at a time."""

    def __init__(self, checkpoint: Path, step: int, recipe: Recipe, reader: CheckpointReader) -> None:
        whole = freeze_unused(empty_model(model_configuration(recipe), torch.float32, recipe.model.trust_remote_code))
        part = select_trained(recipe, whole.config)
        self.step, self.recipe, self._reader = step, recipe, reader
        self.like = dict(whole.state_dict())
        stored = stored_names(checkpoint, reader, whole)
        group_of = aliases(whole)
        self.names = {group_of[name][0]: name for name in stored}
        """The first name of each weight → the name under which the checkpoint holds it."""
        self.aliases = {name: group_of[name] for name in self.names}
        self.trained = [
            name
            for name, weight in whole.named_parameters()
            if name in self.names and weight.requires_grad and (part is None or name in part.weights)
        ]
        self.kinds = optimizer_of(recipe.optim).states(recipe.optim)

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Returns a weight, or a state of it, in its shape."""
        return self._reader.whole(self.names[name], kind).view(self.like[name].shape)

    def updates(self, name: str) -> float:
        """Returns the number of updates that the optimizer has counted."""
        return max((shard.steps or 0.0 for shard in self._reader.shards[self.names[name]]), default=0.0)

    def groups(self) -> list[dict[str, Any]]:
        """Returns the optimizer's groups, with options by torch's names: matrices, which decay, and others."""
        optim = self.recipe.optim
        common: dict[str, Any] = {"lr": rate_of(self.recipe, self.step + 1), "initial_lr": optim.lr}
        if optim.name != "sgd":
            common |= {"betas": tuple(optim.betas)} | ({"eps": optim.eps} if optim.name != "lion" else {})
        else:
            common |= {"momentum": optim.betas[0]}
        matrices = [name for name in self.trained if self.like[name].ndim >= 2]
        others = [name for name in self.trained if self.like[name].ndim < 2]
        divided = ((matrices, optim.weight_decay), (others, 0.0))
        return [{**common, "weight_decay": decay, "params": names} for names, decay in divided if names]


def export_state(checkpoint: Path, out: Path, form: Form, *, trust_remote_code: bool = False) -> None:
    """Writes weights, optimizer states and step to `out`, which is complete or absent.

    Memory holds one tensor at a time. Raises CheckpointError for a damaged checkpoint, one whose state has no such
    form, for code that may not be run, and if `out` has content or cannot be written.
    """
    check_new(out)
    manifests = verify_checkpoint(checkpoint)
    plan = read_plan(checkpoint)
    recipe = plan.recipe
    check_trusted(checkpoint, plan, trust_remote_code)
    supported = ("adamw", "adam") if form == "deepspeed-universal" else ("adamw", "adam", "lion", "sgd")
    problems = []
    if recipe.optim.name not in supported:
        message = f"'{recipe.optim.name}' keeps states that --format {form} has no form for ({', '.join(supported)})"
        problems.append(Problem("export.optimizer", "optim.name", message, "export the weights alone"))
    if recipe.model.adapter is not None:
        message = f"--format {form} has no form for the state of an adapter"
        problems.append(Problem("export.adapter", "model.adapter", message, "export its weights alone"))
    if problems:
        raise CheckpointError(problems)
    step = manifests[0].step
    state = _State(checkpoint, step, recipe, export_reader(checkpoint, plan))
    with new_folder(out) as folder:
        if form == "dcp":
            _write_distributed(state, folder)
        else:
            _write_universal(state, folder)


def _write_universal(state: _State, folder: Path) -> None:
    tag = f"global_step{state.step}"
    root = folder / tag
    (root / "zero").mkdir(parents=True)
    for name in state.names:
        place = root / "zero" / name
        place.mkdir()
        torch.save({"param": state.read(name).float()}, place / "fp32.pt")
        if name in state.trained:
            for kind in state.kinds:
                torch.save({"param": state.read(name, kind).float()}, place / f"{kind}.pt")
            torch.save(torch.tensor(state.updates(name)), place / f"{STEP}.pt")
    version = installed_version("deepspeed")
    # Stage 3 would give the options of the first group to all of them, so those that differ are left out.
    options = {key: value for key, value in state.groups()[0].items() if key not in ("params", "weight_decay")}
    updates = torch.tensor(max(map(state.updates, state.trained), default=0.0))
    common = {
        "ds_version": version,
        "param_groups": [dict(options) for _ in range(MOST_GROUPS)],
        "optimizer_state_dict": {"state": {0: {STEP: updates}}, "param_groups": [dict(options)]},
        "zero_stage": 1,
    }
    torch.save(common, root / "zero" / "optimizer_state.pt")
    step = state.step
    document = {
        "module": {},
        "optimizer": None,
        "lr_scheduler": {
            "last_epoch": step,
            "_step_count": step + 1,
            "lr_lambdas": [],
            "last_batch_iteration": step - 1,
        },
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": step * state.recipe.batch.global_batch_size,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "param_shapes": None,
        "ds_config": {},
        "ds_version": version,
        "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # stages 0 to 2, and 3
        torch.save(document, root / name)
    (folder / "latest_universal").write_text(tag)


class _StreamingPlanner(DefaultSavePlanner):
    """Writes a state dictionary of tensors on the meta device, each of which is read when it is written."""

    def __init__(self, read: dict[int, Callable[[], Tensor]]) -> None:
        """read: by the id of the tensor in its place."""
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        placed = super().lookup_object(index)
        return self._read[id(placed)]() if id(placed) in self._read else placed


def _write_distributed(state: _State, folder: Path) -> None:
    """Writes what `get_state_dict(model, optimizer)` returns, as {"model": …, "optimizer": …}."""
    read: dict[int, Callable[[], Tensor]] = {}

    def placed(name: str, kind: str) -> Tensor:
        like = torch.empty(state.like[name].shape, dtype=torch.float32, device="meta")
        if kind == WEIGHT and not state.like[name].is_floating_point():
            like = like.to(state.like[name].dtype)
        read[id(like)] = lambda: state.read(name, kind).to(like.dtype)
        return like

    weights = {alias: placed(name, WEIGHT) for name in state.names for alias in state.aliases[name]}
    states = {
        name: {kind: placed(name, kind) for kind in state.kinds}
        | ({STEP: torch.tensor(state.updates(name))} if state.recipe.optim.name in ("adam", "adamw") else {})
        for name in state.trained
    }
    saved = {
        "model": weights,
        "optimizer": {"state": states, "param_groups": state.groups()},
        "train_state": {"step": torch.tensor(state.step)},
    }
    save(
        saved,
        storage_writer=FileSystemWriter(folder),
        planner=_StreamingPlanner(read),
        no_dist=True,
    )
