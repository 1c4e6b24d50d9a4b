"""A growing file of JSON objects is read once, whatever happens to it."""

import json
import os

import pytest

from llmtrain.report.lines import MOST_LINE_BYTES, GrowingLines
from llmtrain.system.durable import write_atomically


def _line(step):
    return json.dumps({"step": step}) + "\n"


def _steps(lines):
    return [one["step"] for one in lines.new()]


def test_only_added_lines_are_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = GrowingLines(file)
    assert _steps(lines) == []
    file.write_text("".join(map(_line, range(1000))))
    assert _steps(lines) == list(range(1000))
    before = lines.bytes_read
    with file.open("a") as more:
        more.write(_line(1000))
    assert not lines.is_replaced()
    assert _steps(lines) == [1000]
    assert lines.bytes_read - before == len(_line(1000))


def test_an_incomplete_line_is_read_when_it_is_complete(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(_line(1) + '{"st')
    lines = GrowingLines(file)
    assert _steps(lines) == [1]
    with file.open("a") as more:
        more.write('ep": 2}\n')
    assert _steps(lines) == [2]
    assert lines.damaged == 0


def test_a_file_written_anew_is_read_from_its_start(tmp_path):
    """A run that continues removes the lines after its checkpoint."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(_line(1) + _line(2))
    lines = GrowingLines(file)
    assert _steps(lines) == [1, 2]
    write_atomically(file, _line(1) + _line(3) + _line(4))
    assert lines.is_replaced()
    assert _steps(lines) == [1, 3, 4]


@pytest.mark.parametrize("content", [_line(7), _line(7) + _line(8) + _line(9)], ids=["shorter", "longer"])
def test_a_file_overwritten_in_place_is_read_from_its_start(tmp_path, content):
    file = tmp_path / "metrics.jsonl"
    file.write_text(_line(1) + _line(2))
    lines = GrowingLines(file)
    assert _steps(lines) == [1, 2]
    file.write_text(content)
    assert lines.is_replaced()
    assert _steps(lines) == [json.loads(line)["step"] for line in content.splitlines()]


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    file = tmp_path / "metrics.jsonl"
    deep = b"[" * 100_000
    file.write_bytes(
        b'{"step": 1}\n\xff\xfe\n[]\n12\n' + deep + b"\n" + b"x" * (MOST_LINE_BYTES * 6) + b'\n{"step": 2}\n'
    )
    lines = GrowingLines(file)
    assert _steps(lines) == [1, 2]
    assert lines.damaged == 5


def test_a_path_that_is_not_a_regular_file_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="FIFO"):
        list(GrowingLines(tmp_path / "metrics.jsonl").new())
