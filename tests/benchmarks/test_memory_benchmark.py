"""Tests the memory benchmark as far as it runs without a GPU: configurations, steps, comparison and page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from llmtrain.cluster import Cluster
from llmtrain.predict import memory_of
from llmtrain.rules import resolve
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks

ROOT = Path(__file__).parents[2]


def module_of(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"of_{Path(path).parent.name}_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark, page = module_of("benchmarks/memory.py"), module_of("tools/render_memory.py")


def test_the_configurations_are_many_and_differ():
    plans = {name: benchmark.plan_of(recipe) for name, recipe in benchmark.CASES.items()}
    assert len(plans) >= 20
    assert len({recipe.model_dump_json() for recipe in benchmark.CASES.values()}) == len(plans)
    parallel = [plan.recipe.parallel for plan in plans.values()]
    varied = {(one.strategy, one.zero_stage, one.precision) for one in parallel}
    assert len(varied) >= 12
    assert {plan.recipe.model.attention_kernel for plan in plans.values()} == {"sdpa", "eager", "flash_attention_2"}
    assert {plan.cluster.world_size for plan in plans.values()} == {1}
    # On a device of 80 GB.
    assert max(map(benchmark.predicted_bytes, plans.values())) < 75 * 2**30


def test_the_framework_is_no_part_of_the_prediction():
    plan = benchmark.plan_of(benchmark.CASES["1b zero2 bf16"])
    (stage,) = memory_of(plan).stages
    assert benchmark.predicted_bytes(plan) == stage.peak.total - stage.peak.framework
    assert stage.peak.framework > 0


def _train(rank: int, fields) -> None:
    benchmark.train(resolve(tiny_recipe(**fields), Cluster()), torch.device("cpu"))


@pytest.mark.parametrize("documents", [True, False])
def test_the_steps_of_the_benchmark_run(documents):
    run_ranks(1, _train, {"batch.micro_batch_size": 2, "data.mask_documents": documents, "parallel.zero_stage": 1})


def test_rows_compare_and_are_summed_up():
    name = "1b zero2 bf16"
    predicted = benchmark.predicted_bytes(benchmark.plan_of(benchmark.CASES[name]))
    rows = [benchmark.row_of(name, int(predicted / factor)) for factor in (1.02, 0.995, 1.04, 0.98)]
    assert [row["error"] for row in rows] == [0.02, -0.005, 0.04, -0.02]
    rows.append(benchmark.row_of(name, None, "OutOfMemoryError: ..."))
    summed = {"measured": 4, "within": 0.75, "lowest_error": -0.02, "highest_error": 0.04, "aim_met": False}
    assert benchmark.summary(rows) == summed
    assert benchmark.summary(rows[:2])["aim_met"]
    assert not benchmark.summary(rows[:1] + rows[3:])["aim_met"]
    nothing = {"measured": 0, "within": None, "lowest_error": None, "highest_error": None, "aim_met": False}
    assert benchmark.summary([]) == nothing


def test_the_page_shows_measured_and_missing_results():
    assert "**Not measured on a GPU.**" in page.render(None)
    rows = [benchmark.row_of("1b zero2 bf16", 2**35), benchmark.row_of("1b zero1 bf16", None, "no kernel")]
    result = {"hardware": "NVIDIA X", "versions": {"torch": "1", "deepspeed": "2"}, "commit": "c", "steps": 3}
    shown = page.render(json.loads(json.dumps({**result, **benchmark.summary(rows), "rows": rows})))
    assert "Of 1 configurations" in shown
    assert "| 1b zero2 bf16 |" in shown
    assert "did not run: no kernel" in shown
    assert "Not measured" not in shown


def test_the_committed_page_is_up_to_date():
    assert (ROOT / "docs/reference/memory_measured.md").read_text(encoding="utf-8") == page.render(page.found())
