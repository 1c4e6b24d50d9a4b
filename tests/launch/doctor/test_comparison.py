"""Comparison of hosts."""

from __future__ import annotations

import pytest

from llmtrain.launch.doctor.comparison import Skew, clock_skew, compare_clocks, compare_devices, compare_versions


def _facts(**changes):
    return {"versions": {"python": "3.11.7", "torch": "2.13.0", **changes}, "devices": ["NVIDIA L4"]}


def test_different_versions_are_reported_in_one_line():
    facts = {"h1": _facts(), "h2": _facts(torch="2.12.0"), "h3": _facts(), "h4": _facts(apex="1")}
    [finding] = compare_versions(facts)
    assert finding.level == "fault"
    assert finding.text == (
        "versions differ: apex missing on h1, h2 and h3, 1 on h4; torch 2.13.0 on h1, h3 and h4, 2.12.0 on h2"
    )


def test_equal_hosts_have_no_findings():
    facts = {"h1": _facts(), "h2": _facts()}
    assert [one.level for one in compare_versions(facts)] == ["ok"]
    assert not list(compare_devices(facts))
    assert not list(compare_versions({"h1": _facts()}))


def test_different_devices_are_reported():
    [finding] = compare_devices({"h1": _facts(), "h2": {**_facts(), "devices": []}})
    assert (finding.level, finding.text) == ("warning", "devices differ: NVIDIA L4 on h1; no GPU on h2")


@pytest.mark.parametrize(
    ("ahead", "doubt", "level"), [(0.3, 0.1, "ok"), (3.0, 0.1, "warning"), (3.0, 2.5, "ok"), (-3.0, 0.1, "warning")]
)
def test_clock_differences_beyond_the_uncertainty_are_reported(ahead, doubt, level):
    [finding] = compare_clocks({"h1": Skew(0.0, 0.0), "h2": Skew(ahead, doubt)})
    assert finding.level == level
    if level == "warning":
        assert "3 s apart" in finding.text
        assert ("h2 ahead of h1" in finding.text) == (ahead > 0)


def test_clock_skew_is_taken_from_the_fastest_round_trip(monkeypatch):
    """A host 5 s ahead, whose answers take 0.2 s there and 0.2 s back, and once 2 s."""
    now = [1000.0]
    monkeypatch.setattr("llmtrain.launch.doctor.comparison.time.time", lambda: now[0])
    monkeypatch.setattr("llmtrain.launch.doctor.comparison.time.monotonic", lambda: now[0])
    trips = iter([0.2, 2.0, 0.2, 0.2, 0.2, 0.2, 0.2])

    class Host:
        def request(self, do, seconds):
            way = next(trips)
            now[0] += way
            theirs = now[0] + 5
            now[0] += 0.2
            return {"time": theirs}

    skew = clock_skew(Host())
    assert skew.ahead_s == pytest.approx(5)
    assert skew.uncertainty_s == pytest.approx(0.2)
