"""Plans with a loss of one's own are certified under every strategy, and every planted bug is detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain import Custom
from tests.helpers import own_losses
from tests.helpers.harness import run_ranks
from tests.helpers.small_pairs import small_pairs, write_pairs
from tests.helpers.small_verify import certified, job_of, plant, refer, small, write_corpus

SLOW, BREADTH = pytest.mark.slow, pytest.mark.breadth
LOSSES = "llmtrain.objectives:"
Z = Custom(LOSSES + "z_loss", weight=0.01)
CLASSES = Custom(LOSSES + "classification", count=LOSSES + "classified", classes=[221, 83, 73, 69, 84])
DOCUMENTS = Custom(own_losses.document_mean, unit="document")
REWARD = Custom(LOSSES + "reward_model", unit="pair")
COLUMNS = ("a",)
WEIGHTED = Custom(own_losses.weighted, columns=COLUMNS)
HEAVY = Custom(own_losses.heavy, count=own_losses.count_heavy, columns=COLUMNS, unit="document")
SCORES = Custom(LOSSES + "regression", unit="document", columns=("score",))
MARGINS = Custom(own_losses.pair_with_margin, unit="pair", columns=("margin",))
HIDDEN = Custom(own_losses.hidden_tokens, hidden_states=True)
HIDDEN_DOCUMENTS = Custom(own_losses.hidden_documents, hidden_states=True, unit="document")
OF_HEAD = ("head_drawn_by_rank", "head_without_gradient", "position_before")
SHARED = ["dp1-pp2-zero1-acc4", "dp1-tp2-zero1-acc4"]
SLICES = ["dp1-sp2-zero1-acc4"]
FLAT = ["dp2-zero0-acc2", "dp2-zero2-acc2", "dp2-zero3-acc2", "dp2-ddp-acc2", "dp2-fsdp2-acc2"]
OF_NUMBERS = ("numbers_of_the_document_before", "numbers_of_other_rows", "numbers_of_ones")
FOUR = ["dp2-pp2-zero1-acc2", "dp1-pp2-sp2-zero1-acc4", "dp1-tp2-sp2-zero1-acc4", "dp2-sp2-zero2-acc2"]
DEVICES = "dp1-data_parallel-acc4"
CONCAT = {"data.packing": "concat"}
MIXED = {"data.mask_documents": False}
CHUNKED = {"kernels.loss": "chunked"}
ZERO_BUBBLE = {"parallel.pipeline_schedule": "zero_bubble"}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    return with_numbers(write_pairs(tmp_path_factory.mktemp("pairs")))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return with_numbers(write_corpus(tmp_path_factory.mktemp("corpus")))


def with_numbers(path: Path) -> Path:
    """Adds columns to rows. Their numbers differ from row to row, and have a mean of 1, as weights have."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row.update(dict.fromkeys(("a", "score", "margin"), 37 * number % 101 / 50))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_of(objective, corpus, pairs, **fields):
    make, path = (small_pairs, pairs) if objective.compares_pairs else (small, corpus)
    outputs = {CLASSES.name: len(CLASSES.options["classes"]), REWARD.name: 1, SCORES.name: 1}.get(objective.name)
    return make(path, objective=objective, **{"model.num_labels": outputs}, **fields)


@pytest.mark.parametrize(
    ("objective", "names", "fields"),
    [
        pytest.param(CLASSES, ["dp1-zero2-acc4"], {}, id="classes"),
        pytest.param(CLASSES, SLICES, {}, id="classes-slices", marks=SLOW),
        pytest.param(DOCUMENTS, SHARED[:1], {}, id="documents", marks=SLOW),
        pytest.param(REWARD, SHARED[1:], {}, id="reward", marks=SLOW),
        pytest.param(WEIGHTED, ["dp2-fsdp2-acc2"], {}, id="weighted", marks=SLOW),
        pytest.param(SCORES, FLAT[1:2], {}, id="scores", marks=BREADTH),
        pytest.param(HIDDEN, ["dp2-zero3-acc2"], {}, id="hidden", marks=SLOW),
        pytest.param(HIDDEN, [*FLAT, *SLICES, *SHARED[:1]], {}, id="hidden-all", marks=BREADTH),
        pytest.param(HIDDEN_DOCUMENTS, [*FLAT, *SHARED[:1]], {}, id="hidden-documents", marks=BREADTH),
        pytest.param(HIDDEN, [*FLAT[1:3], FLAT[4]], {"parallel.precision": "bf16"}, id="hidden-bf16", marks=BREADTH),
        pytest.param(HIDDEN, FLAT, {"parallel.precision": "autocast_bf16"}, id="hidden-autocast", marks=BREADTH),
        pytest.param(HIDDEN, SHARED[:1], ZERO_BUBBLE, id="hidden-zero-bubble", marks=BREADTH),
        pytest.param(Z, [*FLAT, *SLICES, *SHARED], {}, id="z", marks=BREADTH),
        pytest.param(WEIGHTED, [*FLAT, *SLICES, *SHARED, DEVICES], {}, id="weighted-all", marks=BREADTH),
        pytest.param(WEIGHTED, [*FLAT[:2], *SLICES, *SHARED], CONCAT, id="weighted-concat", marks=BREADTH),
        pytest.param(WEIGHTED, [*SLICES, FLAT[3]], MIXED, id="weighted-mixed", marks=BREADTH),
        pytest.param(WEIGHTED, [*FLAT[:4], *SLICES, *SHARED], CHUNKED, id="weighted-chunked", marks=BREADTH),
        pytest.param(WEIGHTED, FOUR, {}, id="weighted-four", marks=BREADTH),
        pytest.param(WEIGHTED, SHARED[:1], ZERO_BUBBLE, id="weighted-zero-bubble", marks=BREADTH),
        pytest.param(HEAVY, [*FLAT, *SHARED, DEVICES], {}, id="heavy-all", marks=BREADTH),
        pytest.param(SCORES, [*FLAT, *SHARED], {}, id="scores-all", marks=BREADTH),
        pytest.param(SCORES, FLAT[1:3], {"data.packing": "none"}, id="scores-alone", marks=BREADTH),
        pytest.param(MARGINS, [*FLAT, *SHARED], {}, id="margins-all", marks=BREADTH),
        pytest.param(CLASSES, [*FLAT, *SHARED], {}, id="classes-all", marks=BREADTH),
        pytest.param(DOCUMENTS, [*FLAT, *SHARED, DEVICES], {}, id="documents-all", marks=BREADTH),
        pytest.param(REWARD, [*FLAT, *SHARED], {}, id="reward-all", marks=BREADTH),
        pytest.param(Z, FOUR, {}, id="z-four", marks=BREADTH),
        pytest.param(CLASSES, SHARED[:1], ZERO_BUBBLE, id="classes-zero-bubble", marks=BREADTH),
        pytest.param(REWARD, SHARED[:1], ZERO_BUBBLE, id="reward-zero-bubble", marks=BREADTH),
        pytest.param(
            DOCUMENTS, [*FLAT[1:3], FLAT[4]], {"parallel.precision": "bf16"}, id="documents-bf16", marks=BREADTH
        ),
        pytest.param(Z, FLAT[1:], {"parallel.precision": "autocast_bf16"}, id="z-autocast", marks=BREADTH),
        pytest.param(DOCUMENTS, FLAT[1:3], {"data.packing": "none"}, id="documents-alone", marks=BREADTH),
    ],
)
def test_clean_plans_are_certified(objective, names, fields, corpus, pairs, tmp_path):
    job = job_of(recipe_of(objective, corpus, pairs, **fields), names, nproc=4 if names is FOUR else 2)
    run_ranks(1, refer, job, tmp_path)
    found = {}
    for world in {plan.workers for plan in job.plans.values()}:
        found |= run_ranks(world, certified, job, tmp_path, timeout=600)[0]
    assert found == dict.fromkeys(names, True)


@pytest.mark.parametrize(
    ("objective", "bugs"),
    [
        pytest.param(CLASSES, ("counts_of_a_rank", "targets_instead_of_items"), id="classes", marks=SLOW),
        pytest.param(DOCUMENTS, ("rows_instead_of_documents", "targets_instead_of_items"), id="rows", marks=BREADTH),
        pytest.param(REWARD, ("pairs_swapped", "mean_of_micro_batches"), id="pairs", marks=BREADTH),
        pytest.param(WEIGHTED, OF_NUMBERS, id="numbers", marks=SLOW),
        pytest.param(SCORES, OF_NUMBERS, id="numbers-of-documents", marks=BREADTH),
    ],
)
def test_every_planted_bug_is_detected(objective, bugs, corpus, pairs, tmp_path):
    _detected(recipe_of(objective, corpus, pairs), "dp2-zero2-acc2", "planted_own_loss", bugs, tmp_path)


@pytest.mark.breadth
def test_numbers_of_other_slices_are_detected(corpus, pairs, tmp_path):
    bugs = ("numbers_of_the_first_slice",)
    _detected(recipe_of(WEIGHTED, corpus, pairs), *SLICES, "planted_own_loss", bugs, tmp_path)


@pytest.mark.parametrize(
    ("objective", "plan", "bugs"),
    [
        pytest.param(REWARD, "dp1-pp2-zero1-acc4", OF_HEAD, id="stages", marks=SLOW),
        pytest.param(CLASSES, "dp1-tp2-zero1-acc4", OF_HEAD, id="slices", marks=BREADTH),
        pytest.param(HIDDEN, "dp2-zero3-acc2", ("weight_without_gradient",), id="hidden", marks=BREADTH),
    ],
)
def test_every_bug_at_the_head_is_detected(objective, plan, bugs, corpus, pairs, tmp_path):
    _detected(recipe_of(objective, corpus, pairs), plan, "planted_heads", bugs, tmp_path)


def _detected(recipe, plan, module, bugs, folder):
    job = job_of(recipe, [plan])
    run_ranks(1, refer, job, folder)
    found = run_ranks(2, plant, job, folder, module, bugs, timeout=600)[0]
    assert found == {"none": [plan], **{bug: [] for bug in bugs}}
