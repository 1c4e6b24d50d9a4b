"""The input and the output of the measuring workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmtrain.plan import Plan
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Part, parse_recipe
from llmtrain.recipe.cluster import Cluster
from llmtrain.trials.jobs import Job

HEAD_DIM = 128

STEP_S = 0.5
"""Seconds that the matrix products of a timed step may take at most."""


class MeasureJob(Job):
    """The work of every rank."""

    file = "measure.json"
    work = "llmtrain.trials.self_test.measure:measure_rank"

    cluster: Cluster

    @property
    def on_cpu(self) -> bool:
        """Whether the node has no other devices."""
        return self.cluster.spec.on_cpu


@dataclass(frozen=True)
class TimedModel:
    """A model whose steps are timed, with its batch."""

    width: int
    layers: int
    length: int
    vocabulary: int
    accumulation: int
    """Number of micro-batches in a step. Each is one sequence."""

    @property
    def flops(self) -> float:
        """FLOP of a step's matrix products on one device (arXiv 2001.08361: 6 for each parameter and token)."""
        return 6 * (16 * self.layers * self.width + self.vocabulary) * self.width * self.length * self.accumulation


MODELS = (
    TimedModel(width=2048, layers=4, length=4096, vocabulary=32000, accumulation=8),
    TimedModel(width=1024, layers=4, length=1024, vocabulary=16000, accumulation=2),
    TimedModel(width=256, layers=2, length=256, vocabulary=2048, accumulation=1),
)
"""Models from the largest to the smallest. The first keeps a GPU busy and fits into 16 GB; the last is for CPUs."""


def timed_plan(cluster: Cluster, matmul: Mapping[str, float]) -> Plan:
    """Returns the plan whose steps are timed: ZeRO-1 in bf16 over all devices, to be compared with the catalogue.

    matmul: FLOP/s by data type, which determines the size of the model.
    """
    model = next((model for model in MODELS if model.flops < STEP_S * matmul["bf16"]), MODELS[-1])
    heads = model.width // HEAD_DIM
    config = {"hidden_size": model.width, "intermediate_size": 4 * model.width, "num_hidden_layers": model.layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": model.vocabulary}
    recipe = {
        "name": "self-test",
        "model": {"architecture": "llama", "config": config | {"max_position_embeddings": model.length}},
        "data": {
            "sources": [{"name": "stdlib"}],
            "tokenizer": "none",
            "sequence_length": model.length,
            "mask_documents": False,
        },
        "optim": {"lr": 1e-3},
        "batch": {"global_batch_size": model.accumulation * cluster.world_size, "micro_batch_size": 1},
        "train": {"max_steps": 1},
        "parallel": {"zero_stage": 1, "precision": "bf16"},
    }
    return resolve(parse_recipe(recipe), cluster.model_copy(update={"measured": None}))


class DeviceRates(Part):
    """The measurements of one rank on its device, while the other ranks measured the same."""

    rank: int
    product: str
    """The name that the device reports."""
    memory_bytes: int | None
    """The device's memory in bytes; None on a CPU."""
    wrong: tuple[str, ...]
    """Data types in which a matrix product of small integers was wrong."""
    matmul: dict[str, float]
    """FLOP/s by data type. All rates have the units of `MeasuredRates`."""
    attention: dict[str, float]
    memory_bandwidth: float
    launch_s: float
    host_bandwidth: float | None
    node_bandwidth: float | None
    pair_bandwidth: tuple[float | None, ...]
    """Bytes per second, each way, between this rank and each other rank, by that rank; None for this rank itself."""
    step_s: float
    """Median seconds of a step."""
    allocated_bytes: int | None
    """Peak of the bytes that torch had allocated during the steps; None on a CPU."""


def rates_file(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's `DeviceRates`."""
    return folder / f"rates_{rank}.json"
