"""The optimizers that a recipe may name, one row each: its class, its arguments, and its states for each weight.

`engines/optim.py` and DeepSpeed build the optimizers from these rows. The predictions of memory and time and the checks
of a checkpoint count the states by them. A class that torch does not have is in a file of `engines/optimizers/`. An
update must honour `found_inf`, with which the guard skips it (`engines/guard.py`). Torch's fused kernels and the
classes of that folder do so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from llmtrain.plan.facts.own_optimizer import TriedOptimizer
from llmtrain.recipe import Fraction, OptimConfig, Part
from llmtrain.recipe.own_code import is_path
from llmtrain.system.piece_headers import CODE, SCALE


class MuonOptions(Part):
    """The options of `muon`, by torch's names."""

    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"


class AdafactorOptions(Part):
    """The options of `adafactor`, by torch's names; `eps1` and `eps2` are the two numbers of its `eps`."""

    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    eps1: Annotated[float, Field(gt=0)] | None = None
    eps2: Annotated[float, Field(ge=0)] = 1e-3
    d: Annotated[float, Field(ge=1)] = 1.0


class EightBitOptions(Part):
    """The options of `adamw_8bit`."""

    block_size: Annotated[int, Field(ge=16, le=65536)] = 256


STRETCH = 4_194_304
"""Largest number of elements that are updated at once in a matrix with 8-bit moments, unless one row has more."""
STRETCH_BYTES = 28
"""Largest number of bytes for each of them: two fp32 moments, and temporary tensors to compute or round one."""
UPDATE_BYTES = 262
"""Bytes per element that the operations of such an update read and write; torch has no kernel that fuses them."""
CODE_TABLES = 4 * 2 * (256 + 254)
"""Bytes of the tables for both moments: the values of the codes, and the borders between the values."""
OWN_TEMPORARIES = 4
"""fp32 tensors that an update of a user's own class is assumed to need for each element of a group, such as a square
root, a quotient and a product of tensors."""
POINT = "z"
"""State of schedule-free AdamW: the trained weights are a mixture of this point and of the averaged weights."""


@dataclass(frozen=True)
class OptimizerRow:
    """A row of the table of optimizers."""

    kind: str
    """Module and name of its class."""
    arguments: Callable[[OptimConfig], dict[str, Any]]
    """Arguments besides learning rate, weight decay and `fused`."""
    states: Callable[[OptimConfig], tuple[str, ...]]
    """Names of the fp32 tensors that are kept for each weight."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Further arguments in DeepSpeed's JSON: without `torch_adam` it would compile an Adam of its own at the first
    start, and without `adam_w_mode` "Adam" would mean AdamW to it."""
    options: type[Part] = Part
    """Model of `optim.options`."""
    layer_states: tuple[str, ...] | None = None
    """Names of the tensors that are kept for matrices of decoder layers, if the optimizer updates these as whole
    matrices."""
    factors: tuple[str, ...] = ()
    """Names of the tensors that are kept for a matrix instead of `states`: one with a value for each row, and one
    with a value for each column. Each rank that holds a part of the matrix has both of them whole."""
    moments: tuple[str, ...] = ()
    """Names of the 8-bit moments that are kept for a matrix instead of `states`: each has a byte for each element
    (`codes`), and an fp32 scale for each block of a row (`scales`)."""
    state_bytes: int | None = None
    """Bytes of the states of an element, for a class of the user's: these need not be in fp32."""
    known_to_zero: bool = False
    """Whether DeepSpeed lists it as tested with ZeRO, although ZeRO treats all optimizers alike."""

    @property
    def codes(self) -> tuple[str, ...]:
        """Names of the bytes of `moments`."""
        return tuple(moment + CODE for moment in self.moments)

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the scales of `moments`."""
        return tuple(moment + SCALE for moment in self.moments)

    @property
    def deepspeed_type(self) -> str | None:
        """Its type in DeepSpeed's JSON, that of torch's class; None for a class that is passed to DeepSpeed instead."""
        module, _, name = self.kind.rpartition(".")
        return name if module == "torch.optim" and not is_path(self.kind) else None


def _adam(optim: OptimConfig) -> dict[str, Any]:
    return {"betas": list(optim.betas), "eps": optim.eps}


def _moments(optim: OptimConfig) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


OPTIMIZERS = {
    "adamw": OptimizerRow(
        "torch.optim.AdamW", _adam, _moments, {"torch_adam": True, "adam_w_mode": True}, known_to_zero=True
    ),
    "adam": OptimizerRow(
        "torch.optim.Adam", _adam, _moments, {"torch_adam": True, "adam_w_mode": False}, known_to_zero=True
    ),
    "sgd": OptimizerRow(
        "torch.optim.SGD",
        lambda optim: {"momentum": optim.betas[0]},
        lambda optim: ("momentum_buffer",) if optim.betas[0] else (),
    ),
    "lion": OptimizerRow(
        "llmtrain.engines.optimizers.lion.Lion",
        lambda optim: {"betas": list(optim.betas)},
        lambda optim: ("exp_avg",),
    ),
    "muon": OptimizerRow(
        "llmtrain.engines.optimizers.muon.Muon",
        lambda optim: _adam(optim) | MuonOptions.model_validate(optim.options).model_dump(),
        _moments,
        options=MuonOptions,
        layer_states=("momentum_buffer",),
    ),
    "schedule_free_adamw": OptimizerRow(
        "llmtrain.engines.optimizers.schedule_free.ScheduleFreeAdamW",
        lambda optim: _adam(optim) | {"warmup": optim.warmup_steps},
        lambda optim: (POINT, "exp_avg_sq"),
    ),
    "adafactor": OptimizerRow(
        "llmtrain.engines.optimizers.adafactor.Adafactor",
        lambda optim: AdafactorOptions.model_validate(optim.options).model_dump(),
        lambda optim: ("variance",),
        options=AdafactorOptions,
        factors=("row_var", "col_var"),
    ),
    "adamw_8bit": OptimizerRow(
        "llmtrain.engines.optimizers.adamw_8bit.AdamW8bit",
        lambda optim: _adam(optim) | {"block": block_of(optim)},
        _moments,
        options=EightBitOptions,
        moments=("exp_avg", "exp_avg_sq"),
    ),
}


def states_kept(row: OptimizerRow, optim: OptimConfig, in_layers: bool, is_matrix: bool) -> int:
    """Returns the number of fp32 states that have the shape of a weight, rounded up; SGD without momentum has none.

    row: that of `optim`. in_layers: whether the weight has the optimizer's `layer_states`.
    """
    if row.state_bytes is not None:
        return -(-row.state_bytes // 4)
    if (row.factors or row.moments) and is_matrix:
        return 0
    return len((row.layer_states or ()) if in_layers else row.states(optim))


def is_matrix_of_layer(name: str, dimensions: int) -> bool:
    """Whether a weight is a matrix of a decoder layer, or a stack of its experts' matrices. Layers have numbers."""
    is_matrix = dimensions == 2 or (dimensions == 3 and ".experts." in name)
    return is_matrix and any(part.isdigit() for part in name.split("."))


def block_of(optim: OptimConfig) -> int:
    """Returns the number of elements of a row that share a scale of an 8-bit moment."""
    return EightBitOptions.model_validate(optim.options).block_size


def optimizer_of(optim: OptimConfig, tried: TriedOptimizer | None = None) -> OptimizerRow:
    """Returns the row of a recipe's optimizer. tried: what a class of the user's keeps; by default unknown."""
    if not is_path(optim.name):
        return OPTIMIZERS[optim.name]
    states, state_bytes = (tuple(tried.states), tried.state_bytes) if tried else ((), 0)
    return OptimizerRow(optim.name, lambda optim: optim.options, lambda _: states, state_bytes=state_bytes)
