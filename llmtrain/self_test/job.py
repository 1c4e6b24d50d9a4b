"""The input and the output of the measuring workers. Pure."""

from __future__ import annotations

from pathlib import Path

from llmtrain.plan import Plan
from llmtrain.recipe import Part


class MeasureJob(Part):
    """The work of every rank."""

    plan: Plan
    """The plan of which some steps are timed."""
    steps: int
    """Timed steps; two more come first."""
    seconds: float
    """Seconds for which each product is repeated: long enough for a GPU to reach its power limit."""
    rows: int
    """Tokens of a product, whose matrices are `width` × 4 `width`."""
    width: int
    copied_bytes: int
    """Size of what is copied within memory, to and from the host, and reduced."""


class DeviceRates(Part):
    """What one rank has measured on its device, while the other ranks did the same."""

    rank: int
    product: str
    """The device's own name."""
    memory_bytes: int | None
    """The device's memory; None on a CPU."""
    wrong: tuple[str, ...]
    """Data types in which a product of small integers was wrong."""
    matmul: dict[str, float]
    """FLOP/s by data type, as all rates in the units of `MeasuredRates`."""
    attention: dict[str, float]
    memory_bandwidth: float
    launch_s: float
    host_bandwidth: float | None
    node_bandwidth: float | None
    step_s: float
    """Median seconds of a step."""
    allocated_bytes: int | None
    """Largest number of bytes that torch held at once during the steps; None on a CPU."""


def job_file(folder: Path) -> Path:
    """Returns the file that the workers read."""
    return folder / "measure.json"


def rates_file(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's `DeviceRates`."""
    return folder / f"rates_{rank}.json"
