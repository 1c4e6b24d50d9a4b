"""What metrics of one's own are given is compared, and every planted bug is detected."""

from __future__ import annotations

import pytest

from llmtrain import Custom, EvalConfig
from llmtrain.trials.verify.job import METRICS
from tests.helpers.harness import run_ranks
from tests.helpers.own_metrics import accuracy
from tests.helpers.small_verify import certified, job_of, plant, refer, small

EVALUATION = EvalConfig(every_steps=4, metrics={"accuracy": accuracy})
PLANS = ["dp2-zero2-acc2", "dp2-fsdp2-acc2", "dp1-sp2-zero1-acc4", "dp1-pp2-zero1-acc4"]
BUGS = ("sums_of_a_rank", "positions_before", "kept_from_the_batch_before")


def test_the_cross_entropy_takes_the_place_of_metrics(verify_corpus):
    assert small(verify_corpus, evaluation=EVALUATION).evaluation.metrics == METRICS
    own = small(verify_corpus, evaluation=EVALUATION, objective=Custom("llmtrain.objectives:z_loss"))
    assert own.evaluation.metrics == EVALUATION.metrics
    assert small(verify_corpus).evaluation.metrics == {}


@pytest.mark.slow
def test_clean_plans_are_certified_and_bugs_are_detected(verify_corpus, tmp_path):
    job = job_of(small(verify_corpus, evaluation=EVALUATION), PLANS)
    run_ranks(1, refer, job, tmp_path)
    assert run_ranks(2, certified, job, tmp_path, timeout=600)[0] == dict.fromkeys(PLANS, True)
    only = job.model_copy(update={"plans": {name: job.plans[name] for name in PLANS[:1]}})
    found = run_ranks(2, plant, only, tmp_path, "planted_own_metrics", BUGS, timeout=600)[0]
    assert found == {"none": PLANS[:1], **{bug: [] for bug in BUGS}}
