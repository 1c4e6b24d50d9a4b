"""The settings of rotary positions that a recipe gives: which ones a model reads, and what they replace.

`transformers` 5 keeps them in `rope_parameters`. It makes that field of the older `rope_theta` and `rope_scaling` when
it reads a configuration, so these would change nothing if they were set on the configuration of pretrained weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from llmtrain.errors import Problem, did_you_mean
from llmtrain.plan.facts.families import LEGACY_ROPE_KEYS

FIELD = "rope_parameters"
MOVED = "partial_rotary_factor"
"""A field of older configurations that is now one of `rope_parameters`."""
ORIGINAL = "original_max_position_embeddings"
TYPES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "axial": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "proportional": (frozenset(), frozenset({"factor"})),
    "dynamic": (frozenset({"factor"}), frozenset({"alpha", ORIGINAL})),
    "yarn": (
        frozenset({"factor", ORIGINAL}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "llama3": (frozenset({"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"}), frozenset()),
    "longrope": (
        frozenset({"short_factor", "long_factor", ORIGINAL}),
        frozenset({"attention_factor", "factor", "short_mscale", "long_mscale"}),
    ),
}
"""`rope_type` → the parameters that it needs, and others that it reads (`transformers.modeling_rope_utils`)."""
OF_ALL_TYPES = frozenset({"rope_type", "type", "rope_theta", MOVED, "mrope_section", "mrope_interleaved"})
OF_A_TYPE = frozenset[str]().union(*(needed | more for needed, more in TYPES.values()))
LEAST = {"factor": 1, "rope_theta": 1, "attention_factor": 0}
"""Parameters that are numbers → the least; a smaller factor would shorten the context."""


def rotary_parts(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yields rotary parameters and, if they are those of each kind of layer, these."""
    if isinstance(parameters, dict):
        yield parameters
        for inner in parameters.values():
            yield from rotary_parts(inner)


def own_parameters(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_parameters` of a configuration, also of one in the older form."""
    if own := declared.get(FIELD):
        return dict(own)
    moved = {key: declared[key] for key in ("rope_theta", MOVED) if declared.get(key) is not None}
    older = {**moved, **(declared.get("rope_scaling") or {})}
    return _standard(older) if older else {}


def effective_overrides(fields: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the overrides of a configuration with all rotary ones in `rope_parameters`, where they have an effect.

    These are copies, because `transformers` adds defaults to what it is given. declared: the configuration.
    `rope_theta` replaces that of its parameters, and `rope_scaling` what is not common to all types.
    """
    fields = deepcopy(dict(fields))
    found = {key: value for key, value in fields.items() if key not in LEGACY_ROPE_KEYS}
    if FIELD in fields:
        found[FIELD] = _standard(fields[FIELD])
    elif LEGACY_ROPE_KEYS & fields.keys():
        own = own_parameters(declared)
        if "rope_scaling" in fields:
            own = {key: value for key, value in own.items() if key not in OF_A_TYPE | {"rope_type"}}
            own |= fields["rope_scaling"] or {}
        found[FIELD] = _standard(own | ({"rope_theta": fields["rope_theta"]} if "rope_theta" in fields else {}))
    return found


def _standard(parameters: Any) -> Any:
    """Returns parameters with a `rope_type`, which was `type`; of each kind of layer, if there are several."""
    if not isinstance(parameters, dict):
        return parameters
    if _is_nested(parameters):
        return {key: _standard(part) for key, part in parameters.items()}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {"rope_type": kind, **{key: value for key, value in parameters.items() if key not in ("rope_type", "type")}}


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in parameters.values())


def rotary_problems(fields: Mapping[str, Any], declared: Mapping[str, Any] | None) -> list[Problem]:
    """Returns problems with the rotary settings among a recipe's overrides.

    declared: the configuration of pretrained weights; None for a new model.
    """
    given = sorted(key for key in (FIELD, *LEGACY_ROPE_KEYS) if key in fields)
    if declared is not None and MOVED in fields and (own := own_parameters(declared)):
        wanted = json.dumps({**own, MOVED: fields[MOVED]})
        message = f"has no effect on pretrained weights, whose positions follow {FIELD}"
        return [_problem(MOVED, message, f"--set 'model.config.{FIELD}={wanted}'")]
    if not given:
        return []
    if FIELD in given and len(given) > 1:
        message = f"sets what {' and '.join(given[1:])} set, too"
        return [_problem(FIELD, message, f"give {FIELD} alone")]
    own = own_parameters(declared or {})
    where = FIELD if FIELD in given else given[-1]
    if not isinstance(fields[where], dict | None) and where != "rope_theta":
        return [_problem(where, f"must be a set of parameters, not {fields[where]!r}")]
    if declared is not None and _is_nested(own) and where != FIELD:
        message = "has no effect on pretrained weights that have other positions in each kind of layer"
        return [_problem(where, message, f"--set 'model.config.{FIELD}={json.dumps(own)}' with your changes")]
    parameters = effective_overrides(fields, declared or {}).get(FIELD)
    if not parameters:
        return []
    if declared is not None and own and _is_nested(own) != _is_nested(parameters):
        kinds = ", ".join(own) if _is_nested(own) else "one set for all layers"
        return [_problem(FIELD, f"does not have the form of the model's own configuration: {kinds}")]
    if not _is_nested(parameters):
        return _part_problems(where, parameters, own, {**(declared or {}), **fields}, declared is not None)
    problems = []
    for kind in sorted(key for key, part in own.items() if isinstance(part, dict) and key not in parameters):
        problems.append(_problem(FIELD, f"lacks {kind}, which the model's own configuration has"))
    for kind, part in parameters.items():
        if not isinstance(part, dict):
            message = "is not read beside the parameters of each kind of layer"
            problems += [] if part is None else [_problem(f"{FIELD}.{kind}", message, "leave it out")]
        elif declared is not None and own and kind not in own:
            problems.append(_problem(f"{FIELD}.{kind}", f"is no kind of layer of the model{did_you_mean(kind, own)}"))
        else:
            inner = own.get(kind) or {}
            problems += _part_problems(
                f"{FIELD}.{kind}", part, inner, {**(declared or {}), **fields}, declared is not None
            )
    return problems


def _part_problems(
    where: str, given: Mapping[str, Any], own: Mapping[str, Any], config: Mapping[str, Any], is_pretrained: bool
) -> list[Problem]:
    """where: the field of the recipe. own: the parameters that are replaced. config: the whole configuration."""
    kind = given["rope_type"]
    if kind not in TYPES:
        return [_problem(where, f"{kind!r} is not a rope_type{did_you_mean(str(kind), TYPES)}")]
    needed, more = TYPES[kind]
    problems = []
    for name in sorted(needed - given.keys()):
        if name == ORIGINAL and (config.get(ORIGINAL) or kind == "longrope"):
            continue  # of the configuration itself, as in Phi-3
        hint = ""
        if name == ORIGINAL:  # transformers would take that of the longer context
            trained = config.get("max_position_embeddings")
            hint = f": the length that the weights were trained for{f', at most {trained}' if trained else ''}"
        problems.append(_problem(where, f"lacks {name}, which '{kind}' needs{hint}"))
    if (outer := config.get(ORIGINAL)) is not None and given.get(ORIGINAL, outer) != outer:
        message = f"is not model.config.{ORIGINAL} = {outer}, which the model reads in its place"
        problems.append(_problem(f"{where}.{ORIGINAL}", message))
    kept = {key: value for key, value in own.items() if key not in OF_A_TYPE | {"rope_type", "type"}}
    known = needed | more | OF_ALL_TYPES | kept.keys()
    for name in sorted(given.keys() - known):
        why = f"is not read by '{kind}'" if name in OF_A_TYPE else f"is no rotary parameter{did_you_mean(name, known)}"
        problems.append(_problem(f"{where}.{name}", why, "leave it out"))
    if is_pretrained:
        for name in sorted({*kept, "rope_theta"} - given.keys()):
            value = kept.get(name, "not named")
            problems.append(_problem(where, f"lacks {name}, which is {value} in the model's own configuration"))
    for name, least in LEAST.items():
        value = given.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and float(value) >= least and value):
            problems.append(_problem(f"{where}.{name}", f"must be a number of at least {least}, not {value!r}"))
    return problems


def _problem(field: str, message: str, fix: str = "") -> Problem:
    return Problem("model.config_key", f"model.config.{field}", message, fix)


def following_rotary(config: Mapping[str, Any], declared: int | None) -> tuple[str, int] | None:
    """Returns the type of rotary embeddings that depend on the longest position, and the length where that begins.

    None if there are none. declared: the longest sequence that the configuration names.
    """
    found = []
    for parameters in rotary_parts(config.get(FIELD) or config.get("rope_scaling")):
        kind = str(parameters.get("rope_type") or parameters.get("type"))
        origin = parameters.get(ORIGINAL) or config.get(ORIGINAL)
        if "dynamic" in kind:
            found.append((declared or 0, kind))
        elif kind == "longrope":
            found.append((origin or declared or 0, kind))
    return min(found)[::-1] if found else None


def yarn_length(config: Mapping[str, Any]) -> int | None:
    """Returns the length up to which YaRN extends the context: its factor times the original length; None without."""
    for parameters in rotary_parts(config.get(FIELD) or config.get("rope_scaling")):
        factor, origin = parameters.get("factor"), parameters.get(ORIGINAL)
        is_yarn = parameters.get("rope_type", parameters.get("type")) == "yarn"
        if is_yarn and isinstance(factor, int | float) and isinstance(origin, int):
            return round(factor * origin)
    return None
