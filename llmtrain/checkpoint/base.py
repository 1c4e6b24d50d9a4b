"""The frozen pretrained weights of a run: how they are identified, and where an export finds them.

A checkpoint of a run that freezes pretrained weights does not hold these, so its size depends only on what is trained.
It has a hash of their files instead, and a run continues only with the same weights.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from llmtrain.engines.optimizers.own import averaged_weight
from llmtrain.engines.optimizers.schedule_free import mean_of
from llmtrain.engines.runtime.agree import broadcast
from llmtrain.engines.runtime.distributed import rank
from llmtrain.engines.state.files import StoredShard
from llmtrain.engines.state.save_load import CheckpointReader
from llmtrain.errors import CheckpointError, Problem
from llmtrain.models import model_configuration
from llmtrain.models.adapter import select_trained
from llmtrain.models.hub_names import aliases, empty_model
from llmtrain.models.nf4 import round_trip
from llmtrain.models.pretrained import Pretrained, hash_of_weights, read_pretrained
from llmtrain.plan import Plan
from llmtrain.plan.facts.own_optimizer import TriedOptimizer
from llmtrain.plan.facts.pretrained_config import pretrained_folder
from llmtrain.plan.optimizers import POINT, optimizer_of
from llmtrain.system.piece_headers import WEIGHT


def base_of(plan: Plan) -> str:
    """Returns the hash of the weights that checkpoints of a run leave out, and their quantization, if any.

    Among them are the parts of a multimodal model beside its text model. Empty if checkpoints leave out none. Called
    by all ranks; the first one reads the files.
    """
    model = plan.recipe.model
    if not (model.omits_base_weights or plan.model.part):
        return ""
    weights_hash: str = broadcast(hash_of_weights(model) if rank() == 0 else "")
    return weights_hash if model.quantize == "none" else f"{weights_hash} in {model.quantize}"


def with_base(plan: Plan, base: str | None) -> Plan:
    """Returns the plan with another folder or hub name of the frozen weights, if `base` is one.

    Raises RecipeError if they are in a folder that does not exist.
    """
    if not (plan.recipe.model.omits_base_weights or plan.model.part):
        return plan
    recipe = plan.recipe if base is None else plan.recipe.with_(**{"model.pretrained": base, "model.revision": None})
    pretrained_folder(recipe.model, fix="--base FOLDER names the folder that holds these weights now")
    return plan.model_copy(update={"recipe": recipe})


def check_base(checkpoint: Path, before: str, now: str, instead: str = "") -> None:
    """Raises CheckpointError if a checkpoint was trained on other frozen weights than those that are loaded now.

    instead: what else can be done.
    """
    if before != now:
        message = f"was trained on frozen weights with the hash {before or 'none'}, and model.pretrained has {now}"
        fix = f"restore the files of model.pretrained, or set model.revision to the revision of these files{instead}"
        raise CheckpointError(Problem("checkpoint.base", str(checkpoint), message, fix))


def export_reader(checkpoint: Path, plan: Plan) -> CheckpointReader:
    """Returns a reader of the weights to export from a checkpoint, including frozen ones that it leaves out."""
    return ReaderWithBase(checkpoint, plan) if plan.recipe.model.omits_base_weights else ExportReader(checkpoint, plan)


class ExportReader(CheckpointReader):
    """Reads the weights to export: the averaged ones, if the optimizer averages (as schedule-free AdamW)."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        super().__init__(folder)
        optim = plan.recipe.optim
        self._beta = optim.betas[0] if POINT in optimizer_of(optim).states(optim) else None
        self._recipe = plan.recipe
        self._own = plan.optimizer if plan.optimizer and plan.optimizer.averages else None

    def whole(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Returns a whole weight, flat, on the CPU."""
        weight = super().whole(name, kind)
        if self._own and kind == WEIGHT:
            return self._averaged_by_own(name, weight, self._own)
        if self._beta is None or kind != WEIGHT or not any(POINT in shard.kinds for shard in self.shards[name]):
            return weight
        return mean_of(weight, super().whole(name, POINT), self._beta)

    def _averaged_by_own(self, name: str, weight: Tensor, tried: TriedOptimizer) -> Tensor:
        kinds = {kind: shard for shard in self.shards[name] for kind in shard.kinds}
        if not kinds[WEIGHT].steps:  # untrained, or not yet
            return weight
        shapes = {kind: shard.weight_slice.shape for kind, shard in kinds.items()}
        states = {
            kind: super(ExportReader, self).whole(name, kind).view(shapes[kind]) for kind in kinds.keys() - {WEIGHT}
        }
        return averaged_weight(weight.view(shapes[WEIGHT]), states, self._recipe, tried).flatten()


class ReaderWithBase(ExportReader):
    """Reads a checkpoint together with the pretrained weights that its run has frozen."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        super().__init__(folder, plan)
        model = plan.recipe.model
        config = model_configuration(plan.recipe)
        groups = aliases(empty_model(config, torch.float32, model.trust_remote_code))
        stored = {alias for name in super().shards for alias in groups.get(name, (name,))}
        self._base: dict[str, list[StoredShard]] = {name: [] for name in groups if name not in stored}
        self._model, self._config = model, config
        trained = select_trained(plan.recipe, config)
        self._packed = trained.packed if trained else frozenset()

    @cached_property
    def _pretrained(self) -> Pretrained:
        return read_pretrained(self._model, self._config)

    @property
    def shards(self) -> dict[str, list[StoredShard]]:
        """The shards of all ranks, by the weight's name; frozen weights have none."""
        return super().shards | self._base

    def whole(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Returns a whole weight, flat, on the CPU; a 4-bit one as the values with which the run trains."""
        if name not in self._base:
            return super().whole(name, kind)
        weight = self._pretrained.tensor(name)
        return (round_trip(weight) if name in self._packed else weight).flatten()
