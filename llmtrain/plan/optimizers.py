"""The optimizers that a recipe may name, one row each: what torch is given, and what is kept of each weight.

`engines/optim.py` and DeepSpeed build them from these rows; memory, time and the checks of a checkpoint count what they
keep. An update has to honour `found_inf`, with which the guard drops it (`engines/guard.py`): torch's fused kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmtrain.recipe import OptimConfig


@dataclass(frozen=True)
class OptimizerRow:
    """A row of the table of optimizers."""

    torch: str
    """Class of `torch.optim`; also its type in DeepSpeed's JSON unless `deepspeed` says otherwise."""
    arguments: Callable[[OptimConfig], dict[str, Any]]
    """Arguments besides learning rate, weight decay and `fused`."""
    states: Callable[[OptimConfig], tuple[str, ...]]
    """Torch's names of the fp32 tensors that are kept for each weight."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Further arguments in DeepSpeed's JSON: without `torch_adam` it would compile an Adam of its own at the first
    start, and without `adam_w_mode` "Adam" would mean AdamW to it."""
    known_to_zero: bool = True
    """Whether DeepSpeed considers it tested with ZeRO, which in truth treats all optimizers of torch alike."""


def _adam(optim: OptimConfig) -> dict[str, Any]:
    return {"betas": list(optim.betas), "eps": optim.eps}


def _moments(optim: OptimConfig) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


OPTIMIZERS = {
    "adamw": OptimizerRow("AdamW", _adam, _moments, {"torch_adam": True, "adam_w_mode": True}),
    "adam": OptimizerRow("Adam", _adam, _moments, {"torch_adam": True, "adam_w_mode": False}),
    "sgd": OptimizerRow(
        "SGD",
        lambda optim: {"momentum": optim.betas[0]},
        lambda optim: ("momentum_buffer",) if optim.betas[0] else (),
        known_to_zero=False,
    ),
}


def optimizer_of(optim: OptimConfig) -> OptimizerRow:
    """Returns the row of a recipe's optimizer."""
    return OPTIMIZERS[optim.name]
