"""The 1F1B schedule against the formula, and against DeepSpeed's own."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from llmtrain.plan.plan import Batch
from llmtrain.predict.schedule import one_forward_one_backward, schedule_svg
from llmtrain.predict.time import bubble_of

SIZES = [(1, 3), (2, 1), (2, 8), (4, 2), (4, 16), (5, 7)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_a_step_lasts_as_the_formula_says(stages, micro_batches):
    slots = one_forward_one_backward(stages, micro_batches, forward=1.0, backward=2.5)
    busy, length = micro_batches * 3.5, max(slot.end for slot in slots)
    assert length == pytest.approx((micro_batches + stages - 1) * 3.5)
    assert 1 - busy / length == pytest.approx(bubble_of(stages, micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_a_stage_runs_its_passes_in_the_order_of_the_engine(stages, micro_batches):
    slots = one_forward_one_backward(stages, micro_batches)
    for stage in range(stages):
        own = [slot.kind for slot in sorted(slots, key=lambda slot: slot.start) if slot.stage == stage]
        theirs = [
            "forward" if isinstance(command, ForwardPass) else "backward"
            for commands in TrainSchedule(micro_batches, stages, stage).steps()
            for command in commands
            if isinstance(command, ForwardPass | BackwardPass)
        ]
        assert own == theirs


def test_the_picture_is_one(tmp_path):
    batch = Batch(global_batch_size=8, micro_batch_size=1, gradient_accumulation_steps=8, tokens_per_step=8)
    root = ElementTree.fromstring(schedule_svg(4, batch))
    assert root.tag.endswith("svg")
    assert len(root.findall(".//{*}title")) == 4 * 8 * 2
    assert "bubble 27.3%" in "".join(root.itertext())


def test_the_title_of_a_short_step_is_not_cut_off():
    batch = Batch(global_batch_size=1, micro_batch_size=1, gradient_accumulation_steps=1, tokens_per_step=1)
    root = ElementTree.fromstring(schedule_svg(2, batch))
    title = next(one.text for one in root.findall("{*}text") if one.get("font-size") == "13")
    assert title.endswith("blue forward, green backward")
    assert float(root.get("width")) > 6.5 * len(title)


def test_the_picture_of_a_long_step_stays_small():
    batch = Batch(global_batch_size=10**6, micro_batch_size=1, gradient_accumulation_steps=10**6, tokens_per_step=1)
    picture = schedule_svg(8, batch)
    assert "the picture has 32 micro-batches" in picture
    assert len(picture) < 300_000
