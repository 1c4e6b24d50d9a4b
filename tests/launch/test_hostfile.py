"""Hostfiles in DeepSpeed's format, and the filters of its options."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.launch.hostfile import Host, include_option, read_hosts, render_hostfile

TEXT = """# a comment
a slots=4

node-2.example  slots=2   # another
10.0.0.3 slots=1
"""


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text(TEXT)
    return path


def test_hosts_keep_their_order(hostfile):
    hosts = read_hosts(hostfile)
    assert hosts == [Host("a", (0, 1, 2, 3)), Host("node-2.example", (0, 1)), Host("10.0.0.3", (0,))]
    assert render_hostfile(hosts) == "a slots=4\nnode-2.example slots=2\n10.0.0.3 slots=1\n"


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"include": "a:0,2@10.0.0.3"}, [Host("a", (0, 2)), Host("10.0.0.3", (0,))]),
        ({"exclude": "a@node-2.example:1"}, [Host("node-2.example", (0,)), Host("10.0.0.3", (0,))]),
        ({"include": "a:1@a:3"}, [Host("a", (1, 3))]),
    ],
)
def test_filters_select_hosts_and_devices(hostfile, filters, left):
    assert read_hosts(hostfile, **filters) == left


def test_deepspeed_parses_the_filtered_hostfile(hostfile, tmp_path):
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    hosts = read_hosts(hostfile, exclude="a:1@10.0.0.3")
    written = tmp_path / "written"
    written.write_text(render_hostfile(hosts))
    active = parse_inclusion_exclusion(fetch_hostfile(str(written)), include_option(hosts), "")
    assert {name: tuple(devices) for name, devices in active.items()} == {one.name: one.devices for one in hosts}


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("", [""]),
        ("a slots=1\na slots=2\nb\nc slots=0\nd slots=x", [":2", ":3", ":4", ":5"]),
        ("a slots=1; rm -rf / slots=2", [":1"]),
        ("$(touch owned) slots=2", [":1"]),
    ],
)
def test_every_bad_line_is_named(tmp_path, text, places):
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        read_hosts(path)
    assert [problem.field for problem in error.value.problems] == [f"{path}{place}" for place in places]


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"include": "a", "exclude": "b"}, "cannot be combined with --exclude"),
        ({"include": "a:7"}, "has 4 slots, and no device 7"),
        ({"include": "other"}, "'other' is not in the hostfile"),
        ({"exclude": "a:x"}, "is not HOST or HOST:0,2"),
        ({"exclude": "a@node-2.example@10.0.0.3"}, "leaves no device"),
    ],
)
def test_impossible_filters_are_refused(hostfile, filters, said):
    with pytest.raises(RecipeError, match=said):
        read_hosts(hostfile, **filters)


def test_a_missing_hostfile_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="cannot read"):
        read_hosts(tmp_path / "none")
