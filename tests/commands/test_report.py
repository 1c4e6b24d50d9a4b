"""`llmtrain report`, `inspect` and `compare` on the command line."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from llmtrain.cli import main
from tests.helpers.nasty import WORDS
from tests.helpers.recorded_runs import long_run, short_run, write_lines


@pytest.fixture
def run(tmp_path):
    return short_run(tmp_path / "run")


def _printed(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(one) for one in arguments])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def _refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(one) for one in arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_the_page_of_a_run_is_written_to_its_directory(run, capsys):
    assert f"wrote {run / 'report.html'}" in _printed(capsys, "report", run)
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_the_page_of_several_runs_is_written_to_the_given_file(tmp_path, monkeypatch, capsys):
    runs = [long_run(tmp_path / f"{seed}", 5, seed) for seed in range(2)]
    monkeypatch.chdir(tmp_path)
    _printed(capsys, "report", *runs)
    _printed(capsys, "report", *runs, "--out", tmp_path / "mine.html")
    assert (tmp_path / "report.html").read_text() == (tmp_path / "mine.html").read_text()


def test_wrong_command_lines_are_refused(run, tmp_path, capsys):
    assert "run_dir.missing" in _refused(capsys, "report", tmp_path / "missing")
    assert "report.twice" in _refused(capsys, "report", run, run / ".." / run.name)
    assert "report.write" in _refused(capsys, "report", run, "--out", tmp_path / "missing/report.html")
    (tmp_path / "link.html").symlink_to(tmp_path / "elsewhere.html")
    assert "is not a regular file" in _refused(capsys, "report", run, "--out", tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert "report.out" in _refused(capsys, "report", run, "--serve", "--out", "x.html")
    assert "report.port" in _refused(capsys, "report", run, "--port", "8000")
    assert "run_dir.missing" in _refused(capsys, "inspect", tmp_path)
    assert "run_dir.missing" in _refused(capsys, "compare", run, tmp_path)


def test_a_live_page_is_served_until_an_interrupt(run):
    command = [sys.executable, "-m", "llmtrain", "report", str(run), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = process.stdout.readline().split()[1]
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert b"short" in answer.read()
    process.send_signal(signal.SIGINT)
    assert (process.wait(60), process.stderr.read()) == (0, "")


def test_inspect_shows_a_run_at_a_glance(run, capsys):
    text = _printed(capsys, "inspect", run)
    for said in (
        "short",
        "finished at step 60",
        "gradient norm",
        "▇",
        "skipped",
        "loss 9 above 4",
        "upon a time",
        "0.6250",
    ):
        assert said in text
    assert "\x1b" not in text


def test_inspect_prints_one_json_document(run, capsys):
    document = json.loads(_printed(capsys, "inspect", run, "--json"))
    assert document["status"] == "finished"
    assert document["figures"]["step"] == 60
    assert document["figures"]["restarts"] == 1
    assert document["time_s"] == {"steps": pytest.approx(29.4), "waiting for data": pytest.approx(0.6)}
    assert document["scores"] == [{"step": 60, "scores": {"mine acc": 0.625}}]


def test_inspect_follows_an_active_run(tmp_path, capsys):
    folder = long_run(tmp_path / "run", 20)
    assert "running at step 20" in _printed(capsys, "inspect", folder)
    with (folder / "metrics.jsonl").open("a") as more:
        more.write('{"step": 21, "loss": 1.0}\n{"step": 22, "lo')
    assert "running at step 21" in _printed(capsys, "inspect", folder)


def test_texts_of_a_run_cannot_drive_the_terminal(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    for word in ("\x1b]0;title\x07", "[bold]x[/bold]", "[/]", "".join(WORDS)):
        (folder / "recipe.json").write_text(json.dumps({"name": word, "data": {"sources": [{"name": word}]}}))
        write_lines(folder / "metrics.jsonl", [{"step": 1, "loss": 1.0, word: 2.0}])
        write_lines(folder / "events.jsonl", [{"step": 1, "event": word, "text": word, "time": word}])
        write_lines(folder / "samples.jsonl", [{"step": 1, "prompt": word, "text": word}])
        text = _printed(capsys, "inspect", folder) + _printed(capsys, "compare", folder, folder)
        assert not {"\x1b", "\x07", "\r", "\x7f", "\x85"} & set(text)


def test_a_terminal_without_blocks_gets_letters(run, capsys, monkeypatch):
    monkeypatch.setattr("rich.console.Console.encoding", "ascii")
    assert _printed(capsys, "inspect", run).isascii()


def test_compare_shows_the_differences(tmp_path, capsys):
    runs = [long_run(tmp_path / f"{seed}", 20, seed) for seed in range(2)]
    for number, folder in enumerate(runs):
        (folder / "environment.json").write_text(json.dumps({"packages": {"torch": f"2.1{number}"}, "python": "3.12"}))
        recipe = {"optim": {"lr": 0.1}, "data": {"sequence_length": 128 * (number + 1)}}
        (folder / "recipe.json").write_text(json.dumps(recipe | {"name": f"run_{number}"}))
    document = json.loads(_printed(capsys, "compare", *runs, "--json"))
    assert document["differences"] == {
        "recipe": {},
        "data": {"data.sequence_length": [128, 256]},
        "plan": {},
        "environment": {"packages.torch": ["2.10", "2.11"]},
    }
    assert document["metrics"]["evaluation loss"] == [3.0, 4.0]
    assert [label for label in document["metrics"] if "last common" in label] == ["loss at the last common step, 20"]
    text = _printed(capsys, "compare", *runs)
    assert "data.sequence_length" in text
    assert "recipe: the same" in text


def test_inspect_writes_nothing(run, capsys):
    before = {file: file.stat().st_mtime_ns for file in [run, *run.rglob("*")]}
    _printed(capsys, "inspect", run)
    assert {file: file.stat().st_mtime_ns for file in [run, *run.rglob("*")]} == before


NUMBERS = ("1e308", "-1e308", "1e-320", "1e400", "1" + "0" * 400, "-1", "NaN")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:10])
def test_numbers_that_nothing_measures_are_unknown(number, run, capsys):
    """A line of them once stopped every page of the run."""
    names = ("step_time_s", "save_blocked_s", "data_wait_s", "mfu", "tokens_per_second", "slowest_rank", "loss", "lr")
    line = json.dumps({"step": 10**6, "slowest_ratio": 2.0, **dict.fromkeys(names, "@")})
    with (run / "metrics.jsonl").open("a") as more:
        more.write(2 * (line.replace('"@"', number) + "\n"))
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval/step_00000001.json").write_text(f'{{"results": {{"task": {{"acc,none": {number}}}}}}}')
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["checkpoint"] = {"every_steps": "@"}
    (run / "recipe.json").write_text(json.dumps(recipe).replace('"@"', number))
    document = _printed(capsys, "inspect", run, "--json")
    json.loads(document, parse_constant=pytest.fail)
    _printed(capsys, "inspect", run)
    _printed(capsys, "report", run)
    _printed(capsys, "compare", run, run)
