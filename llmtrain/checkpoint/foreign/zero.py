"""Reads checkpoints of DeepSpeed: every ZeRO stage, pipelines, and universal checkpoints.

ZeRO flattens the parameters of a group in the order of `param_shapes`. At stages 1 and 2 each rank holds a range of the
result, at stage 3 a range of each parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.checkpoint.foreign.pickles import Record, StoredTensor, fail, read_torch
from llmtrain.checkpoint.foreign.state import (
    STEP,
    ForeignGroup,
    ForeignState,
    ForeignTensor,
    options_of,
    plain_number,
    split_state,
    unnamed_optimizer,
)
from llmtrain.errors import abbreviate
from llmtrain.system.piece_headers import WEIGHT
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_text

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)(?:_\d+)?_optim_states\.pt")
LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_.*_states\.pt|expp_rank_\d+.*")
UNIVERSAL = "zero"
"""Folder of a universal checkpoint with a folder for each parameter."""
MERGE = "write it as a universal checkpoint (python -m deepspeed.checkpoint.ds_to_universal), and import that"


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is one of DeepSpeed's, with model states, not the folder around it."""
    return any(MODEL.fullmatch(path.name) for path in folder.iterdir())


def read_deepspeed(folder: Path) -> ForeignState:
    """Reads a folder with model states. Raises CheckpointError for what is not supported or not complete."""
    names = sorted(path.name for path in folder.iterdir())
    if any(EXPERT.match(name) for name in names):
        message = "has experts of DeepSpeed-MoE, whose layers no family of transformers has"
        fail(folder, message, "convert its weights to a model of transformers, and set model.pretrained")
    if "offloaded_tensors" in names:
        fail(folder, "has optimizer states on NVMe, in the layout of its ranks", MERGE)
    # Of each model parallel rank, the file of its first data parallel rank.
    models = {match[2]: name for name in reversed(names) if (match := MODEL.fullmatch(name))}
    documents = {stage: read_torch(folder / name) for stage, name in sorted(models.items())}
    first = next(iter(documents.values()))
    state = ForeignState(
        f"DeepSpeed {first.get('ds_version', '(of unknown version)')}", int(plain_number(first.get("global_steps")))
    )
    if first.get("mp_world_size", 1) not in (None, 1) and not any(LAYER.fullmatch(name) for name in names):
        fail(folder, f"is split among {first['mp_world_size']} ranks of a tensor parallel model", MERGE)
    _read_modules(folder, names, documents, state)
    if (folder / UNIVERSAL).is_dir():
        state.program += ", universal checkpoint"
        _read_universal(folder / UNIVERSAL, first, state)
    elif optimizers := [match for name in names if (match := OPTIMIZER.fullmatch(name))]:
        for stage, document in documents.items():
            found = sorted((match for match in optimizers if match[2] == stage), key=lambda match: int(match[1]))
            _read_zero(folder, [folder / match[0] for match in found], document, state)
        _drop_copies_of_tied(state)
    else:
        _read_unsharded(folder, documents, models, state)
    state.unread += [
        what
        for what, key in (("the state of its schedule", "lr_scheduler"), ("its data sampler", "data_sampler"))
        if first.get(key)
    ]
    return state


def _read_modules(folder: Path, names: Sequence[str], documents: Mapping[str, Any], state: ForeignState) -> None:
    """Reads the weights in the precision of the forward pass, buffers, and frozen weights."""
    for name in names:
        if match := LAYER.fullmatch(name):
            if match[2] not in (None, "00"):
                fail(folder, "is split among the ranks of a tensor parallel model", MERGE)
            content = read_torch(folder / name)
            for key, value in content.items():
                if isinstance(value, StoredTensor):
                    state.weights[f"{int(match[1])}.{key}"] = ForeignTensor.of(value)
    buffers: set[str] = set()
    for document in documents.values():
        module = document.get("module")
        for key, value in module.items() if isinstance(module, dict) else ():
            # At stage 3, what a rank has of a weight is an empty placeholder.
            if isinstance(value, StoredTensor) and (value.numel or not document.get("param_shapes")):
                state.weights[key] = ForeignTensor.of(value)
        buffers |= set(document.get("buffer_names") or ())
        fragments = document.get("frozen_param_fragments") or {}
        for key, shape in (document.get("frozen_param_shapes") or {}).items():
            if key in fragments and fragments[key].numel == math.prod(shape):
                state.weights[key] = ForeignTensor.of(fragments[key])
    state.buffers = frozenset(buffers)


def _drop_copies_of_tied(state: ForeignState) -> None:
    """Drops what the files of a pipeline's layers hold of tied weights, which have names of their own."""
    tied = {tensor.shape for name, tensor in state.weights.items() if name.startswith("tied_modules.")}
    copies = [name for name, tensor in state.weights.items() if name not in state.states and tensor.shape in tied]
    for name in copies:
        if name.split(".")[0].isdigit():
            del state.weights[name]


@dataclass(frozen=True)
class _Rank:
    """The optimizer's state of one rank: of each flat group, its tensors by kind."""

    flats: list[dict[str, StoredTensor]]
    updates: list[float]
    options: list[dict[str, Any]]


def _read_zero(folder: Path, files: list[Path], document: Mapping[str, Any], state: ForeignState) -> None:
    contents = [read_torch(file)["optimizer_state_dict"] for file in files]
    if not contents:
        fail(folder, "lacks the optimizer states of some of its stages", "complete the folder")
    first = contents[0]
    stage = _stage(first)
    count = first.get("partition_count")
    count = max(count) if isinstance(count, list) else count
    if isinstance(count, int) and count != len(files):
        fail(folder, f"has the optimizer states of {len(files)} ranks out of {count}", "complete the folder")
    shapes: list[dict[str, tuple[int, ...]]] = [
        {name: tuple(shape) for name, shape in group.items()} for group in document.get("param_shapes") or []
    ]
    if not shapes:
        fail(folder, "does not say which weights its optimizer has (no param_shapes)", MERGE)
    state.program += "" if "ZeRO" in state.program else f", ZeRO {stage}, {len(files)} ranks"
    if stage == 3:
        ranks = [_rank_of_stage_3(content) for content in contents]
        _read_stage_3(folder, ranks, shapes, state)
        _read_frozen_of_stage_3(folder, state)
    else:
        ranks = [_rank_of_stage_2(content) for content in contents]
        _read_stage_2(folder, ranks, shapes, first.get("param_alignment_paddings"), state)
    # A tied weight has a second name, under which the model's states hold it in the precision of the forward pass.
    for name, trained in (document.get("shared_params") or {}).items():
        if trained in state.states and name not in state.states:
            state.weights.pop(name, None)


def _stage(content: Mapping[str, Any]) -> int:
    stage = content.get("zero_stage", 1)
    return int(stage.arguments[0]) if isinstance(stage, Record) else int(stage)


def _rank_of_stage_2(content: Mapping[str, Any]) -> _Rank:
    base, weights = content["base_optimizer_state"], content["single_partition_of_fp32_groups"]
    if isinstance(base, list):  # an elastic checkpoint
        pairs = [(group, {STEP: content.get("base_optimizer_state_step", 0)}) for group in base]
    else:
        numbers = [group["params"][0] for group in base["param_groups"]]
        pairs = [
            (base["state"].get(number, {}), options_of(group))
            for number, group in zip(numbers, base["param_groups"], strict=True)
        ]
    return _rank(pairs, weights)


def _rank_of_stage_3(content: Mapping[str, Any]) -> _Rank:
    base, weights = content["optimizer_state_dict"], content["fp32_flat_groups"]
    pairs = [
        (base["state"].get(number, {}), options_of(group))
        for group in base["param_groups"]
        for number in group["params"]
    ]
    return _rank(pairs, weights)


def _rank(pairs: Sequence[tuple[Mapping[str, Any], dict[str, Any]]], weights: Sequence[StoredTensor]) -> _Rank:
    flats, updates = [], []
    for (state, options), weight in zip(pairs, weights, strict=True):
        tensors, steps = split_state(state, options)
        flats.append({WEIGHT: weight, **tensors})
        updates.append(steps)
    return _Rank(flats, updates, [options for _, options in pairs])


def _add(
    state: ForeignState, name: str, shape: tuple[int, ...], kinds: Mapping[str, list[tuple[StoredTensor, int, int]]]
) -> None:
    """Adds a weight and its states, each joined from ranges of flat tensors."""
    tensors = {
        kind: ForeignTensor(shape, ranges[0][0].dtype if ranges else torch.float32, partial(_joined, ranges, shape))
        for kind, ranges in kinds.items()
    }
    state.weights[name] = tensors.pop(WEIGHT)
    state.states[name] = tensors


def _joined(ranges: Sequence[tuple[StoredTensor, int, int]], shape: tuple[int, ...]) -> Tensor:
    parts = [stored.read(first, end) for stored, first, end in ranges]
    return torch.cat(parts or [torch.empty(0)])[: math.prod(shape)].view(shape)


def _read_stage_2(
    folder: Path,
    ranks: list[_Rank],
    shapes: list[dict[str, tuple[int, ...]]],
    paddings: Sequence[Sequence[int]] | None,
    state: ForeignState,
) -> None:
    if len(shapes) != len(ranks[0].flats):
        fail(folder, f"has {len(shapes)} groups of weights and {len(ranks[0].flats)} of optimizer states")
    for index, group in enumerate(shapes):
        kinds = ranks[0].flats[index].keys()
        # A moment has the padding at the end, which the weights may lack: lengths are those of the moments.
        widths = [max(tensor.numel for tensor in rank.flats[index].values()) for rank in ranks]
        starts = [sum(widths[:number]) for number in range(len(widths))]
        at = 0
        for position, (name, shape) in enumerate(group.items()):
            first, end = at, at + math.prod(shape)
            found: dict[str, list[tuple[StoredTensor, int, int]]] = {}
            for kind in kinds:
                pieces = []
                for rank, start, width in zip(ranks, starts, widths, strict=True):
                    low, high = max(first, start), min(end, start + width)
                    if low < high:
                        pieces.append((rank.flats[index][kind], low - start, high - start))
                if sum(min(high, tensor.numel) - low for tensor, low, high in pieces) < end - first:
                    fail(folder, f"holds only a part of '{kind}' of {name}", "complete the folder")
                found[kind] = pieces
            _add(state, name, shape, found)
            state.updates[name] = ranks[0].updates[index]
            at = end + (paddings[index][position] if paddings else 0)
        state.groups.append(ForeignGroup(tuple(group), ranks[0].options[index]))


def _read_stage_3(
    folder: Path, ranks: list[_Rank], shapes: list[dict[str, tuple[int, ...]]], state: ForeignState
) -> None:
    bounds = [0]
    for flat in ranks[0].flats:
        bounds.append(bounds[-1] + flat[WEIGHT].numel)
    at = 0
    # A rank's subgroups, one after the other, hold its range of each weight.
    group_of: dict[int, list[str]] = {}
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        width = -(-math.prod(shape) // len(ranks))
        end = at + width
        overlapping = [index for index in range(len(bounds) - 1) if bounds[index] < end and bounds[index + 1] > at]
        if end > bounds[-1]:
            fail(folder, f"holds only a part of {name}", "complete the folder")
        found: dict[str, list[tuple[StoredTensor, int, int]]] = {}
        for kind in ranks[0].flats[overlapping[0]] if overlapping else ():
            found[kind] = [
                (
                    rank.flats[index][kind],
                    max(at, bounds[index]) - bounds[index],
                    min(end, bounds[index + 1]) - bounds[index],
                )
                for rank in ranks
                for index in overlapping
            ]
        if found:
            _add(state, name, shape, found)
            state.updates[name] = ranks[0].updates[overlapping[0]]
            group_of.setdefault(overlapping[0], []).append(name)
        at = end
    for index, names in group_of.items():
        state.groups.append(ForeignGroup(tuple(names), ranks[0].options[index]))


def _read_frozen_of_stage_3(folder: Path, state: ForeignState) -> None:
    """Joins frozen weights, of which each rank's model states hold a range."""
    matches = [match for path in folder.iterdir() if (match := MODEL.fullmatch(path.name)) and match[1]]
    documents = [read_torch(folder / match[0]) for match in sorted(matches, key=lambda match: int(match[1]))]
    for name, shape in (documents[0].get("frozen_param_shapes") or {}).items():
        parts = [document["frozen_param_fragments"][name] for document in documents]
        ranges = [(part, 0, part.numel) for part in parts]
        shape = tuple(shape)
        state.weights[name] = ForeignTensor(shape, parts[0].dtype, partial(_joined, ranges, shape))


def _read_universal(folder: Path, document: Mapping[str, Any], state: ForeignState) -> None:
    """Reads the folder with a folder for each parameter; its tensors are flat if they come from stage 3."""
    shapes = {name: tuple(shape) for group in document.get("param_shapes") or [] for name, shape in group.items()} | {
        name: tensor.shape for name, tensor in state.weights.items()
    }
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        name, tensors = path.name, dict[str, ForeignTensor]()
        for file in sorted(path.glob("*.pt")):
            content = read_torch(file)
            if file.stem == STEP:
                state.updates[name] = plain_number(content)
                continue
            stored = content.get("param") if isinstance(content, dict) else content
            if isinstance(stored, StoredTensor):
                tensors[file.stem] = ForeignTensor.of(stored)
        if "fp32" not in tensors:
            fail(path, "has no fp32.pt, the weight of its folder", "write the universal checkpoint again")
        weight = tensors.pop("fp32")
        shape = shapes.get(name, weight.shape)
        if math.prod(shape) != math.prod(weight.shape):
            shape = weight.shape  # of another size than the model's, which is refused later
        state.weights[name] = _viewed(weight, shape)
        state.states[name] = {kind: _viewed(tensor, shape) for kind, tensor in tensors.items()}
    common = read_torch(folder / "optimizer_state.pt") if (folder / "optimizer_state.pt").is_file() else {}
    inner = common.get("optimizer_state_dict") or common.get("base_optimizer_state") or {}
    if isinstance(inner, dict):
        counts = [plain_number(one.get(STEP, 0)) for one in inner.get("state", {}).values()]
        for name in state.states.keys() - state.updates.keys():
            state.updates[name] = max(counts, default=0.0)
    groups = common.get("param_groups") or (inner.get("param_groups", []) if isinstance(inner, dict) else [])
    state.groups += [ForeignGroup((), options_of(group)) for group in groups]


def _viewed(tensor: ForeignTensor, shape: tuple[int, ...]) -> ForeignTensor:
    return ForeignTensor(shape, tensor.dtype, lambda: tensor.read().reshape(shape))


def _read_unsharded(folder: Path, documents: Mapping[str, Any], models: Mapping[str, str], state: ForeignState) -> None:
    """Reads the torch optimizer that stage 0 leaves whole."""
    optimizers = {stage: document.get("optimizer") for stage, document in documents.items()}
    if len(documents) > 1:
        message = "is a pipeline without ZeRO, whose optimizer states do not name their weights"
        fail(folder, message, "save it with ZeRO stage 1")
    for stage, optimizer in optimizers.items():
        if not isinstance(optimizer, dict):
            fail(folder, "has no optimizer states", "start from its weights with model.pretrained")
        weights = optimizer.get("fp32_groups", ())
        if "fp32_groups_flat" in optimizer:
            message = "has states of DeepSpeed's fused optimizer without ZeRO, which do not say where a weight begins"
            fail(folder, message, "save it with ZeRO stage 1")
        state.program += ", ZeRO 0"
        optimizer = optimizer["optimizer_state_dict"] if weights else optimizer
        state.unnamed = unnamed_optimizer(optimizer, str(folder / models[stage]), weights)


def latest_folder(folder: Path) -> Path | None:
    """Returns the folder that DeepSpeed's `latest` file names, if there is one. Raises CheckpointError."""
    for name in ("latest_universal", "latest"):
        if (folder / name).is_file():
            try:
                tag = read_text(folder / name, 4096).strip()
            except UNREADABLE as error:
                fail(folder / name, f"cannot be read: {file_fault(error)}", "name the folder that it names")
            if tag and "/" not in tag and tag not in (".", "..") and (folder / tag).is_dir():
                return folder / tag
            fail(folder / name, f"names {abbreviate([tag])}, which is no folder here", "name the folder itself")
    return None
