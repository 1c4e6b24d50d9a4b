"""The schema of a DeepSpeed configuration: every key, at every level, with the type and the range of its value.

`tools/lint_schema.py` renders `deepspeed.json` from the sources of each release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

KeyPath = tuple[str, ...]
"""The path of a key."""


@dataclass(frozen=True)
class Node:
    """The values that a key accepts: any if `types` is empty, and objects with any keys if `keys` is None."""

    types: tuple[str, ...] = ()
    null: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    any_case: bool = False
    default: Any = None
    instead: str | None = None
    validated: bool = False
    """Whether DeepSpeed validates it with pydantic, which refuses other keys and reads "true" and "8" as meant."""
    removed: bool = False
    """Whether DeepSpeed refuses the key, which belonged to a feature that it had."""
    keys: dict[str, Node] | None = None


REMOVED_KEYS = {
    "elasticity": "set train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps directly",
    "curriculum_learning": "move it to data_efficiency.data_sampling.curriculum_learning",
    "compression_training": "remove it; compress the trained model with another tool",
    "amp": "use bf16, fp16 or torch_autocast",
    "nebula": "remove it; checkpoints are written with torch.save",
    "sparse_attention": "remove it; choose an attention implementation of the model",
    "sparse_gradients": "remove it; a torch.nn.Embedding with sparse=True is reduced sparsely by itself",
    "eigenvalue": "remove it together with quantize_training",
    "quantize_training": "remove it; quantize the trained model with another tool",
    "progressive_layer_drop": "remove it",
    "graph_harvesting": "remove it; torch.compile captures graphs",
}
"""Top-level keys that DeepSpeed rejects since they were removed, and how to migrate (DeepSpeed issue 8489)."""

REMOVED_ZERO_KEYS = {
    "mics_shard_size": "use zero_hpz_partition_size (ZeRO++) to shard within a node",
    "mics_hierarchical_params_gather": "use zero_hpz_partition_size (ZeRO++) to shard within a node",
    "zeropp_loco_param": "remove it; zero_quantized_gradients works without error feedback",
}
"""Keys of `zero_optimization` that DeepSpeed rejects since they were removed."""

RENAMED = {
    ("aio", "thread_count"): "aio.intra_op_parallelism",
    ("gradient_accumulation_dtype",): "data_types.grad_accum_dtype",
    ("gradient_accumulation_step",): "gradient_accumulation_steps",
    ("micro_batch_size",): "train_micro_batch_size_per_gpu",
    ("max_grad_norm",): "gradient_clipping",
    ("gradient_checkpointing",): "the training program: model.gradient_checkpointing_enable()",
    ("zero_optimization", "find_unused_parameters"): "zero_optimization.ignore_unused_parameters",
    ("zero_optimization", "zero_stage"): "zero_optimization.stage",
}
"""Keys of older versions, other programs and old documents, and their current names."""

REMOVED_OPTIMIZERS = {name.lower(): name for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")}
"""The optimizers with compressed communication, which were removed."""


Version = tuple[int, ...]


def version(text: str) -> Version:
    """Returns the numbers of a version such as 0.18.4, to compare."""
    return tuple(int(number) for number in text.split("."))


@dataclass(frozen=True)
class Schema:
    """All keys of a release, and the arguments of optimizers and schedules."""

    deepspeed: str
    root: Node
    optimizers: dict[str, tuple[str, ...]]
    schedulers: dict[str, tuple[str, ...]]
    paths_by_name: dict[str, tuple[KeyPath, ...]]
    """The paths at which each key is known, to recognise a misplaced one."""
    other_releases: dict[KeyPath, tuple[str, str]]
    """The paths that only other releases know, with the first and the last one."""

    def since(self, release: str) -> bool:
        """Whether this is a release or a later one."""
        return version(self.deepspeed) >= version(release)

    def node(self, *where: str) -> Node | None:
        """Returns what the key at a path accepts, or None if it is not known."""
        node: Node | None = self.root
        for key in where:
            node = (node.keys or {}).get(key) if node else None
        return node

    def default(self, *where: str) -> Any:
        """Returns DeepSpeed's default for the key at a path, or None if it is not known."""
        node = self.node(*where)
        return node.default if node else None


@cache
def releases() -> tuple[dict[str, Any], ...]:
    """Returns the facts about each release that is known, the newest first."""
    newest = json.loads((files("llmtrain_lint") / "deepspeed.json").read_text(encoding="utf-8"))
    patches = newest.pop("older")
    return tuple(accumulate(patches, _patched, initial=newest))


def _patched(old: Any, patch: Any) -> Any:
    """Applies a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    kept = old if isinstance(old, dict) else {}
    changed = {key: _patched(kept.get(key), value) for key, value in patch.items() if value is not None}
    return {key: value for key, value in kept.items() if key not in patch} | changed


@cache
def schema(deepspeed: str = "") -> Schema:
    """Returns the schema of a release that is known, or of the newest."""
    data = next(one for one in releases() if one["deepspeed"] == (deepspeed or one["deepspeed"]))
    root = _node({"types": ["object"], "keys": data["keys"]})
    optimizers, schedulers = (
        {name: tuple(names) for name, names in data[kind].items()} for kind in ("optimizers", "schedulers")
    )
    known = set(_paths(data["keys"]))
    other_releases = {where: ends for where, ends in _release_ranges().items() if where not in known}
    paths_by_name: dict[str, tuple[KeyPath, ...]] = {}
    for where in sorted(known, key=len):
        paths_by_name[where[-1]] = (*paths_by_name.get(where[-1], ()), where)
    return Schema(data["deepspeed"], root, optimizers, schedulers, paths_by_name, other_releases)


@cache
def _release_ranges() -> dict[KeyPath, tuple[str, str]]:
    """Maps the path of each key to the first and the last release that knows it."""
    lives: dict[KeyPath, tuple[str, str]] = {}
    for one in releases():
        for where in _paths(one["keys"]):
            lives[where] = one["deepspeed"], lives.get(where, (one["deepspeed"],) * 2)[1]
    return lives


def _paths(keys: dict[str, Any], outer: KeyPath = ()) -> Iterator[KeyPath]:
    """Yields the path of each key that is not removed."""
    for key, node in keys.items():
        if not node.get("removed"):
            yield (*outer, key)
            yield from _paths(node.get("keys", {}), (*outer, key))


def _node(raw: dict[str, Any]) -> Node:
    keys = {name: _node(inner) for name, inner in raw["keys"].items()} if "keys" in raw else None
    lists = {name: tuple(raw.get(name, ())) for name in ("types", "choices")}
    return Node(**{**raw, **lists, "keys": keys})
