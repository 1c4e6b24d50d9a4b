"""A run that gets a stopping signal saves at a step that all ranks agree on, and continues as if never stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.manifest import read_manifests
from llmtrain.errors import Exit
from tests.helpers.commands import events, llmtrain, losses, metrics, workers
from tests.helpers.harness import run_ranks
from tests.helpers.small_runs import RUN, STEPS, start


@pytest.fixture(scope="module")
def uninterrupted(small_recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *RUN)
    assert result.returncode == 0, result.stderr
    return run_dir


def stopped_at(process: subprocess.Popen, run_dir: Path) -> int:
    """The step that a run was saved at before it left as it should."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == Exit.RESUME, output + errors
    checkpoint = newest(run_dir / "checkpoints")
    verify_checkpoint(checkpoint)
    step = read_manifests(checkpoint)[0].step
    assert 0 < step < STEPS
    assert f"after step {step}" in output
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, step + 1))
    return step


def to_one_worker(process):
    os.kill(workers(process.pid)[1], signal.SIGUSR2)


def storm(process):
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
    for number in [signal.SIGUSR1, *random.Random(1).choices(numbers, k=30)]:
        for pid in random.Random(2).sample([process.pid, *workers(process.pid)], k=2):
            os.kill(pid, number)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(to_one_worker, marks=pytest.mark.breadth),
        pytest.param(lambda process: process.send_signal(signal.SIGUSR1), marks=pytest.mark.slow),
        pytest.param(storm, marks=pytest.mark.breadth),
    ],
    ids=["one worker", "the launcher", "a storm"],
)
def test_a_run_stopped_by_a_signal_and_continued_equals_the_uninterrupted_one(
    small_recipe, uninterrupted, tmp_path, told
):
    run_dir = tmp_path / "run"
    process = start(small_recipe, run_dir)
    told(process)
    step = stopped_at(process, run_dir)
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *RUN)
    assert result.returncode == 0, result.stderr
    assert f"continuing after step {step}" in result.stdout
    assert [one["event"] for one in events(run_dir)] == ["started", "stopped", "started", "finished"]
    assert losses(run_dir) == losses(uninterrupted)


@pytest.mark.breadth
def test_a_signal_during_a_save_keeps_it(small_recipe, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    always = ("--set", "checkpoint.every_steps=1")
    process = start(small_recipe, run_dir, *always)
    deadline = time.monotonic() + 60
    while not any(path.is_dir() and path.name.startswith(".") for path in (run_dir / "checkpoints").iterdir()):
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGUSR1)
    stopped_at(process, run_dir)
    assert llmtrain("train", small_recipe, "--run-dir", run_dir, *RUN).returncode == 0
    assert losses(run_dir) == losses(uninterrupted)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGINT, marks=pytest.mark.breadth)],
)
def test_a_single_rank_saves_too(small_recipe, tmp_path, number):
    process = start(small_recipe, tmp_path / "run", "--nproc", "1")
    process.send_signal(number)
    stopped_at(process, tmp_path / "run")


@pytest.mark.breadth
def test_a_second_interrupt_ends_a_run_at_once(small_recipe, tmp_path):
    """While a rank is stopped, so that the ranks cannot agree."""
    process = start(small_recipe, tmp_path / "run")
    pids = workers(process.pid)
    os.kill(pids[0], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode == 128 + signal.SIGINT
    assert newest(tmp_path / "run" / "checkpoints") is None


def test_a_worker_of_another_launcher_ends_on_the_second_interrupt():
    program = """
import signal, sys, threading
from llmtrain.train.signals import StopSignals
signals = StopSignals()
print("ready", flush=True)
while signals.received is None: signal.pause()
print("told", flush=True)
while True: signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "told\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=15) == -signal.SIGINT


APART = 4
"""Steps that a rank may be ahead of another."""


def _ask(rank, told, at):
    """Steps until the ranks stop; each rank in `told` gets a signal at its step, and they run at different speeds."""
    from llmtrain.engines.runtime.distributed import barrier
    from llmtrain.launch.authentication import MessageAuthenticator
    from llmtrain.train.signals import StopAgreement, StopSignals

    stop = StopAgreement(StopSignals(), MessageAuthenticator("secret"))
    pace = random.Random(rank)
    step = 0
    while not stop.should_stop(step):
        if step % APART == 0:
            barrier()
        time.sleep(pace.random() / 200)
        if rank in told and step == at + rank:
            os.kill(os.getpid(), signal.SIGTERM if rank == 0 else signal.SIGUSR1)
        step += 1
    stop.close()
    barrier()  # as the worker does: rank 0 keeps the store
    return step, int(stop.stopped_by)


@pytest.mark.parametrize("told", [(0,), (1,), (2,), (0, 1, 2)])
def test_ranks_agree_whichever_rank_got_the_signal(told):
    results = run_ranks(3, _ask, told, 20)
    assert len(set(results)) == 1
    step, number = results[0]
    told_at = 20 + told[0]
    # The verdict after the next step may have been given already. Rank 0 gives the one after that; the request of
    # another rank is there once that rank has this verdict, and rank 0 sees it at the latest two steps after the ranks
    # have met again.
    latest = told_at + 2 if told[0] == 0 else told_at + 2 + (APART - 1) + 2
    assert told_at < step <= latest
    assert number == (signal.SIGTERM if told[0] == 0 else signal.SIGUSR1)
