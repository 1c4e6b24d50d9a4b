"""The picture of a plan's memory is valid XML, and its bars show the figures of the plan."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict import Parts, memory_of
from llmtrain.plan.predict.picture import COLOURS, GREY, LIGHT, PLOT, memory_svg
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster

PIPELINE = load_recipe("recipes/llama3_70b.py:pipeline", [])


def drawn(memory):
    root = ElementTree.fromstring(memory_svg(memory))
    return root, [box for box in root.findall(".//{*}rect") if box.find("{*}title") is not None]


@pytest.mark.parametrize("device", ["h100", "gpu"])
def test_bars_are_the_parts_of_each_stage(device):
    memory = memory_of(resolve(PIPELINE[0], PIPELINE[1].resized(None, None, device)))
    root, bars = drawn(memory)
    rows: dict[str, list[ElementTree.Element]] = {}
    for bar in bars:
        rows.setdefault(bar.get("y"), []).append(bar)
    assert len(rows) == len(memory.stages) == 16
    longest = max(memory.needed, memory.capacity or 0)
    for stage, row in zip(memory.stages, rows.values(), strict=True):
        told = [bar.find("{*}title").text.partition(": ")[::2] for bar in row]
        sizes = {name.replace(" ", "_"): int(size.split()[0].replace(",", "")) for name, size in told}
        assert sizes == {name: size for name, size in stage.peak.by_part().items() if size}
        assert sum(float(bar.get("width")) for bar in row) == pytest.approx(stage.peak.total / longest * PLOT, rel=1e-3)
        assert f"{stage.peak.total / 2**30:,.1f} GiB" in "".join(root.itertext())
    assert len(root.findall(".//{*}line")) == bool(memory.capacity)


def test_a_plan_that_does_not_fit_passes_the_line():
    fields = {"parallel.zero_stage": 1, "parallel.activation_checkpointing": "none"}
    recipe = load_recipe("recipes/llama3_8b.py", [])[0].with_(**fields)
    unbounded = memory_of(resolve(recipe, Cluster(devices_per_node=8, device="gpu")))
    memory = unbounded.model_copy(update={"capacity": 80 * 2**30})
    root, bars = drawn(memory)
    (line,) = root.findall(".//{*}line")
    assert float(line.get("x1")) < max(float(bar.get("x")) + float(bar.get("width")) for bar in bars)
    assert "each rank" in "".join(root.itertext())


def test_every_part_has_a_distinct_colour():
    assert list(COLOURS) == list(Parts.model_fields)
    assert len({*COLOURS.values(), GREY}) == len(COLOURS) + 1
    assert set(COLOURS) > LIGHT


def test_write_saves_the_picture_of_memory(tmp_path):
    result = CliRunner().invoke(app, ["plan", "recipes/llama3_70b.py:pipeline", "--write", str(tmp_path)])
    assert result.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("plan.json", "ds_config.json", "accelerate.yaml", "memory.svg", "schedule.svg"),
    }
    assert "60.9 GiB of 79.1 GiB" in (tmp_path / "memory.svg").read_text()
    files = "plan.json, ds_config.json, accelerate.yaml, memory.svg, schedule.svg"
    assert f"wrote {files} to {tmp_path}" in result.output


def test_small_models_are_shown_in_a_smaller_unit(tmp_path):
    fields = ["--set", "parallel.pipeline=2", "--set", "parallel.zero_stage=1", "--gpus-per-node", "2"]
    result = CliRunner().invoke(app, ["plan", "recipes/tiny.py", *fields, "--write", str(tmp_path)])
    (line,) = [line for line in result.output.splitlines() if "by stage" in line]
    unit, _, sizes = line.strip().partition(" by stage: ")
    assert unit == "MiB"
    assert all(float(size) > 1 for size in sizes.split(", "))
    drawn = (tmp_path / "memory.svg").read_text()
    assert "GiB" not in drawn
    assert "MiB" in drawn
