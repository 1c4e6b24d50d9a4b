"""The prover proved: it sees every planted bug, and none where there is none."""

from __future__ import annotations

import pytest
from harness import run_ranks
from small_verify import certified, job_of, refer, small

PLAIN = "dp2-zero0-acc2"
REPRESENTATIVE = ["dp2-zero2-acc1-offload", "dp2-zero3-acc2"]


def _with_bugs(rank: int, job, folder) -> dict[str, dict[str, bool]]:
    from planted import BUGS

    found = {"none": certified(job, folder)}
    for bug in BUGS:
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            found[bug.__name__] = certified(job, folder)
    return found


def _certified(rank: int, job, folder) -> dict[str, bool]:
    return certified(job, folder)


def test_every_planted_bug_is_caught(verify_corpus, tmp_path):
    # ZeRO-0 alone: there nothing but the engine's own all-reduce joins the ranks.
    job = job_of(small(verify_corpus), [PLAIN])
    run_ranks(1, refer, job, tmp_path)
    found = run_ranks(2, _with_bugs, job, tmp_path)[0]
    assert found.pop("none") == {PLAIN: True}
    assert len(found) >= 12
    assert {name for name, verdict in found.items() if any(verdict.values())} == set()


def _clean(seed: int, names: list[str], corpus, folder, **fields) -> dict[str, bool]:
    job = job_of(small(corpus, **{"train.seed": seed, **fields}), names)
    run_ranks(1, refer, job, folder)
    return run_ranks(2, _certified, job, folder, timeout=600)[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_clean_plans_are_certified(seed, verify_corpus, tmp_path):
    assert _clean(seed, REPRESENTATIVE, verify_corpus, tmp_path) == dict.fromkeys(REPRESENTATIVE, True)


@pytest.mark.slow
def test_bf16_is_certified_and_a_bug_in_it_is_not(verify_corpus, tmp_path):
    names = ["dp2-zero1-acc2", "dp2-zero3-acc1"]
    fields = {"parallel.precision": "bf16"}
    assert _clean(1, names, verify_corpus, tmp_path, **fields) == dict.fromkeys(names, True)
    job = job_of(small(verify_corpus, **fields), names[:1])
    assert run_ranks(2, _without_decay, job, tmp_path)[0] == {names[0]: False}


def _without_decay(rank: int, job, folder) -> dict[str, bool]:
    from planted import dropped_weight_decay

    with pytest.MonkeyPatch.context() as patch:
        dropped_weight_decay(patch)
        return certified(job, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "precision"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (1, "autocast_bf16")]
)
def test_every_clean_plan_is_certified(seed, precision, verify_corpus, tmp_path):
    verdicts = _clean(seed, [], verify_corpus, tmp_path, **{"parallel.precision": precision})
    assert verdicts
    assert all(verdicts.values()), verdicts
