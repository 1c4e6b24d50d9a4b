"""Whole weights from the checkpoints of expert parallel runs, whose experts DeepSpeed writes apart."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.engines.expert_names import DOWN, GATE, UP, hugging_face_weights
from llmtrain.engines.tensor import join_shards
from llmtrain.plan import Layout

_RANKS = re.compile(r"rank_(\d+)")
"""In a file's name: the data parallel rank, then the tensor parallel one."""


def weights_of_experts(folder: Path, preset: str, layout: Layout) -> dict[str, Tensor]:
    """Every weight under its Hugging Face name, on the CPU.

    folder: DeepSpeed's files, whose pickles have been checked; preset: its name for the family. At ZeRO 3
    the weights are those of the fp32 optimizer, as DeepSpeed's own conversion gives them for other models.
    """
    join = _join_shards if layout.zero_stage == 3 else _join_files
    weights, blocks = join(folder, layout.tp)
    presets = dict.fromkeys(blocks, preset)
    return dict(hugging_face_weights(weights, presets, weights.__getitem__))


def _join_files(folder: Path, tensor: int) -> tuple[dict[str, Tensor], list[str]]:
    """ZeRO 0 to 2: a file of each tensor parallel rank, and one for each expert of each layer."""
    states = [_read(folder / f"mp_rank_{rank:02d}_model_states.pt") for rank in range(tensor)]
    weights = join_shards(folder, [state["module"] for state in states])
    layers = states[0]["ds_autoep_layers"]
    for layer in layers:
        number, path = layer["moe_layer_id"], layer["module_path"]
        # Whichever tensor parallel rank has written it.
        files = [
            _read(next(folder.glob(f"layer_{number}_expert_{expert}_mp_rank_*_model_states.pt")))
            for expert in range(layer["num_experts"])
        ]
        for part in (GATE, DOWN, UP):
            name = f"{path}.{part}"
            weights[name] = torch.stack([file[f"{name}.{expert}"] for expert, file in enumerate(files)])
    return weights, [layer["module_path"] for layer in layers]


def _join_shards(folder: Path, tensor: int) -> tuple[dict[str, Tensor], list[str]]:
    """ZeRO 3: each rank has a shard of every weight, of the experts and of what is cut only of its own."""
    models = _of_ranks(folder, "zero_pp_rank_*_model_states.pt")
    optimizers = [one["optimizer_state_dict"] for one in _of_ranks(folder, "*zero_pp_rank_*_optim_states.pt")]
    slices: list[dict[str, Tensor]] = [{} for _ in range(tensor)]
    experts: dict[str, list[Tensor]] = {}
    for index, group in enumerate(optimizers[0]["ds_zero_partition_groups"]):
        is_expert = group["families"] == ["autoep_expert"]
        # Ranks that share a group's weights, for every set of weights; those of experts in their order.
        teams = sorted({tuple(one["ds_zero_partition_groups"][index]["partition_ranks"]) for one in optimizers})
        for team in teams:
            shards = [optimizers[rank]["fp32_flat_groups"][index].detach() for rank in team]
            for name, weight in _unflatten(models[team[0]]["param_shapes"][index], shards):
                if is_expert:
                    experts.setdefault(name, []).append(weight)
                else:
                    slices[team[0] % tensor][name] = weight
    weights = {name: models[0]["module"][name] for name in models[0]["buffer_names"]} | join_shards(folder, slices)
    weights |= {name: torch.cat(parts) for name, parts in experts.items()}
    return weights, [layer["module_path"] for layer in models[0]["ds_autoep_layers"]]


def _unflatten(shapes: dict[str, tuple[int, ...]], shards: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a group from the ranks' shards: each rank has an equal piece of each weight, padded at the end."""
    offset = 0
    for name, shape in shapes.items():
        elements = math.prod(shape)
        piece = -(-elements // len(shards))
        whole = torch.cat([shard[offset : offset + piece] for shard in shards])
        yield name, whole[:elements].view(shape)
        offset += piece


def _of_ranks(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The files of all ranks, by rank: those of a tensor parallel group are neighbours."""
    files = sorted(folder.glob(pattern), key=lambda file: [int(number) for number in _RANKS.findall(file.name)])
    # Beside tensors there are DeepSpeed's own records in them.
    return [_read(file, weights_only=False) for file in files]


def _read(file: Path, weights_only: bool = True) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)
    return content
