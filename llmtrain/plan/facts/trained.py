"""The trained part of a model: the weights that `model.trainable` names, or adapters of layers and parameters.

The names of weights are those of `transformers`, the adapters those of PEFT (`llmtrain.models.adapter` adds them to the
model itself, and refuses what cannot be done).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.facts.model import ModelFacts, TextPart
from llmtrain.plan.facts.weights import Weight, Weights, runs_of
from llmtrain.recipe import LoraConfig, ModelConfig
from llmtrain.system.hub import stored_file
from llmtrain.system.untrusted import read_json, refusing

TIED_HEAD_MODULE = "lm_head"
"""A second name of a tied table, which patterns may mean."""
TIED_HEAD = f"{TIED_HEAD_MODULE}.weight"


def with_trained(facts: ModelFacts, model: ModelConfig) -> ModelFacts:
    """Returns the facts of a model with its adapters, and with what is frozen.

    They are unchanged for a model that is not a chain of layers, for which nothing is predicted. Raises RecipeError for
    a pretrained adapter that cannot be read.
    """
    weights = facts.weights
    if weights is None or not (model.is_partly_frozen or facts.without_gradient):
        return facts
    packs, unreached = model.quantize != "none", frozenset(facts.without_gradient)
    if model.adapter:
        tower = facts.tower.prefixes if facts.tower else ()
        change = _with_adapter(_adapter(model.adapter, facts.part, tower), packs, unreached, weights.tied)
    else:
        change = _named(model.trainable or ("*",), weights.tied, unreached)
    layers = [tuple(change(weights.layer(index), f"{weights.prefix}.{index}.")) for index in range(weights.layers)]
    embedding = tuple(change(weights.embedding, "", is_table=True))
    changed = Weights(
        prefix=weights.prefix,
        embedding=embedding,
        runs=runs_of(layers),
        outside=tuple(change(weights.outside, "")),
        head=embedding[:1] if weights.tied else tuple(change(weights.head, "", is_table=True)),
        tied=weights.tied,
    )
    total, idle = changed.elements, tuple(_missed(facts, layer) for layer in layers)
    added = total - facts.parameters - (sum(idle) - sum(facts.layer_idle_parameters))
    return facts.model_copy(
        update={
            "weights": changed,
            "parameters": total,
            "active_parameters": facts.active_parameters + added,
            "layer_parameters": tuple(map(_elements, layers)),
            "layer_idle_parameters": idle,
            "trained_parameters": _trained(changed.of_layers(0, changed.layers, first=True, last=True)),
            "layer_trained_parameters": tuple(
                _trained(layer) - _missed(facts, (weight for weight in layer if weight.trained)) for layer in layers
            ),
            "trains_embedding": _trained(embedding) > 0,
            "trains_head": _trained(changed.head) > 0,
        }
    )


def _missed(facts: ModelFacts, weights: Iterable[Weight]) -> int:
    """Returns the elements of experts, and of their adapters, that a token is not routed to."""
    inside = _elements(weight for weight in weights if weight.is_expert)
    return inside - inside * facts.experts_per_token // facts.experts if facts.experts else 0


WeightChange = Callable[..., Iterator[Weight]]
"""Yields the weights of a part of the model as they are trained, given the prefix of their names."""


def _named(patterns: Sequence[str], tied: bool, unreached: frozenset[str]) -> WeightChange:
    def change(weights: Sequence[Weight], prefix: str, is_table: bool = False) -> Iterator[Weight]:
        for number, weight in enumerate(weights):
            names = [prefix + weight.name] + ([TIED_HEAD] if tied and is_table and number == 0 else [])
            is_trained = any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
            is_trained = is_trained and names[0] not in unreached
            yield weight if is_trained else weight.model_copy(update={"trained": False})

    return change


@dataclass(frozen=True)
class _Adapter:
    """The relevant part of an adapter's configuration."""

    is_target: Callable[[str], bool]
    """Whether a linear layer of this name has an adapter."""
    is_parameter: Callable[[str], bool]
    """Whether a parameter of this name has one, which belongs to no layer."""
    rank: Callable[[str], int]
    dora: bool
    saved: Sequence[str]
    """Patterns of the modules that are trained as a whole."""


def _adapter(lora: LoraConfig, part: TextPart | None, tower: tuple[str, ...]) -> _Adapter:
    if lora.pretrained is not None:
        return _pretrained(lora, part)
    targets, rank = lora.targets, lora.rank or 0

    def is_target(name: str) -> bool:
        return not name.startswith(tower) if targets == "all-linear" else matches(name, targets)

    return _Adapter(
        is_target,
        lambda name: matches(name, lora.target_parameters),
        lambda _: rank,
        lora.dora,
        lora.modules_to_save,
    )


def _pretrained(lora: LoraConfig, part: TextPart | None) -> _Adapter:
    """Reads what PEFT has written; its targets are ends of names, or a regular expression.

    part: the place of the model in a multimodal one, whose names the adapter may have.
    """
    name, field = lora.pretrained or "", "model.adapter.pretrained"
    path = stored_file(name, "adapter_config.json", lora.revision)
    if path is None:
        raise RecipeError(Problem("adapter.pretrained", field, f"{name} has no adapter_config.json"))
    with refusing(RecipeError, field, path, rule="adapter.pretrained"):
        config = read_json(path, dict[str, Any])
        targets, ranks = config.get("target_modules"), config.get("rank_pattern") or {}
        rank, dora, saved = int(config["r"]), bool(config.get("use_dora")), config.get("modules_to_save") or ()
        parameters = tuple(config.get("target_parameters") or ())

    def names(name: str) -> set[str]:
        return {name, part.whole(name)} if part else {name}

    def is_target(module: str) -> bool:
        if isinstance(targets, str):
            return targets == "all-linear" or any(re.fullmatch(targets, name) for name in names(module))
        return any(matches(name, targets or ()) for name in names(module))

    def rank_of(module: str) -> int:
        found = (value for key, value in ranks.items() for name in names(module) if _is_of_pattern(key, name))
        return next(found, rank)

    def is_parameter(parameter: str) -> bool:
        return any(f".{name}".endswith(f".{target}") for target in parameters for name in names(parameter))

    return _Adapter(is_target, is_parameter, rank_of, dora, saved)


def _is_of_pattern(pattern: str, module: str) -> bool:
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether the name of a module or parameter, or its end after a dot, matches one of the patterns."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in patterns)


def _with_adapter(adapter: _Adapter, packs: bool, unreached: frozenset[str], tied: bool) -> WeightChange:
    def change(weights: Sequence[Weight], prefix: str, is_table: bool = False) -> Iterator[Weight]:
        for module, group in groupby(weights, key=lambda weight: weight.name.rpartition(".")[0]):
            own = list(group)
            names = (prefix + module).split(".")
            matrix = own[0]
            is_head = tied and is_table and matrix is weights[0]
            modules = [".".join(names[:end]) for end in range(1, len(names) + 1)] + [TIED_HEAD_MODULE] * is_head
            saved = any(matches(name, adapter.saved) for name in modules)
            linear = matrix.name.endswith(".weight") and len(matrix.shape) == 2 and "embed" not in module
            linear = linear and matrix.kind == "layer"
            packs_module = packs and bool(prefix) and not saved
            for weight in own:
                packed = packs_module and ((linear and weight is matrix) or weight.kind == "stack")
                yield weight.model_copy(update={"trained": saved, "packed": packed})
            is_left_out = is_table or prefix + matrix.name in unreached
            if linear and not is_left_out and adapter.is_target(prefix + module):
                yield from _added(module, matrix, adapter.rank(prefix + module), adapter.dora)
            for weight in own:
                name = prefix + weight.name
                if weight.kind != "layer" and not saved and weight.is_matrix and adapter.is_parameter(name):
                    yield from _added(weight.name.removesuffix(".weight"), weight, adapter.rank(name), dora=False)

    return change


def _added(module: str, matrix: Weight, rank: int, dora: bool) -> Iterator[Weight]:
    """Yields the adapter of a linear layer in the order of PEFT's module; for experts, one for each of them."""
    *experts, outputs, inputs = matrix.shape
    yield Weight(name=f"{module}.lora_A.weight", shape=(*experts, rank, inputs))
    yield Weight(name=f"{module}.lora_B.weight", shape=(*experts, outputs, rank))
    if dora:
        yield Weight(name=f"{module}.lora_magnitude_vector.weight", shape=(outputs,))


def _elements(weights: Iterable[Weight]) -> int:
    return sum(weight.elements for weight in weights)


def _trained(weights: Iterable[Weight]) -> int:
    return _elements(weight for weight in weights if weight.trained)
