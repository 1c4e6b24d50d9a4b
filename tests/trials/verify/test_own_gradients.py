"""Plans with a callback that changes gradients are certified with it in the reference, and not without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.plan.search.enumerate import enumerate_plans
from llmtrain.trials.verify.job import Certificate
from llmtrain.trials.verify.table import certificate_lines
from tests.helpers.harness import run_ranks
from tests.helpers.small_verify import job_of, plant, refer, small

ROOT = str(Path(__file__).parents[3])
NAMES = ["dp2-zero0-acc2", "dp2-ddp-acc2"]


def _recipe(corpus, name="Noise"):
    one = {"object": f"tests.helpers.own_gradients:{name}", "ranks": "all", "changes_gradients": True}
    return small(corpus, callbacks=[one], code_dir=ROOT)


@pytest.mark.slow
def test_the_reference_changes_gradients_too(verify_corpus, tmp_path):
    job = job_of(_recipe(verify_corpus), NAMES)
    run_ranks(1, refer, job, tmp_path)
    found = run_ranks(2, plant, job, tmp_path, "planted_gradients", "BUGS", timeout=600)[0]
    assert found == {"none": NAMES, "no_change": [], "another_step": [], "twice": []}


def test_the_certificate_says_what_it_covers(verify_corpus):
    recipe = _recipe(verify_corpus)
    plans, refused = enumerate_plans(recipe, 2)
    assert {plan.plan.parallel.zero_stage for plan in plans} == {0}
    assert "own.gradients" in {one.problem.rule for one in refused}
    none = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0, "same_lr": True}
    reference = {"fields": {}, "tolerance": none, "loss": (), "grad_norm": (), "lr": (), "evaluation": None}
    certificate = Certificate(
        **{"recipe": recipe, "steps": 4, "device": "cpu", "started": "", "seconds": 1, "environment": {}},
        **{"reference": {"recipe": reference, "sgd": reference}, "verdicts": (), "refused": ()},
    )
    line = "the reference also calls tests.helpers.own_gradients:Noise: the proof covers these plans with that change"
    assert any(one.startswith(line) for one in certificate_lines(certificate))


def test_an_error_in_the_reference_names_the_users_line(verify_corpus, tmp_path):
    job = job_of(_recipe(verify_corpus, "Fails"), NAMES[:1])
    with pytest.raises(AssertionError, match=r"own_gradients.py, line \d+: .*Fails fails in on_gradients of step 2"):
        run_ranks(1, refer, job, tmp_path)
