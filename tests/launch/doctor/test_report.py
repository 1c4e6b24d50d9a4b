"""The output for people, on terminals of several widths and in pipes, and for programs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from llmtrain.launch.doctor.finding import fault, ok, warning
from llmtrain.launch.doctor.report import DoctorReport, HostReport, show

LONG = "a text that is longer than a line of a terminal of eighty characters and is so broken there, at a space"
SAME = ok("versions.python", "Python 3.11")
FACTS = {"host": "x"}


def _shown(report):
    file = io.StringIO()
    show(report, Console(file=file))
    return file.getvalue()


@pytest.fixture
def report():
    one = HostReport("h1", [SAME, ok("storage.shm", "8 GiB"), warning("limits.open_files", "few", "ulimit")], FACTS)
    two = HostReport("h2", [SAME, ok("storage.shm", LONG), warning("limits.open_files", "few", "ulimit")], FACTS)
    lost = HostReport("h3", [fault("ssh.connection", "h3: no route leads there", "is it on?")])
    return DoctorReport([one, two, lost], [ok("all_reduce", "correct")])


def test_common_findings_are_printed_once_and_faults_come_last(report):
    lines = _shown(report).splitlines()
    assert lines[0] == "2 hosts: h1, h2"
    assert [line for line in lines if "Python 3.11" in line] == ["  versions      Python 3.11"]
    assert "  storage       h1: 8 GiB" in lines
    assert f"                h2: {LONG}" in lines  # a pipe gets whole lines
    assert "warning: few [limits.open_files]" in lines
    assert lines[-5:] == [
        "",
        "fault: h3: no route leads there [ssh.connection]",
        "    is it on?",
        "",
        "faults: 1, warnings: 1",
    ]


def test_a_healthy_machine_is_reported_without_names():
    assert _shown(DoctorReport([HostReport("this machine", [SAME], FACTS)])).splitlines() == [
        "this machine",
        "  versions      Python 3.11",
        "",
        "faults: 0, warnings: 0",
    ]


def test_brackets_in_findings_are_not_markup():
    assert "[/not] [red]" in _shown(DoctorReport([HostReport("h", [ok("a.b", "[/not] [red]")], FACTS)]))


def test_the_document_has_every_host(report):
    document = report.document()
    assert (document["faults"], document["warnings"]) == (1, 2)
    assert [(host["host"], host["reached"]) for host in document["hosts"]] == [
        ("h1", True),
        ("h2", True),
        ("h3", False),
    ]
    assert document["hosts"][2]["findings"][0]["fix"] == "is it on?"
    assert document["all_reduce"] is None
