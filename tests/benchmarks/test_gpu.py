"""`python -m benchmarks gpu` as far as it runs without a GPU: its cases, its processes, and what pages say."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.gpu import page, run
from benchmarks.gpu.cases import CASES, PLANS, TOGETHER
from benchmarks.gpu.steps import PRETRAINED, RANDOM, predicted_bytes
from llmtrain.plan.predict import memory_of
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers import gpu_cases

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made_up_cases(monkeypatch, tmp_path):
    """Replaces the cases by those of `tests.helpers.gpu_cases`; returns the folder of the results."""
    monkeypatch.setattr(run, "CASES", gpu_cases.CASES)
    monkeypatch.setattr(run, "PROCESS", "tests.helpers.gpu_cases")
    monkeypatch.setattr(run, "IMPORTS_S", 1.0)
    monkeypatch.setattr(run, "SMALL_S", 1)
    monkeypatch.setattr(run, "SMALL_LIMIT_S", 3.0)
    monkeypatch.setattr(run, "_fast_folder", lambda: str(tmp_path))
    return tmp_path / "out"


def measure(out: Path, only: str, *options: str) -> tuple[int, dict[str, dict]]:
    """Exit code, and the rows by case."""
    with pytest.raises(SystemExit) as ended:
        command.main(["gpu", "--small", "--out", str(out), "--only", only, *options])
    document = json.loads((out / "gpu.json").read_text())
    return ended.value.code, {row["case"]: row for row in document["rows"]}


def test_each_outcome_is_kept_with_its_reason(made_up_cases):
    code, rows = measure(made_up_cases, "fine,raises,faulty,refused,not here,dies,later")
    assert code == 1
    assert [row["status"] for row in rows.values()] == [
        "done",
        "failed",
        "failed",
        "refused",
        "skipped",
        "failed",
        "done",
    ]
    assert rows["fine"]["found"]["number"] == 1.5
    assert rows["raises"]["reason"] == "ValueError: no such kernel"
    assert any("gpu_cases.py" in line for line in rows["raises"]["log"])
    assert rows["faulty"]["found"] == {"certified": 1}
    assert rows["refused"]["reason"] == "kernels.fp8: needs a newer GPU"
    assert rows["dies"]["reason"] == "its process ended with code 11"
    assert rows["dies"]["log"] == ["Segmentation fault"]
    shown = (made_up_cases / "table.md").read_text()
    assert "| dies | failed | its process ended with code 11 |" in shown
    logs = (made_up_cases / "logs.txt").read_text()
    assert "===== fine" in logs
    assert "a library's output" in logs
    assert "no_such_module" in logs


def test_a_case_that_hangs_is_killed_with_its_children(made_up_cases, tmp_path):
    code, rows = measure(made_up_cases, "hangs,later")
    assert code == 1
    assert rows["hangs"]["reason"].startswith("killed after")
    assert rows["later"]["status"] == "done"
    assert all(gone(int(pid)) for pid in (tmp_path / "hanging").read_text().split())


def gone(pid: int) -> bool:
    """Whether a process has ended, or does within five seconds."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_no_case_is_begun_without_time_for_it(made_up_cases, monkeypatch):
    monkeypatch.setattr(run, "SMALL_S", 3600)
    code, rows = measure(made_up_cases, "fine", "--minutes", "0.2")
    assert code == 0
    assert rows["fine"]["status"] == "skipped"
    assert "it takes about 3600" in rows["fine"]["reason"]


def test_a_case_ends_when_the_minutes_are_over(made_up_cases, monkeypatch):
    monkeypatch.setattr(run, "IMPORTS_S", 600.0)
    monkeypatch.setattr(run, "RESERVE_S", 0.0)
    started = time.monotonic()
    code, rows = measure(made_up_cases, "hangs", "--minutes", "0.05")
    assert time.monotonic() - started < 30
    assert code == 1
    assert rows["hangs"]["reason"] == "killed after 3 s"


def test_rates_of_the_self_test_reach_later_cases_and_later_calls(made_up_cases, tmp_path):
    _, rows = measure(made_up_cases, "self-test,fine")
    assert json.loads(rows["fine"]["found"]["rates"]) == {"device": "h100"}
    again = tmp_path / "again"
    _, rows = measure(again, "self-test,later", "--done", str(made_up_cases / "gpu.json"))
    assert list(rows) == ["self-test", "fine", "later"]
    assert json.loads(rows["later"]["found"]["rates"]) == {"device": "h100"}
    assert len(json.loads((again / "gpu.json").read_text())["earlier"]) == 1


def test_a_failure_stays_until_its_case_has_been_repeated(made_up_cases, tmp_path):
    _, first = measure(made_up_cases, "raises,refused,fine")
    _, second = measure(tmp_path / "second", "later,refused", "--done", str(made_up_cases / "gpu.json"))
    assert list(second) == ["fine", "raises", "refused", "later"]
    assert second["raises"] == first["raises"]


def command_of(folder: Path) -> list[str]:
    """The command with made-up cases, up to their names."""
    code = (
        "import sys; from benchmarks.gpu import run; from tests.helpers import gpu_cases\n"
        "run.CASES, run.PROCESS, run.SMALL_S = gpu_cases.CASES, 'tests.helpers.gpu_cases', 1\n"
        f"run._fast_folder = lambda: {str(folder)!r}\n"
        "run.main(sys.argv[1:])\n"
    )
    return [sys.executable, "-c", code, "--small", "--out", str(folder / "out"), "--only"]


def hanging(folder: Path) -> int:
    """The process of the case that hangs, once it does."""
    until = time.monotonic() + 60
    while not (folder / "hanging").exists() or not (folder / "hanging").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    return int((folder / "hanging").read_text().split()[0])


def test_what_was_found_survives_a_kill_and_is_not_repeated(tmp_path):
    """The command is killed while a case hangs; the processes of the case end with it."""
    words, out = command_of(tmp_path), tmp_path / "out"
    killed = subprocess.Popen([*words, "fine,hangs,later"], cwd=ROOT)
    case_process = hanging(tmp_path)
    killed.kill()
    killed.wait()
    assert gone(case_process)
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["fine"]

    second = [*words, "fine,later", "--done", str(out / "gpu.json")]
    again = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "fine " not in again.stdout
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    assert [(row["case"], row["status"]) for row in rows] == [("fine", "done"), ("later", "done")]


def test_an_interrupt_ends_at_once_and_keeps_what_was_found(tmp_path):
    interrupted = subprocess.Popen([*command_of(tmp_path), "fine,hangs,later"], cwd=ROOT)
    case_process = hanging(tmp_path)
    interrupted.send_signal(signal.SIGTERM)
    assert interrupted.wait(timeout=10) == 130
    assert gone(case_process)
    rows = json.loads((tmp_path / "out" / "gpu.json").read_text())["rows"]
    assert (rows[0]["case"], rows[0]["status"]) == ("fine", "done")
    assert "later" not in [row["case"] for row in rows]


def test_faults_of_the_command_line_are_named(made_up_cases, capsys, tmp_path):
    of_full_size = tmp_path / "full.json"
    of_full_size.write_text(json.dumps({"benchmark": "gpu", "small": False, "rows": []}))
    for options, told in (
        (["--small", "--only", "fin"], "there is no case 'fin'; did you mean 'fine'?"),
        (["--only", "fine"], "this machine shows no GPU"),
        (["--small", "--done", str(tmp_path / "no.json")], "no.json"),
        (["--small", "--done", str(of_full_size)], "is no result of this command with --small"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(["gpu", "--out", str(made_up_cases), *options])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    assert not made_up_cases.exists()


def on_a_device(name: str, device: str):
    """The plan of a case; 4 bits need weights in a folder, and are left out."""
    timed = PLANS[name][2]
    if timed.source == PRETRAINED:
        timed = replace(timed, source=RANDOM, fields={key: timed.fields[key] for key in ["model.adapter"]})
    return resolve(timed.recipe(small=device == "cpu"), Cluster(device=device))


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_is_legal_and_fits_an_h100(name):
    plan = on_a_device(name, "h100")
    memory = memory_of(plan)
    assert memory.fits
    assert memory.allocated < 0.95 * memory.capacity


def test_plans_differ_and_are_many():
    assert len({on_a_device(name, "h100").recipe.model_dump_json() for name in PLANS} | {"8b qlora"}) == len(PLANS)
    assert len(PLANS) >= 15
    assert {name for group in TOGETHER for name in group} < set(CASES)
    for case in CASES.values():
        assert all(importlib.util.find_spec(module) or module.startswith("trl.") for module in case.imports)


PEAK = predicted_bytes(PLANS["1b compiled"][2])
FOUND = {
    "self-test": {"plans": 8, "certified": 8},
    "verify bf16": {"plans": 5, "certified": 5},
    "resume": {"steps": 300, "same_bits": 300},
    "tests": {"passed": 20, "skipped": []},
    "1b compiled": {"mfu": 0.52, "step_ms": 900.0, "measured_bytes": PEAK, "predicted_bytes": PEAK},
    "beside Trainer 1": {"step_ms": 1.0, "tokens_per_second": 140.0},
    "Trainer 1": {"step_ms": 1.0, "tokens_per_second": 100.0},
    "beside TRL 1": {"step_ms": 1.0, "trained_per_second": 160.0},
    "TRL 1": {"step_ms": 1.0, "trained_per_second": 100.0},
    "wrapper": {"more_ms": 0.3, "error_ms": 0.1, "peer_ms": 100.0},
}


def made_up(**changes) -> dict:
    """A result that meets all aims but for the changed cases; None: the case was killed."""
    found = FOUND | {name.replace("_", " "): numbers for name, numbers in changes.items()}
    rows = [
        {"case": name, "status": "failed", "reason": "killed after 100 s"}
        if numbers is None
        else {"case": name, "status": "done", "found": numbers}
        for name, numbers in found.items()
    ]
    versions = {"python": "3.12.3", "torch": "2.11.0", "deepspeed": "0.19.8", "transformers": "5.22.2"}
    hardware = {"gpus": ["NVIDIA H100"], "cpu": "x", "cores": 16, "memory_gib": 128.0}
    facts = {
        "versions": versions,
        "hardware": hardware,
        "commit": "0123456789abcdef",
        "command": "python -m benchmarks",
    }
    return {"benchmark": "gpu", "small": False, "earlier": [], **facts, "rows": rows}


def test_aims_are_met_or_missed():
    assert all(verdict.met for verdict in page.verdicts(made_up()))
    for case, numbers, told in (
        ("1b_compiled", {"mfu": 0.49, "step_ms": 1.0}, "49.0%"),
        ("1b_compiled", None, "failed: killed after 100 s"),
        ("1b_compiled", {"mfu": 0.52, "step_ms": 1.0, "measured_bytes": 2 * PEAK}, "0 of 1 plans; errors from -50.0%"),
        ("Trainer_1", {"step_ms": 1.0, "tokens_per_second": 120.0}, "1.17× (1.17)"),
        ("TRL_1", None, "failed: killed after 100 s"),
        ("wrapper", {"more_ms": 0.3, "error_ms": 0.3, "peer_ms": 100.0}, "+0.30% ± 0.30%"),
        ("self-test", {"plans": 8, "certified": 7}, "7 of 8 plans"),
        ("tests", None, "failed: killed after 100 s"),
    ):
        missed = [verdict for verdict in page.verdicts(made_up(**{case: numbers})) if not verdict.met]
        assert told in missed[0].found, (case, missed)


def test_a_result_replaces_what_pages_say(monkeypatch):
    result = made_up()
    shown = page.render(result, [])
    assert "Measured on NVIDIA H100, Python 3.12.3, torch 2.11.0" in shown
    peak = f"{PEAK / 2**30:.2f}"
    assert f"| 1b compiled | 900.0 | 52.0% |  | {peak} | {peak} | +0.0% | {peak} | +0.0% |" in shown
    assert "Not measured" not in shown
    monkeypatch.setattr(page, "stored", lambda: (result, []))
    files = page.files()
    assert "Nothing here has been run on a GPU" not in files[page.README]
    assert "aims met](docs/reference/gpu.md)" in files[page.README]
    assert json.loads(files[page.IN_PACKAGE]) == {"device": "NVIDIA H100", "plans": 1, "close": 1, "within": 0.03}
    rehearsal = result | {"small": True}
    assert "10 of 10 cases ran on an emulated GPU (NVIDIA H100" in page.render(None, [rehearsal])
