"""The measurement over a slow network, and its comparison with predictions."""

from __future__ import annotations

import pytest

from benchmarks.definitions import BENCHMARKS
from benchmarks.programs.slow_network import BACKWARD_S, BUCKET_MIB, LAYERS, MICRO_BATCHES, PLANS, plan_of
from benchmarks.slow_network import ASSUMED, RATE, on_gloo, predicted, row_of
from llmtrain.plan.predict.links import bytes_sent
from llmtrain.plan.predict.traffic import CommunicationGroups, by_kind
from llmtrain.plan.predict.work import parameters_of_stages


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_waits_for_exposed_communication(name):
    waiting, hidden = predicted(plan_of(name))
    assert waiting >= 0
    assert hidden >= 0
    assert waiting + hidden > 0


def test_the_time_of_a_ring_over_the_network_is_its_bytes_over_its_rate():
    """DDP reduces all gradients once, three of four parts of them twice over the cable.

    One backward pass hides them, but for those of the embedding and the last bucket.
    """
    plan = plan_of("DDP")
    waiting, hidden = predicted(plan)
    seconds = 2 * 3 / 4 * 4 * plan.model.parameters / (RATE * ASSUMED.link)
    assert waiting + hidden == pytest.approx(seconds, rel=0.01)
    last = (plan.model.embedding_parameters + BUCKET_MIB * 2**20 / 4) / plan.model.parameters
    assert hidden == pytest.approx(min((1 - last) * seconds, LAYERS * BACKWARD_S), rel=0.01)


def test_fsdp2_waits_for_everything_on_cpus():
    waiting, hidden = predicted(plan_of("FSDP2"))
    assert waiting > 0
    assert hidden == 0


@pytest.mark.parametrize("name", PLANS)
def test_no_byte_is_lost_on_gloo(name):
    """Its reduce-scatter sends as much again."""
    plan = plan_of(name)
    traffic = CommunicationGroups(plan).traffic(parameters_of_stages(plan.model, plan.stages)[0])
    here = by_kind(on_gloo(traffic, plan.recipe.parallel.strategy).per_step(MICRO_BATCHES), bytes_sent)
    elsewhere = by_kind(traffic.per_step(MICRO_BATCHES), bytes_sent)
    scattered = elsewhere.pop("reduce_scatter", 0.0)
    assert here == pytest.approx(elsewhere | ({"all_reduce": 2 * scattered} if scattered else {}))


def test_hierarchical_partition_sends_less_over_the_network():
    every, neighbours = (sum(predicted(plan_of(name))) for name in ("ZeRO-3", "ZeRO-3, hpZ"))
    parameters = 4 * plan_of("ZeRO-3").model.parameters
    less = 3 / 4 * parameters * (MICRO_BATCHES - 1) / (RATE * ASSUMED.link)
    assert every - neighbours == pytest.approx(less, rel=0.02)


def test_a_row_has_prediction_and_measurement():
    waiting, _ = predicted(plan_of("DDP"))
    free = {"step_s": 1.0, "cable_bytes": 10.0}
    row = row_of("DDP", free, {"step_s": 1.0 + waiting, "cable_bytes": 10.0})
    assert row["step_error"] == pytest.approx(0.0, abs=1e-3)
    assert row["measured_hidden"] == pytest.approx(row["predicted_hidden"], abs=1e-3)
    [verdict] = BENCHMARKS["slow_network"].verdicts({"rows": [row]})
    assert verdict.met
    [verdict] = BENCHMARKS["slow_network"].verdicts({"rows": [row | {"step_error": 0.2}]})
    assert not verdict.met
