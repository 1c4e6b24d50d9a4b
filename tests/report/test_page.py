"""The page is one file that needs no network, and texts in it stay texts."""

import json
import re

import pytest

from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from llmtrain.report import read_run
from llmtrain.report.page import page, write_report, write_report_at_end
from llmtrain.run_dir import RunDir
from tests.helpers.nasty import HTML
from tests.helpers.recorded_runs import long_run, write_lines
from tests.helpers.small_plan import small_plan


def test_the_page_matches_the_run_directory(run):
    text = page([read_run(run)])
    for said in (
        "finished at step 60",
        "on SIGTERM",
        "loss 9 above 4",
        "upon a time",
        "aten::mm",
        "mine acc",
        "0.6250",
    ):
        assert said in text


def test_predictions_are_shown_beside_measurements(run):
    recipe = small_plan(**{"parallel.precision": "bf16", "parallel.zero_stage": 1}).recipe
    plan = resolve(recipe, Cluster(devices_per_node=2, device="h100"))
    (run / "plan.json").write_text(plan.model_dump_json())
    text = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", page([read_run(run)])))
    assert "model llama, " in text
    assert "cluster 1 × 2 h100 = 2 workers" in text
    assert re.search(r"measured, rank 0 0\.9 GiB predicted, fullest rank [\d.]+ GiB of which ", text)
    assert re.search(r"A step takes 500 ms; predicted [\d.]+ (?:m)?s\. computation, predicted", text)


def test_texts_of_one_step_are_grouped_in_the_order_of_the_prompts(run):
    samples = [(10, "a"), (10, "b"), (20, "c"), (20, "d")]
    write_lines(run / "samples.jsonl", [{"step": step, "prompt": text, "text": ""} for step, text in samples])
    found = re.findall(r"after step (\d+)|<pre><b>(.)</b>", page([read_run(run)]))
    assert ["".join(one) for one in found] == ["20", "c", "d", "10", "a", "b"]


def test_the_page_loads_nothing_from_other_sites(run):
    text = page([read_run(run)])
    assert re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)""", text) == ["data:,"]
    assert not re.search(r"@import|url\(", text)
    assert re.search(r'Content-Security-Policy" content="default-src .{1,5}none.{1,5};', text)


def test_texts_with_html_stay_texts(run):
    (run / "recipe.json").write_text(json.dumps({"name": HTML, HTML: HTML, "data": {"sources": [{"name": HTML}]}}))
    (run / "environment.json").write_text(json.dumps({"host": HTML, "git": {"commit": HTML}, "packages": {HTML: HTML}}))
    write_lines(run / "samples.jsonl", [{"step": 1, "prompt": HTML, "text": HTML}])
    write_lines(run / "events.jsonl", [{"step": 1, "event": HTML, "text": HTML, "time": HTML}])
    with (run / "metrics.jsonl").open("a") as more:
        more.write(json.dumps({"step": 61, "eval_loss": 1.0, "eval_loss_by_source": {HTML: 1.0}}) + "\n")
    text = page([read_run(run)])
    assert text.count("<script") == text.count("</script") == 3
    assert "<img" not in text
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert not set(data) & set("<>&")
    assert json.loads(data)["runs"][0]["name"] == HTML


def test_several_runs_have_a_table_of_their_differences(tmp_path):
    runs = []
    for number, lr in enumerate((0.1, 0.2)):
        folder = long_run(tmp_path / f"{number}", 5, number)
        weights = [{"name": "a", "weight": 1}, {"name": "b", "weight": number}]
        document = {"name": f"run_{number}", "optim": {"lr": lr, "name": "adamw"}, "data": {"sources": weights}}
        (folder / "recipe.json").write_text(json.dumps(document))
        runs.append(read_run(folder))
    text = page(runs)
    section = re.search(r'<section id="differences">(.*?)</section>', text, re.DOTALL)[1]
    fields = re.findall(r'<th scope="row">(.*?)</th>', section)
    assert fields == ["optim.lr", "data.sources.1.weight"]
    assert "adamw" not in section


def test_long_texts_are_cut(run):
    text = "x" * 900_000
    (run / "recipe.json").write_text(json.dumps({"name": text, "a": text, "b": [text]}))
    event = {"step": 1, "event": text, "text": text, "time": text}
    write_lines(run / "events.jsonl", [event] * 20)
    write_lines(run / "samples.jsonl", [{"step": 1, "prompt": text, "text": text}] * 20)
    assert len(page([read_run(run)])) < 2_000_000


@pytest.mark.parametrize("content", [None, "", "{", '{"step": 1}\n', '{"step": 1, "eval_loss": null}\n'])
def test_a_nearly_empty_run_has_a_page(tmp_path, content):
    (tmp_path / "recipe.json").write_text("{}")
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert "<h1>" in page([read_run(tmp_path)])


def test_a_page_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    said = []
    write_report_at_end(RunDir(tmp_path / "missing"), said.append)
    assert "was not written" in said[0]


@pytest.mark.slow
def test_a_run_of_a_hundred_thousand_steps_fits_in_two_megabytes(tmp_path):
    folder = long_run(tmp_path / "run", 100_000)
    write_report([folder], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
