"""The page in a real Chromium."""

import json
import math
import threading
import time

import pytest

from llmtrain.report.page import write_report
from llmtrain.report.serve import LivePage, PageServer
from tests.helpers.browser import chromium, missing
from tests.helpers.nasty import HTML
from tests.helpers.recorded_runs import long_run, step_record

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
POINTS = """
report.drawAll();
const chart = report.charts.find((one) => one.title === arguments[0]);
return chart.curves.map((curve, i) => {
    const points = [];
    chart.data[0].forEach((x, at) => { const y = chart.data[i + 1][at]; if (y !== undefined) points.push([x, y]); });
    return {label: curve.label, run: curve.run.name, points};
});
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of runs; at its end, nothing may have been written to the console."""

    def open_page(*folders):
        write_report(folders, tmp_path / "page.html")
        browser.get(f"file://{tmp_path / 'page.html'}")
        return browser

    browser.get_log("browser")
    yield open_page
    assert browser.get_log("browser") == []


def _points(browser, title):
    return browser.execute_script(POINTS, title)


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _click(browser, selector):
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def test_curves_have_the_points_of_the_metrics(opened, run):
    browser = opened(run)
    training, evaluation = _points(browser, "Loss")
    lines = _lines(run)
    assert training["points"] == [[one["step"], one["loss"]] for one in lines if "loss" in one]
    assert evaluation["points"] == [[one["step"], one["eval_loss"]] for one in lines if "eval_loss" in one]
    legends = browser.execute_script("return report.charts.map((one) => one.legend.textContent)")
    assert legends[0] == "losseval_loss"
    assert not any(legends[1:])  # one curve has the title of its chart
    (norm,) = _points(browser, "Gradient norm")
    assert norm["points"] == [[one["step"], one["grad_norm"]] for one in lines if "loss" in one]
    assert (
        browser.execute_script(
            "return report.charts.filter((one) => one.plot.root.querySelector('canvas').width < 200)"
        )
        == []
    )


def test_the_axis_may_be_tokens_or_hours(opened, run):
    browser = opened(run)
    _click(browser, "input[value=tokens]")
    assert [x for x, _ in _points(browser, "Learning rate")[0]["points"]] == [512 * step for step in range(1, 61)]
    _click(browser, "input[value=hours]")
    hours = [x for x, _ in _points(browser, "Learning rate")[0]["points"]]
    assert hours == pytest.approx([0.5 * step / 3600 for step in range(1, 61)])


def test_curves_zoom_smooth_and_switch_to_logarithm(opened, run):
    browser = opened(run)
    _points(browser, "Loss")
    browser.execute_script("report.zoom([20, 30])")
    time.sleep(0.2)
    scales = browser.execute_script("return report.charts.map((one) => [one.plot.scales.x.min, one.plot.scales.x.max])")
    assert scales == [[20, 30]] * len(scales)
    _click(browser, "#whole")
    time.sleep(0.2)
    assert browser.execute_script("return report.charts[0].plot.scales.x.max") == 60
    browser.execute_script(
        "const s = document.getElementById('smooth'); s.value = 50; s.dispatchEvent(new Event('input'))"
    )
    raw, mean, _ = _points(browser, "Loss")
    assert mean["label"].endswith("smoothed")
    expected, before, reach = [raw["points"][0][1]], 1, 59 * 0.2 * 0.5**2
    for step, loss in raw["points"][1:]:
        weight = 0.0 if loss is None else 1 - math.exp((before - step) / reach)
        expected.append(expected[-1] + weight * ((loss or 0.0) - expected[-1]))
        before = before if loss is None else step
    finite = [(y, wanted) for (_, y), wanted in zip(mean["points"], expected, strict=True) if y is not None]
    assert len(finite) == 59
    assert [y for y, _ in finite] == pytest.approx([wanted for _, wanted in finite])
    _click(browser, "figcaption button")
    assert browser.execute_script("return report.charts[0].plot.scales.y.distr") == 3


def test_dragging_over_a_curve_zooms_all_of_them(opened, run):
    from selenium.webdriver import ActionChains

    browser = opened(run)
    _points(browser, "Loss")
    over = browser.find_element("css selector", ".chart .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    ActionChains(browser).move_to_element_with_offset(over, -40, 0).click_and_hold().move_by_offset(
        80, 0
    ).release().perform()
    time.sleep(0.2)
    scales = browser.execute_script("return report.charts.map((one) => [one.plot.scales.x.min, one.plot.scales.x.max])")
    assert scales == [scales[0]] * len(scales)
    assert 0 < scales[0][0] < scales[0][1] < 60
    ActionChains(browser).move_to_element(over).double_click().perform()
    time.sleep(0.2)
    assert browser.execute_script("return report.charts[0].plot.scales.x.max") == 60


def test_a_click_hides_a_run(opened, tmp_path):
    browser = opened(*(long_run(tmp_path / f"{seed}", 20, seed) for seed in range(3)))
    assert [one["run"] for one in _points(browser, "Gradient norm")] == ["run_0", "run_1", "run_2"]
    _click(browser, "#runs button:nth-child(2)")
    assert [one["run"] for one in _points(browser, "Gradient norm")] == ["run_0", "run_2"]
    pressed = "return [...document.querySelectorAll('#runs button')].map((one) => one.getAttribute('aria-pressed'))"
    assert browser.execute_script(pressed) == ["true", "false", "true"]
    _click(browser, "#runs button:nth-child(2)")
    assert len(_points(browser, "Gradient norm")) == 3


def test_marks_and_values_are_shown_at_the_pointer(opened, run):
    from selenium.webdriver import ActionChains

    browser = opened(run)
    _points(browser, "Loss")
    over = browser.find_element("css selector", ".chart .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    offset = browser.execute_script(
        "const u = report.charts[0].plot; return u.valToPos(17, 'x') - u.over.clientWidth / 2"
    )
    ActionChains(browser).move_to_element_with_offset(over, round(offset), 0).perform()
    tip = browser.find_element("css selector", ".tip:not([hidden])").text
    assert "update skipped, step 17: loss 9 above 4" in tip
    (loss,) = [one["loss"] for one in _lines(run) if one["step"] == 17]
    assert f"{loss:.5g}" in tip


def test_names_and_texts_with_html_stay_texts(opened, tmp_path):
    folder = long_run(tmp_path / "run", 20, name=HTML)
    event = {"step": 5, "event": "skipped", "text": HTML, "time": HTML}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    (folder / "samples.jsonl").write_text(json.dumps({"step": 5, "prompt": HTML, "text": HTML}) + "\n")
    with (folder / "metrics.jsonl").open("a") as more:
        more.write(json.dumps({"step": 20, "eval_loss": 1.0, "eval_loss_by_source": {HTML: 1.0}}) + "\n")
    browser = opened(folder, long_run(tmp_path / "other", 20))
    browser.execute_script("report.drawAll()")
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert browser.execute_script("return document.querySelectorAll('script').length") == 3
    assert browser.execute_script("return document.querySelector('#runs button').textContent") == HTML
    assert browser.execute_script("return document.querySelector('.sample pre').textContent") == HTML * 2


def test_the_theme_is_that_of_the_system_until_a_click(opened, run):
    browser = opened(run)
    background = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(background)
    _click(browser, "#theme")
    dark = browser.execute_script(background)
    assert dark != light
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        browser.refresh()
        assert browser.execute_script(background) == dark
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_prints_with_its_curves(opened, run):
    browser = opened(run)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(printed) > 50_000
    assert browser.execute_script("return report.state.printing") is False
    assert browser.execute_script("return report.charts.every((one) => one.plot)")


def test_a_page_of_ten_long_runs_opens(opened, tmp_path):
    """How long that takes is measured by benchmarks, and depends on the number of points, which is bounded."""
    browser = opened(*(long_run(tmp_path / f"{seed}", 4_000, seed) for seed in range(10)))
    assert len(_points(browser, "Loss")) == 20
    assert (tmp_path / "page.html").stat().st_size < 4_000_000


def test_a_live_page_follows_the_run(browser, run):
    server = PageServer(LivePage([run]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser.get(server.address)
        assert len(_points(browser, "Loss")[0]["points"]) == 60
        browser.execute_script("report.zoom([10, 20])")
        with (run / "metrics.jsonl").open("a") as more:
            more.write(json.dumps(step_record(61, 1.25)) + "\n")
        deadline = time.monotonic() + 60
        while len(points := _points(browser, "Loss")[0]["points"]) < 61 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert points[-1] == [61, 1.25]
        assert browser.execute_script("return report.state.range") == [10, 20]
        assert "step 61" in browser.find_element("css selector", "[data-live=status]").text
        assert browser.get_log("browser") == []
    finally:
        server.shutdown()
        server.server_close()
