"""Pictures of schedules."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from llmtrain.plan.plan import Batch
from llmtrain.plan.predict.picture import schedule_svg
from llmtrain.plan.schedules import PipelineSchedule

ONE = PipelineSchedule("1f1b", 4, 1)


def test_the_picture_is_valid(tmp_path):
    batch = Batch(global_batch_size=8, micro_batch_size=1, gradient_accumulation_steps=8, tokens_per_step=8)
    root = ElementTree.fromstring(schedule_svg(ONE, batch))
    assert root.tag.endswith("svg")
    assert len(root.findall(".//{*}title")) == 4 * 8 * 2
    assert "bubble 27.3%" in "".join(root.itertext())


def test_the_title_of_a_short_step_is_not_cut_off():
    batch = Batch(global_batch_size=1, micro_batch_size=1, gradient_accumulation_steps=1, tokens_per_step=1)
    root = ElementTree.fromstring(schedule_svg(PipelineSchedule("1f1b", 2, 1), batch))
    title = next(one.text for one in root.findall("{*}text") if one.get("font-size") == "13")
    assert title.endswith("blue forward, green backward")
    assert float(root.get("width")) > 6.5 * len(title)


def test_the_picture_of_a_long_step_stays_small():
    batch = Batch(global_batch_size=10**6, micro_batch_size=1, gradient_accumulation_steps=10**6, tokens_per_step=1)
    picture = schedule_svg(PipelineSchedule("1f1b", 8, 1), batch)
    assert "the picture has 32 micro-batches" in picture
    assert len(picture) < 300_000


@pytest.mark.parametrize(
    ("schedule", "passes"), [(PipelineSchedule("interleaved", 4, 2), 2), (PipelineSchedule("zero_bubble", 4, 2), 3)]
)
def test_the_picture_of_several_stages_on_a_rank_has_all_of_their_passes(schedule, passes):
    batch = Batch(global_batch_size=8, micro_batch_size=1, gradient_accumulation_steps=8, tokens_per_step=8)
    root = ElementTree.fromstring(schedule_svg(schedule, batch))
    assert len(root.findall(".//{*}title")) == 8 * 8 * passes
