"""Runs the self-test of this node: compares strategies with plain PyTorch, then measures rates and steps."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmtrain.data import prepare
from llmtrain.errors import UserError
from llmtrain.launch.doctor.finding import Finding
from llmtrain.plan.axes import EXPERT, used
from llmtrain.plan.search.enumerate import NamedPlan, enumerate_plans
from llmtrain.recipe import parse_recipe
from llmtrain.recipe.cluster import Cluster, self_test_report
from llmtrain.run_dir import RunDir, environment, write_json
from llmtrain.run_dir.lock import RunLock
from llmtrain.system.untrusted import read_json
from llmtrain.trials.jobs import run_job
from llmtrain.trials.self_test.job import DeviceRates, MeasureJob, rates_file, timed_plan
from llmtrain.trials.self_test.report import findings, measured_by, measuring_failed, parity
from llmtrain.trials.verify.certify import verify
from llmtrain.trials.verify.job import Certificate, comparable

STEPS = 2
"""Number of steps of each compared plan. The second step shows whether the first update was right."""
_WIDTHS: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8}
TINY: dict[str, Any] = {
    "name": "self-test",
    "model": {"architecture": "qwen3", "config": {**_WIDTHS, "num_key_value_heads": 8, "intermediate_size": 128}},
    "data": {"sources": [{"name": "stdlib"}], "tokenizer": {"vocab_size": 512}, "sequence_length": 64},
    "optim": {"lr": 1e-3, "clip_grad_norm": 0.5, "weight_decay": 0.1},
    "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    "train": {"max_steps": STEPS},
}
EXPERTS: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "config": {**_WIDTHS, "num_key_value_heads": 8, "moe_intermediate_size": 32, "num_experts": 8}
    | {"num_experts_per_tok": 2, "norm_topk_prob": True},
}


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test."""

    findings: tuple[Finding, ...]
    report: Path

    @property
    def has_fault(self) -> bool:
        """Whether this node has a fault, such as wrong results."""
        return any(finding.level == "fault" for finding in self.findings)


def self_test(cluster: Cluster, folder: Path, say: Callable[[str], None]) -> SelfTest:
    """Tests the devices of this node, and writes `report.json` to the folder, and the report that the user has named.

    Plans then read the rates from it.
    """
    started = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock.take(folder, say):
        certificates = _parity(cluster, folder, say)
        say("measuring rates, and the time of a step")
        results = [finding for certificate in certificates for finding in parity(certificate)]
        ranks: list[DeviceRates] = []
        try:
            ranks = _measure(cluster, folder)
        except UserError as error:  # for example a device without enough memory
            results += [measuring_failed(problem) for problem in error.problems]
        measured = measured_by(ranks, cluster.device) if ranks else None
        if measured:
            results += findings(timed_plan(cluster, measured.matmul), ranks, measured)
        report = {
            "host": socket.gethostname(),
            "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
            "seconds": round(time.time() - started, 1),
            "cluster": cluster.model_dump(mode="json"),
            "measured": measured.model_dump(mode="json") if measured else None,
            "findings": [finding.as_dict() for finding in results],
            "devices": [rates.model_dump(mode="json") for rates in ranks],
            "parity": [certificate.document() for certificate in certificates],
            "environment": environment(),
        }
        write_json(folder / "report.json", report)
        if (path := self_test_report()) != folder / "report.json":
            write_json(path, report)
    return SelfTest(tuple(results), path)


def _parity(cluster: Cluster, folder: Path, say: Callable[[str], None]) -> list[Certificate]:
    """Compares a plan of each strategy with plain PyTorch over two steps, a save, a load and an export."""
    dense = comparable(parse_recipe(TINY), STEPS)
    certificates = []
    for name, recipe in {"dense": dense, "experts": dense.with_(model=EXPERTS)}.items():
        legal, _ = enumerate_plans(recipe, cluster.world_size, cluster.device)
        plans = representatives(legal, cluster.world_size, experts=name == "experts")
        if plans:
            say(f"comparing {len(plans)} plans with plain PyTorch")
            prepare(recipe)
            certificates.append(verify(recipe, plans, [], STEPS, RunDir(folder / name)))
    return certificates


def representatives(plans: Iterable[NamedPlan], world_size: int, experts: bool) -> list[NamedPlan]:
    """Returns plans that represent each strategy on all devices, with several micro-batches if possible.

    Data parallelism is tried at every ZeRO stage and with offload. A single axis of model parallelism is tried at the
    lowest and the highest stage, and several axes together at one stage. experts: True for the strategies with expert
    parallelism, False for those without.
    """
    by_axes: dict[tuple[Any, ...], dict[Any, NamedPlan]] = {}
    for candidate in plans:
        parallel = candidate.plan.recipe.parallel
        is_own = parallel.backend == "deepspeed" or (parallel.backend, parallel.accelerate) in _OTHERS
        axes = used(parallel)
        if candidate.plan.cluster.world_size != world_size or not is_own or (EXPERT in axes) != experts:
            continue
        variant = (parallel.backend, parallel.accelerate, parallel.offload_optimizer, parallel.offload_param)
        by_axes.setdefault(axes, {})[parallel.zero_stage, *variant] = candidate
    chosen = []
    for axes, by_stage in by_axes.items():
        ordered = [by_stage[key] for key in sorted(by_stage)]
        chosen += ordered if not axes else ordered[:1] if len(axes) > 1 else [*ordered[:1], *ordered[1:][-1:]]
    return chosen


_OTHERS = (("accelerate", "ddp"), ("accelerate", "fsdp2"))
"""Backends and strategies of engines other than DeepSpeed."""


def _measure(cluster: Cluster, folder: Path) -> list[DeviceRates]:
    run_dir = RunDir(folder / "rates")
    if code := run_job(MeasureJob(cluster=cluster), cluster.world_size, run_dir):
        sys.exit(code)
    return [read_json(rates_file(run_dir.path, rank), DeviceRates) for rank in range(cluster.world_size)]
