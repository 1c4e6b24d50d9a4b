"""The process that workers are forked from. Tests of all workers, forked or not, are in `test_local.py`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.launch.fork_server import ForkServer
from llmtrain.launch.local import common_environment, run_workers
from llmtrain.system.heartbeat import HeartbeatPages

END_S = 15


@pytest.fixture(autouse=True)
def _modules(monkeypatch, tmp_path):
    """The scripts of a test are modules."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))


def module(script, body):
    return [sys.executable, "-m", script(body).stem]


def wait_until(condition):
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def children():
    """Tells the children that this process has got; other tests leave some, for the tests after them."""

    def all_of_them() -> list[int]:
        return list(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))

    before = all_of_them()
    return lambda: [pid for pid in all_of_them() if pid not in before]


def open_in(pid: int) -> set[str]:
    """Names of the descriptors that a process has."""
    return {path.name for path in Path(f"/proc/{pid}/fd").iterdir()}


def said(run_dir, world_size) -> list:
    """The last line that each worker but rank 0 has in its log, from JSON."""
    return [json.loads(run_dir.log_file(rank).read_text().splitlines()[-1]) for rank in range(1, world_size)]


TELL = """
import json, os, sys
def tell(*values): print(json.dumps(values), flush=True)
"""


def test_all_are_forked_from_one_process_until_the_environment_changes(script, run_dir, children):
    """Which may have decided what was imported, as OMP_NUM_THREADS does."""
    name = script("import os; pid = os.getpid()").stem
    command = module(script, f"{TELL}import {name}; tell({name}.pid, os.getpid(), os.environ.get('RANK'))")
    with ForkServer([name]) as fork_server:
        seen = []
        for variable in ("1", "1", "2"):
            assert run_workers(command, 3, run_dir, {"VARIABLE": variable}, fork_server=fork_server) == 0
            seen.append(said(run_dir, 3))
    first, second, third = ({source for source, *_ in ranks} for ranks in seen)
    assert len(first) == 1
    assert first == second != third
    assert len({pid for ranks in seen for _, pid, _ in ranks}) == 6
    assert [rank for _, _, rank in seen[0]] == ["1", "2"]
    assert not children()


def test_a_forked_worker_equals_a_separately_started_one(script, run_dir):
    command = module(
        script,
        f"""{TELL}
import signal, threading
tell(
    sys.argv, sys.orig_argv, __name__, os.getsid(0) == os.getpid(), threading.active_count(), __spec__.name,
    [str(signal.getsignal(number)) for number in range(1, 32)], sys.stdin.read(), os.getcwd(), sys.path,
    sorted(os.listdir("/proc/self/fd")),
    {{name: value for name, value in os.environ.items() if name not in ("MASTER_PORT", "LLMTRAIN_SECRET")}},
    open("/proc/self/cmdline").read().split("\\0")[:3],
)
""",
    )
    seen = []
    with ForkServer(["json"] * 40) as fork_server:  # its command line is long, so that theirs have room
        for source in (None, fork_server):
            assert run_workers([*command, "a b", "-c"], 2, run_dir, fork_server=source) == 0
            seen += said(run_dir, 2)
    alone, forked = seen
    assert alone == forked
    assert alone[1][1:] == ["-m", command[-1], "a b", "-c"]


def test_signals_that_were_ignored_stay_so_and_the_others_end_a_worker(script, run_dir):
    body = f"{TELL}import signal; tell(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, signal.getsignal(15) == 0)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ForkServer(["json"]) as fork_server:
            assert run_workers(module(script, body), 2, run_dir, fork_server=fork_server) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert said(run_dir, 2) == [[True, True]]


def test_workers_find_the_memory_of_their_heartbeats(script, run_dir, children):
    command = module(
        script,
        """
        import os
        from llmtrain.system.heartbeat import Heartbeat
        rank = int(os.environ["RANK"])
        Heartbeat.of_worker(rank).begin_step(7 + rank)
        """,
    )
    with ForkServer(["json"]) as fork_server:
        fork_server.start(common_environment(2))
        heartbeats = HeartbeatPages(2)
        assert run_workers(command, 2, run_dir, heartbeats=heartbeats, fork_server=fork_server) == 0
        held = open_in(children()[0])
        assert run_workers(command, 2, run_dir, heartbeats=heartbeats, fork_server=fork_server) == 0
        assert open_in(children()[0]) == held  # nothing of a worker's is left with it
    assert heartbeats.step() == 7
    heartbeats.close()


@pytest.mark.parametrize("death", ["import", "kill"])
def test_without_the_fork_server_workers_are_started_separately(script, run_dir, death, children):
    broken = script("raise ImportError").stem
    with ForkServer([broken] if death == "import" else ["json"]) as fork_server:
        fork_server.start(common_environment(2))
        if death == "kill":
            wait_until(lambda: fork_server.wait_until_ready(0.1))
            os.kill(children()[0], signal.SIGKILL)
        assert run_workers(module(script, TELL + "tell(os.getppid())"), 2, run_dir, fork_server=fork_server) == 0
    assert said(run_dir, 2) == [[os.getpid()]]


def test_a_signal_during_the_imports_starts_no_worker(script, run_dir, tmp_path):
    slow = script(f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, 'slow').touch(); time.sleep(60)").stem
    program = f"""
import sys
from pathlib import Path
from llmtrain.launch import run_workers
from llmtrain.launch.fork_server import ForkServer
from llmtrain.run_dir import RunDir
folder = RunDir(Path({str(run_dir.path)!r}))
with ForkServer([{slow!r}]) as fork_server:
    sys.exit(run_workers([sys.executable, "-m", "json.tool"], 1, folder, fork_server=fork_server))
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    wait_until((tmp_path / "slow").exists)
    process.terminate()
    assert process.wait(timeout=END_S) == 75


@pytest.mark.parametrize("stage", ["imports", "waits"])
def test_the_fork_server_ends_with_its_launcher(script, tmp_path, stage):
    slow = script("import time; time.sleep(60)").stem
    program = f"""
import time
from llmtrain.launch.local import common_environment
from llmtrain.launch.fork_server import ForkServer
fork_server = ForkServer([{slow if stage == "imports" else "json"!r}])
fork_server.start(common_environment(1))
print(fork_server.wait_until_ready({0 if stage == "imports" else END_S}), fork_server._process.pid, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    is_settled, pid = process.stdout.readline().split()
    assert is_settled == str(stage == "waits")
    process.kill()
    assert process.communicate(timeout=END_S)[0] == ""  # to the end of the pipe
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text())


def test_ranks_have_their_own_threads_and_random_numbers(script, run_dir, monkeypatch):
    """With all that workers import; a thread pool that was there before the fork would have them wait for ever."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    body = """
now = len(os.listdir("/proc/self/task")), "torch._dynamo" in sys.modules
import torch, numpy, random, tempfile, uuid
assert (torch.ones(500, 500) @ torch.ones(500, 500)).sum() == 500**3
assert (numpy.ones((500, 500)) @ numpy.ones((500, 500))).sum() == 500**3
drawn = [numpy.random.rand(), random.random(), tempfile.mktemp(), str(uuid.uuid4())]
tell(now, torch.get_num_threads(), torch.cuda.is_initialized(), drawn)
"""
    with ForkServer() as fork_server:
        assert run_workers(module(script, TELL + body), 3, run_dir, fork_server=fork_server) == 0
    first, second = said(run_dir, 3)
    assert first[:3] == second[:3] == [[1, True], 2, False]
    assert all(one != other for one, other in zip(first[3], second[3], strict=True))
