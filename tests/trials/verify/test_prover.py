"""Tests `verify` itself: it detects every planted bug, and reports none in a correct engine."""

from __future__ import annotations

import importlib

import pytest

from llmtrain.trials.verify import train
from llmtrain.trials.verify.job import certified as is_certified
from llmtrain.trials.verify.job import read_references, read_verdicts
from tests.helpers import planted_shared
from tests.helpers.harness import run_ranks
from tests.helpers.small_verify import CHATS, CPU, MOE, certified, job_of, plant, refer, small, write_chats

REPRESENTATIVE = ["dp2-zero2-acc1-offload", "dp2-zero3-acc2", "dp1-pp2-zero1-acc4"]
GPT2 = {
    "model.architecture": "gpt2",
    "model.config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.2},
}


SLOW, BREADTH = pytest.mark.slow, pytest.mark.breadth


@pytest.mark.parametrize(
    ("plan", "module", "bugs", "precision"),
    [
        # ZeRO-0 alone: there nothing but the engine's own all-reduce joins the ranks.
        pytest.param("dp2-zero0-acc2", "planted", "BUGS", "fp32", marks=BREADTH),
        pytest.param("dp2-zero1-acc2", "planted_zero", "PARTITIONED", "fp32", marks=BREADTH),
        pytest.param("dp2-zero2-acc2", "planted_zero", "PARTITIONED", "fp32", marks=BREADTH),
        pytest.param("dp2-zero3-acc2", "planted_zero", "SHARDED", "fp32", marks=BREADTH),
        pytest.param("dp1-pp2-zero1-acc4", "planted_pipeline", "STAGED", "fp32", marks=SLOW),
        pytest.param("dp2-pp2-zero1-acc2", "planted_pipeline", "REPLICATED", "fp32", marks=BREADTH),
        pytest.param("dp2-zero1-acc2", "planted", "COARSE", "bf16", marks=BREADTH),
        pytest.param(
            "dp2-zero2-acc2", "planted_zero", ("dropped_group", "clipping_per_partition"), "bf16", marks=BREADTH
        ),
    ],
)
def test_every_planted_bug_is_detected(plan, module, bugs, precision, verify_corpus, tmp_path):
    recipe = small(verify_corpus, **{"parallel.precision": precision})
    job = job_of(recipe, [plan], nproc=4)
    run_ranks(1, refer, job, tmp_path)
    world_size = job.plans[plan].cluster.world_size
    found = run_ranks(world_size, plant, job, tmp_path, module, bugs, timeout=600)[0]
    assert found.pop("none") == [plan]
    assert found
    assert {name for name, plans in found.items() if plans} == set()


@pytest.mark.slow
def test_every_bug_of_a_conversation_mask_is_detected(tmp_path):
    job = job_of(small(write_chats(tmp_path), **CHATS), ["dp2-zero1-acc2"])
    run_ranks(1, refer, job, tmp_path)
    found = run_ranks(2, plant, job, tmp_path, "planted_masks", "MASKED", timeout=600)[0]
    assert found.pop("none") == ["dp2-zero1-acc2"]
    assert len(found) == 7
    assert {name for name, plans in found.items() if plans} == set()


def _judge_one_by_one(rank: int, job, folder) -> list[int]:
    """How many plans have a verdict after each of three workers, which compare one plan each."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "PLANS_OF_A_WORKER", 1)
        for _ in range(3):
            train.verify_rank(job, folder, CPU, lambda text: None)
            found.append(len(read_verdicts(folder)))
    return found


@pytest.mark.slow
def test_a_worker_continues_where_the_one_before_it_ended(verify_corpus, tmp_path):
    job = job_of(small(verify_corpus), ["dp1-zero0-acc4", "dp1-zero1-acc4"])
    assert run_ranks(1, _judge_one_by_one, job, tmp_path) == [[1, 2, 2]]


def _judge(rank: int, job, folder) -> list[str]:
    """The plans of one worker that are certified, by a reference that is made here."""
    train.verify_rank(job, folder, CPU, lambda text: None)
    references = read_references(folder)
    return [one.name for one in read_verdicts(folder) if is_certified(one, references)]


def _plant_shared(rank: int, job, folder, bugs: str, chosen: slice) -> dict[str, list[str]]:
    """Bug → the plans that are certified with it, by a reference that is made with it too; `none` without any."""
    planted = getattr(planted_shared, bugs)[chosen]
    found = {}
    for bug in (None, *planted):
        name = bug.__name__ if bug else "none"
        with pytest.MonkeyPatch.context() as patch:
            if bug:
                bug(patch)
            (folder / name).mkdir()
            found[name] = _judge(rank, job, folder / name)
    return found


@pytest.mark.parametrize(
    ("fields", "bugs", "chosen"),
    [
        pytest.param({}, "SHARED", slice(0, 3)),
        pytest.param({}, "SHARED", slice(3, None), marks=BREADTH),
        pytest.param(MOE, "ROUTED", slice(None), marks=BREADTH),
    ],
)
def test_a_bug_that_all_engines_share_is_detected(fields, bugs, chosen, verify_corpus, tmp_path):
    job = job_of(small(verify_corpus, **fields, **{"model.config.rms_norm_eps": 1e-2}), ["dp1-zero0-acc4"], nproc=1)
    (found,) = run_ranks(1, _plant_shared, job, tmp_path, bugs, chosen, timeout=600)
    assert found.pop("none") == ["dp1-zero0-acc4"]
    assert found
    assert {name for name, plans in found.items() if plans} == set()


def test_there_are_bugs_of_every_kind():
    kinds = ("", "_zero", "_pipeline", "_shared", "_idle", "_adapter", "_pairs", "_masks")
    modules = [importlib.import_module(f"tests.helpers.planted{kind}") for kind in kinds]
    planted, zero, pipeline, shared, idle, adapter, pairs, masks = modules
    lists = (planted.BUGS, zero.PARTITIONED, zero.SHARDED, pipeline.STAGED, pipeline.REPLICATED)
    lists += (shared.SHARED, shared.ROUTED, idle.FROZEN, idle.UNMET, idle.SOMETIMES)
    lists += (adapter.FLAT, adapter.STAGED, adapter.SLICED, adapter.PACKED)
    lists += (pairs.COMPARED, pairs.SLICED, pairs.LABELLED, masks.MASKED)
    all_bugs = {bug for bugs in lists for bug in bugs}
    assert len(all_bugs) > 80
    for bug in all_bugs:  # the code that it replaces exists
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
    defined = {
        value
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }
    assert defined == {bug for bugs in lists for bug in bugs}


def _clean(names: list[str], corpus, folder, **fields) -> dict[str, bool]:
    job = job_of(small(corpus, **fields), names)
    run_ranks(1, refer, job, folder)
    return run_ranks(2, certified, job, folder, timeout=600)[0]


@pytest.mark.parametrize(
    "seed", [pytest.param(1, marks=SLOW), pytest.param(2, marks=BREADTH), pytest.param(3, marks=BREADTH)]
)
def test_clean_plans_are_certified(seed, verify_corpus, tmp_path):
    verdicts = _clean(REPRESENTATIVE, verify_corpus, tmp_path, **{"train.seed": seed})
    assert verdicts == dict.fromkeys(REPRESENTATIVE, True)


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_all_ways_to_pack_are_certified(packing, mask_documents, verify_corpus, tmp_path):
    """Documents that are cut, and sequences in which they see each other."""
    fields = {"data.packing": packing, "data.mask_documents": mask_documents}
    job = job_of(small(verify_corpus, **fields), ["dp1-zero1-acc4"], nproc=1)
    (found,) = run_ranks(1, _judge, job, tmp_path)
    assert found == ["dp1-zero1-acc4"]


@pytest.mark.breadth
@pytest.mark.parametrize("fields", [MOE, GPT2, {"model.config.tie_word_embeddings": False}], ids=str)
def test_other_models_are_certified(fields, verify_corpus, tmp_path):
    """Experts with a router's loss, dropout and biases, a head of its own."""
    names = ["dp2-zero0-acc2", "dp2-zero1-acc2", "dp2-zero3-acc2", "dp1-pp2-zero1-acc4"]
    assert _clean(names, verify_corpus, tmp_path, **fields) == dict.fromkeys(names, True)


PARTS = 8


@pytest.mark.parametrize(
    ("precision", "part"),
    [
        pytest.param(precision, part, marks=SLOW if (precision, part) == ("fp32", 0) else BREADTH)
        for precision in ("fp32", "bf16", "autocast_bf16")
        for part in range(PARTS)
    ],
)
def test_every_clean_plan_is_certified(precision, part, verify_corpus, tmp_path):
    fields = {"train.seed": 1, "parallel.precision": precision}
    names = list(job_of(small(verify_corpus, **fields), []).plans)[part::PARTS]
    verdicts = _clean(names, verify_corpus, tmp_path, **fields)
    assert verdicts
    assert [name for name, certified in verdicts.items() if not certified] == []
