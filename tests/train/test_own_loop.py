"""Training loops of users' own: the scripts of the guide, and how such a run continues."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmtrain.errors import Exit
from llmtrain.launch.rendezvous import reserved_port
from tests.helpers.commands import events, metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/own_loop.md").read_text(encoding="utf-8")
STEPS = 6
LAUNCHERS = {
    "python": [sys.executable],
    "llmtrain": [sys.executable, "-m", "llmtrain", "train"],
    "torchrun": ["torchrun", "--nproc-per-node", "2"],
    "deepspeed": ["deepspeed", "--num_accelerators", "2"],
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with a corpus, where all scripts run, so that the data and the facts of the model are found once."""
    folder = tmp_path_factory.mktemp("own_loop")
    words, draw = PAGE.split(), random.Random(0)
    lines = (" ".join(draw.choices(words, k=80)) for _ in range(300))
    (folder / "corpus.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def folder(shared) -> Path:
    """The folder with the scripts of the page, without a run."""
    shutil.rmtree(shared / "runs", ignore_errors=True)
    _write_scripts(shared)
    return shared


def _write_scripts(folder: Path) -> None:
    for name, code in re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(code)


def _start(folder: Path, launcher: str, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of a folder, which no launcher's variables describe."""
    environment = {**os.environ, **env, "OMP_NUM_THREADS": "1", "LLMTRAIN_CACHE": str(folder / "cache")}
    environment |= {"DS_ACCELERATOR": "cpu", "HF_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    program, *options = LAUNCHERS[launcher]
    command = [str(Path(sys.executable).parent / program), *options, script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^\d+ ([\d.]+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def alone(shared) -> list[float]:
    """The losses of the script of the guide, started without a launcher; its run is kept in `runs_alone`."""
    _write_scripts(shared)
    done = _start(shared, "python", "train_loop.py")
    found = _losses(done.stdout)
    assert len(found) == STEPS, done.stderr
    assert found[-1] < found[0]
    (shared / "runs").rename(shared / "runs_alone")
    return found


@pytest.mark.slow
def test_the_loop_of_the_guide_trains_and_exports_and_llmtrain_train_continues_it(folder, alone):
    found, run = alone, folder / "runs/mine"
    (folder / "runs_alone").rename(folder / "runs")
    assert metrics(run)[-1]["loss"] == pytest.approx(found[-1])
    assert (run / "export/model.safetensors").exists()
    assert [event["event"] for event in events(run)] == ["started", "finished"]
    recipe, _, _ = (folder / "train_loop.py").read_text().partition("engine, data")
    more = "LONGER = recipe.with_(**{'train.max_steps': 8})\nrecipe = lambda: LONGER\n"
    (folder / "longer.py").write_text(f"{recipe}\n{more}")
    done = _start(folder, "llmtrain", "longer.py")
    assert "continuing after step 6" in done.stdout, done.stderr
    assert done.returncode == 0


@pytest.mark.slow
def test_the_launcher_of_deepspeed_trains_the_same_run(folder, alone):
    """As on one device; only the order of sums differs."""
    done = _start(folder, "deepspeed", "train_loop.py")
    assert _losses(done.stdout) == pytest.approx(alone, rel=1e-6), done.stderr


SITE = """
from llmtrain.launch import Launcher
SITE = Launcher("site", markers=("SITE_RANK",), rank="SITE_RANK", world_size="SITE_SIZE")
"""


@pytest.mark.slow
def test_a_launcher_of_ones_own_trains_the_same_run(folder, alone):
    script = folder / "train_loop.py"
    script.write_text(SITE + script.read_text().replace("lt.prepare(recipe)", "lt.prepare(recipe, launcher=SITE)"))
    with reserved_port() as port, ThreadPoolExecutor(2) as pool:
        shared = {"SITE_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        of_ranks = [shared | {"SITE_RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        started = [pool.submit(_start, folder, "python", "train_loop.py", **env) for env in of_ranks]
        first, second = (one.result() for one in started)
    assert _losses(first.stdout) == pytest.approx(alone, rel=1e-6), first.stderr
    assert second.returncode == 0, second.stderr


FAULTS = {
    "no step": ("            engine.backward(loss)", "            break", "loop.backward"),
    "imported": ("build=build_model", 'build="train_loop:build_model"', "loop.main"),
    "module": ("lt.prepare(recipe)", "lt.prepare(recipe, model=build_model(8, 8, 1))", "loop.model"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_loop_is_reported_without_a_traceback(folder, name):
    old, new, rule = FAULTS[name]
    script = folder / "train_loop.py"
    assert old in script.read_text()
    script.write_text(script.read_text().replace(old, new))
    done = _start(folder, "python", "train_loop.py")
    assert done.returncode == Exit.USAGE, done.stderr
    assert "Traceback" not in done.stderr
    assert f"[{rule}" in done.stderr


@pytest.mark.slow
def test_a_signal_ends_the_data_and_the_run_continues(folder, alone):
    """With torchrun."""
    script = folder / "train_loop.py"
    at = "    if engine.rank == 0:"
    stop = "    if engine.step == 3 and data_is_new:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    code = (
        script.read_text().replace(at, f"{stop}{at}").replace("for batch", "data_is_new = not engine.step\nfor batch")
    )
    script.write_text(f"import os, signal\n{code}print(engine.stopped)\n")
    done = _start(folder, "torchrun", "train_loop.py")
    assert len(_losses(done.stdout)) in (3, 4), done.stderr
    assert done.stdout.count("on SIGTERM") == 2
    again = _start(folder, "python", "train_loop.py")
    assert "continuing after step" in again.stderr
    assert _losses(done.stdout) + _losses(again.stdout) == pytest.approx(alone, rel=1e-6)


@pytest.mark.breadth
def test_the_script_for_deepspeed_alone_trains(folder):
    script = folder / "train_deepspeed.py"
    # DeepSpeed would compile an operator for two minutes, with which ranks of one host communicate.
    without = 'import deepspeed\n\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False'
    script.write_text(script.read_text().replace("import deepspeed", without))
    done = _start(folder, "deepspeed", "train_deepspeed.py")
    found = _losses(done.stdout)
    assert len(found) == STEPS, done.stderr
    assert found[-1] < found[0]
