"""The reports about ranks that fail, hang or add incorrectly, and the formula of the bus bandwidth."""

from __future__ import annotations

from queue import Empty

import pytest

from llmtrain.launch.doctor import all_reduce
from llmtrain.launch.doctor.all_reduce import HostRanks, bus_bandwidth, run_all_reduce
from llmtrain.launch.doctor.channel import open_locally

CONNECTED = {"state": "connected", "port": 1234, "interfaces": ["gloo: eth0"]}
DONE = {"state": "done", "backend": "gloo", "wrong": 0, "bytes": 16 * 2**20, "seconds": 0.01, "latency_s": 1e-4}
WHOLE = ({"state": "started"}, CONNECTED, {"state": "joined"}, DONE)


class Scripted:
    """A channel whose ranks send given messages once they are started."""

    def __init__(self, name, says):
        self.name = name
        self.says = says
        self.pending = []
        self.jobs = []

    def send(self, do, ranks):
        assert do == "ranks"
        self.jobs += ranks
        for job in ranks:
            self.pending += [None if one is None else {"rank": job["rank"], **one} for one in self.says[job["rank"]]]

    def next(self, seconds):
        if not self.pending:
            raise Empty
        return self.pending.pop(0)


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch):
    monkeypatch.setattr(all_reduce, "GRACE_S", 0.2)


def _reduce(says, seconds=0.3):
    """Two hosts with two ranks each."""
    hosts = [Scripted("h1", says), Scripted("h2", says)]
    ranks = [HostRanks(hosts[0], range(2)), HostRanks(hosts[1], range(2, 4))]
    return run_all_reduce(ranks, "10.0.0.1", True, seconds), hosts


def test_bus_bandwidth_follows_the_formula():
    assert bus_bandwidth(2, 1000, 1.0) == 1000
    assert bus_bandwidth(4, 1000, 0.5) == 3000
    assert bus_bandwidth(1, 1000, 1.0) == 0


def test_the_slowest_rank_counts():
    slow = {**DONE, "seconds": 0.02, "latency_s": 3e-3}
    (finding, measured), hosts = _reduce({0: WHOLE, 1: WHOLE, 2: WHOLE, 3: (CONNECTED, slow)})
    assert finding.level == "ok"
    assert "4 ranks, gloo: correct; 16 MiB in 20 ms" in finding.text
    assert "latency 3 ms" in finding.text
    assert measured["bus_bytes_per_second"] == pytest.approx(1.5 * 16 * 2**20 / 0.02)
    assert [job["rank"] for job in hosts[0].jobs] == [0, 1]
    assert [(job["local_rank"], job["port"]) for job in hosts[1].jobs] == [(0, 1234), (1, 1234)]


def test_a_hang_is_bounded_and_names_the_missing_rank_and_its_host():
    (finding, measured), _ = _reduce({0: WHOLE[:2], 1: WHOLE[:2], 2: ({"state": "started"},), 3: ()})
    assert (finding.level, measured) == ("fault", {})
    assert "ranks 0 (h1) and 1 (h1): reached rank 0, but not all others" in finding.text
    assert "ranks 2 (h2): started, but did not reach rank 0" in finding.text
    assert "ranks 3 (h2): did not start" in finding.text
    assert "gloo: eth0" in finding.text


def test_a_failed_rank_is_reported_and_not_waited_for():
    says = {
        0: WHOLE[:2],
        1: WHOLE[:2],
        2: ({"state": "failed", "error": "OSError: no"},),
        3: ({"state": "ended", "code": -9},),
    }
    (finding, _), _ = _reduce(says, seconds=30)
    assert "rank 2 (h2): OSError: no; rank 3 (h2): was killed by signal 9" in finding.text


def test_a_lost_host_is_reported():
    (finding, _), _ = _reduce({0: WHOLE[:2], 1: WHOLE[:2], 2: (None,), 3: ()}, seconds=30)
    assert "rank 2 (h2): the connection to its host was lost" in finding.text


def test_a_wrong_sum_is_a_fault():
    (finding, _), _ = _reduce({0: WHOLE, 1: WHOLE, 2: WHOLE, 3: (CONNECTED, {**DONE, "wrong": 7})})
    assert (finding.level, finding.text) == ("fault", "wrong sums on ranks 3 (h2)")


def test_an_all_reduce_of_real_ranks_is_correct():
    channel = open_locally()
    try:
        finding, measured = run_all_reduce([HostRanks(channel, range(3))], "127.0.0.1", True, 120)
    finally:
        channel.close()
    assert finding.level == "ok", finding
    assert (measured["ranks"], measured["backend"], measured["correct"]) == (3, "gloo", True)
    assert measured["bus_bytes_per_second"] > 0
