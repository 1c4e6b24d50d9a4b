"""A run is read from its directory, whatever the state of the directory."""

import json
import math
import os

import pytest

from llmtrain.errors import RecipeError
from llmtrain.report import RunReader, read_run
from llmtrain.report.facts import facts, figures, saved_steps, time_spent
from llmtrain.report.run import MAX_LINE_BYTES
from llmtrain.run_dir.lock import RunLock


def _write(folder, name, *records):
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "mine", "train": {"max_steps": 20}}))
    _write(
        tmp_path,
        "metrics.jsonl",
        {"step": 10, "loss": 2.5, "grad_norm": 1.0, "mfu": None},
        {"step": 10, "eval_loss": 2.25, "eval_loss_by_source": {"a": 2.0, "b": 2.5}},
        {"step": 20, "loss": None, "grad_norm": 3.0, "mfu": None, "slowest_rank": 3},
    )
    return tmp_path


def test_lines_become_columns(folder):
    run = read_run(folder)
    assert run.name == "mine"
    assert (run.step, run.max_steps) == (20, 20)
    assert run.metrics["step"].tolist() == [10, 20]
    assert run.metrics["loss"][0] == 2.5
    assert math.isnan(run.metrics["loss"][1])
    assert list(run.metrics.rows()) == [
        {"step": 10, "loss": 2.5, "grad_norm": 1.0},
        {"step": 20, "grad_norm": 3.0, "slowest_rank": 3},
    ]
    assert run.evaluations["eval_loss_by_source/b"].tolist() == [2.5]
    assert run.metrics.last("loss") == 2.5


def test_lines_of_an_active_run_are_read_when_they_are_complete(folder):
    reader = RunReader(folder)
    assert len(reader.read().metrics) == 2
    for text, steps in (('{"step": 30, "lo', [10, 20]), ('ss": 1.5}\n', [10, 20, 30])):
        stamp = reader.stamp
        with (folder / "metrics.jsonl").open("a") as more:
            more.write(text)
        run = reader.read()
        assert run.metrics["step"].tolist() == steps
        assert run.problems == ()
        assert reader.stamp != stamp
    _write(folder, "metrics.jsonl", {"step": 10, "loss": 2.5})  # by a run that continues from a checkpoint
    assert reader.read().metrics["step"].tolist() == [10]


def test_a_file_is_only_read_again_if_it_has_changed(folder):
    reader = RunReader(folder)
    assert reader.read().metrics is reader.read().metrics


def test_what_was_read_is_kept_while_a_disk_fails(folder):
    reader = RunReader(folder)
    reader.read()
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    run = reader.read()
    assert len(run.metrics) == 2
    assert run.problems == (f"{folder / 'metrics.jsonl'}: cannot be read: is not a regular file",)


def test_damaged_lines_are_left_out_and_counted(folder):
    deep, long = b"[" * 100_000, b"x" * (MAX_LINE_BYTES * 3 // 2)
    content = b'{"step": 1}\n\xff\xfe\n[]\n12\n' + deep + b"\n" + long + b'\n{"step": 2}\n'
    (folder / "metrics.jsonl").write_bytes(content)
    run = read_run(folder)
    assert run.metrics["step"].tolist() == [1, 2]
    assert "6 lines are damaged" in run.problems[0]  # the long one counts as two


def test_events_and_samples_are_read(folder):
    _write(
        folder, "events.jsonl", {"event": "started", "step": 0, "text": "2 workers", "time": "2030-01-01"}, {"event": 3}
    )
    _write(folder, "samples.jsonl", {"step": 10, "prompt": "<b>", "text": "</b>"})
    run = read_run(folder)
    assert [one.event for one in run.events] == ["started"]
    assert run.samples[0].prompt == "<b>"
    assert run.problems == (f"{folder / 'events.jsonl'}: 1 lines are damaged, or too many, and left out",)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ((), "running"),
        (("started",), "running"),
        (("started", "stopped"), "stopped"),
        (("started", "died", "started", "finished"), "finished"),
    ],
)
def test_the_status_follows_from_the_events(folder, events, status):
    _write(folder, "events.jsonl", *({"event": one, "step": 1} for one in events))
    assert read_run(folder).status == status


def test_a_run_without_activity_is_interrupted(folder):
    os.utime(folder / "metrics.jsonl", (1e9, 1e9))
    assert read_run(folder).status == "interrupted"
    with RunLock.take(folder, print):
        assert read_run(folder).status == "running"
    assert read_run(folder).status == "interrupted"


def test_an_active_run_shows_when_it_ends_and_its_cost(folder):
    line = {"step": 30, "loss": 1.0, "left_s": 7200.0, "device_hours": 3.0, "cost": 6.0, "cost_at_end": 10.0}
    with (folder / "metrics.jsonl").open("a") as more:
        more.write(json.dumps(line) + "\n")
    wanted = {
        "estimated time left": "2h00m",
        "estimated cost at the end": "10",
        "device hours": "3.0000",
        "cost": "6.0000",
    }
    assert wanted.items() <= {one.label: one.text for one in figures(read_run(folder))}.items()
    _write(folder, "events.jsonl", {"event": "finished", "step": 30})
    assert "estimated time left" not in {one.label for one in figures(read_run(folder))}


@pytest.mark.parametrize("name", ["plan.json", "environment.json", "launch.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("damage", ["text", "binary", "FIFO", "folder"])
def test_a_damaged_file_is_named_and_left_out(folder, name, damage):
    file = folder / name
    file.unlink(missing_ok=True)
    if damage == "FIFO":
        os.mkfifo(file)
    elif damage == "folder":
        file.mkdir()
    else:
        file.write_bytes(b"{" if damage == "text" else b"\xff\x00" * 100)
        if name.endswith("l"):
            file.write_bytes(file.read_bytes() + b"\n")
    run = read_run(folder)
    assert run.name == "mine"
    assert any(str(file) in problem for problem in run.problems)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        if path.name == "file":
            path.write_text("")
        with pytest.raises(RecipeError, match=r"run_dir\.missing"):
            read_run(path)


def test_hostile_columns_are_bounded(folder):
    record = {"step": 1, "loss": 10**400, **{f"c{number}": number for number in range(1000)}, "x": [1], "y": "text"}
    _write(folder, "metrics.jsonl", record, {"step": -1}, {"step": "2"}, {"loss": 1.0})
    run = read_run(folder)
    assert len(run.metrics.names) <= 256
    assert len(run.metrics) == 1
    assert "3 lines are damaged" in run.problems[0]


def test_saves_of_removed_checkpoints_are_listed(folder):
    (folder / "recipe.json").write_text(json.dumps({"checkpoint": {"every_steps": 50}}))
    saved = {60: 0.1, 100: 0.0, 110: 0.2, 200: 0.0, 210: 0.3}
    lines = [{"step": step, "loss": 1.0, "save_blocked_s": saved.get(step, 0.0)} for step in range(10, 260, 10)]
    _write(folder, "metrics.jsonl", *lines)
    assert saved_steps(read_run(folder)) == [50, 100, 200]


def test_time_outside_of_steps_counts_while_the_run_is_active(folder):
    def at(minute: int) -> str:
        return f"2030-01-01T00:{minute:02}:00+00:00"

    starts = [{"event": "started", "step": step, "time": at(minute)} for step, minute in ((0, 0), (10, 40))]
    _write(
        folder, "events.jsonl", *starts, {"event": "finished", "step": 20, "time": at(50)}, {"event": "x", "time": 1}
    )
    began = 1893456000  # 2030-01-01
    lines = [{"step": step, "step_time_s": 6.0, "time": began + 60 * minute} for step, minute in ((10, 5), (20, 48))]
    _write(folder, "metrics.jsonl", *({**line, "data_wait_s": 1.0, "save_blocked_s": 2.0} for line in lines))
    spent = {one.label: one.value for one in time_spent(read_run(folder))}
    # five minutes until the last line of the first start, ten minutes from the second one to the end
    assert spent == {"steps": 100, "waiting for data": 20, "blocked by saves": 4, "outside the steps": 900 - 124}


def test_the_command_of_a_run_can_be_repeated(folder):
    argv = ["__main__.py", "train", "mine.py", "--set", 'samples.prompts=["a b"]']
    (folder / "environment.json").write_text(json.dumps({"argv": argv}))
    assert dict(facts(read_run(folder)))["command"] == """llmtrain train mine.py --set 'samples.prompts=["a b"]'"""
