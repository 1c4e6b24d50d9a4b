"""The metrics of a loss of one's own are those of the whole global batch, on every rank, under every layout."""

from __future__ import annotations

import pytest

from llmtrain import Custom
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

Z = Custom("llmtrain.objectives:z_loss", weight=0.01)
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2}
LAYOUTS = {
    "data": {"parallel.zero_stage": 2},
    "stages": STAGES,
    "slices": {"parallel.sequence": 2, "parallel.zero_stage": 2},
    "tensor": {"parallel.tensor": 2},
    "chunks": {"kernels.loss": "chunked", "parallel.zero_stage": 3},
    "DDP": {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"},
}


def _sums(rank: int, ranks: int, layouts: dict) -> dict[str, list[list[float]]]:
    """The sums of an evaluation and of a step, before any update."""
    found = {}
    for name, fields in layouts.items():
        plan = plan_of(tiny_recipe(objective=Z, **fields), ranks)
        engine, batch = engine_of(plan), plan.batch
        sizes = (batch.micro_batch_size, batch.gradient_accumulation_steps)
        part = step_batch(1, *sizes, engine.data_parallel_rank, plan.data_parallel_size)
        results = []
        for run in (engine.eval_step, engine.train_step):
            run(part)
            results.append(engine.metric_sums().tolist())
        found[name] = results
    return found


@pytest.mark.parametrize(
    "names", [("stages",), pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)], ids=["stages", "all"]
)
def test_metrics_are_sums_over_the_global_batch_under_every_layout(names):
    (evaluated, trained) = run_ranks(1, _sums, 1, {"alone": {}})[0]["alone"]
    targets = step_batch(1, 1, 8).target_tokens
    assert evaluated == trained
    assert evaluated[0::2] == [targets, targets, targets]
    for of_rank in run_ranks(2, _sums, 2, {name: LAYOUTS[name] for name in names}):
        for name, results in of_rank.items():
            for sums in results:
                assert sums == pytest.approx(evaluated, rel=1e-5), name
