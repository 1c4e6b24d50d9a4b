"""Compares the rotary frequencies that a model computes with the formulas of their types.

Families read the settings in their own code, and some read only a part of them. A setting without effect would show
itself only as a worse model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmtrain.errors import Problem, RecipeError
from llmtrain.models.hub_names import empty_model
from llmtrain.plan.facts.rotary import FIELD, ORIGINAL

TOLERANCE = 2.0**-18
"""Largest relative difference of a frequency in fp32.

The exponent of the base is rounded to 2^-24, which e·ln(base) < 32 multiplies, and at most 32 roundings follow."""
BUFFER = "inv_freq"


def check_rotary(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Raises RecipeError if the model of a configuration does not compute the rotary frequencies that a recipe gives.

    overrides: the recipe's, as `effective_overrides` returns them. Of types other than `default`, `linear`, `yarn` and
    `llama3`, and of modules that cannot be made alone, nothing is compared.
    """
    parameters = overrides.get(FIELD)
    if not parameters:
        return
    model = empty_model(config, torch.float32)
    modules = {type(module): module for module in model.modules() if _buffers(module)}
    if not modules:
        message = f"has no effect: '{config.model_type}' has no rotary frequencies that a configuration sets"
        raise RecipeError(Problem("model.config_key", f"model.config.{FIELD}", message, "leave it out"))
    for kind in modules:
        try:
            made: Any = kind(config)
        except (TypeError, AttributeError):  # its constructor needs more than a configuration
            continue
        for name in _buffers(made):
            prefix = name.removesuffix(BUFFER)
            own = parameters.get(prefix.removesuffix("_")) if prefix else parameters
            if isinstance(own, Mapping):
                _compare(own, made, name, getattr(made, f"{prefix}attention_scaling", 1.0))


def _buffers(module: nn.Module) -> list[str]:
    found = (name for name, _ in module.named_buffers(recurse=False) if name.endswith(BUFFER))
    return [name for name in found if not name.endswith(f"original_{BUFFER}")]


def _compare(parameters: Mapping[str, Any], module: nn.Module, name: str, scaling: float) -> None:
    computed: Tensor = module.get_buffer(name).double()
    widths = (2 * len(computed), 2 * len(computed) - 1)  # an odd width is rounded up to pairs
    found = [_frequencies(parameters, width) for width in widths if width > 0]
    expected = [each for each in found if each is not None]
    if not expected:
        return
    _, factor = expected[0]
    tables = (torch.tensor(values, dtype=torch.float64) for values, _ in expected)
    worst = min(float(((computed - table).abs() / table).max()) for table in tables)
    if worst > TOLERANCE or not math.isclose(scaling, factor, rel_tol=1e-6):
        message = (
            f"does not have the effect that '{parameters['rope_type']}' defines: {type(module).__name__} computes "
            f"frequencies that differ by up to {worst:.2g}, and scales attention by {scaling:.6g}, not {factor:.6g}"
        )
        raise RecipeError(Problem("model.rotary", f"model.config.{FIELD}", message, "use another rope_type"))


def _frequencies(parameters: Mapping[str, Any], width: int) -> tuple[list[float], float] | None:
    """Returns the angle per position of each pair of elements of a head, and the factor of queries and keys.

    width: elements of a head that rotate. None for other types.
    """
    base = float(parameters["rope_theta"])
    plain = [base ** (-2 * pair / width) for pair in range((width + 1) // 2)]
    kind, factor = parameters["rope_type"], float(parameters.get("factor") or 1.0)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return [frequency / factor for frequency in plain], 1.0
    if ORIGINAL not in parameters:
        return None
    length = float(parameters[ORIGINAL])
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        turns = (length * frequency / math.tau for frequency in plain)
        kept = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
        return list(_mixed(plain, kept, factor)), 1.0
    if kind == "yarn":
        first, last = (
            width * math.log(length / (turns * math.tau)) / (2 * math.log(base))
            for turns in (parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1)
        )
        if parameters.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        last += 0.001 if first == last else 0
        kept = [1 - min(max((pair - first) / (last - first), 0.0), 1.0) for pair in range(len(plain))]
        return list(_mixed(plain, kept, factor)), _attention_factor(parameters, factor)
    return None


def _mixed(plain: list[float], kept: list[float], factor: float) -> Iterator[float]:
    """Yields frequencies of which a part is kept and the rest divided."""
    for frequency, part in zip(plain, kept, strict=True):
        yield frequency * part + frequency / factor * (1 - part)


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (over and under):
        over, under = 1.0, 0.0
    return (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)
