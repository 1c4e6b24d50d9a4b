"""The launcher of one machine: its exit code, its message and its remaining processes for every end of a worker."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from llmtrain.errors import DataError, UserError, WorkerError
from llmtrain.launch import local
from llmtrain.launch.fork_server import ForkServer
from llmtrain.launch.local import run_workers
from llmtrain.launch.rendezvous import reserved_port
from llmtrain.system.heartbeat import HeartbeatPages
from llmtrain.system.stops import QUIT, STOP_SIGNALS

END_S = 15
"""A dead worker ends the others within so many seconds."""


@pytest.fixture(params=["alone", "forked"])
def fork_server(request, monkeypatch, tmp_path):
    """Each worker is started by itself, or forked from a process that has imported what it needs."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    if request.param == "alone":
        yield None
        return
    with ForkServer(["json"]) as fork_server:
        yield fork_server


def worker(script, body):
    return [sys.executable, "-m", script(body).stem]


def guarded(script, run_dir, body):
    """A worker that reports its exceptions, as the real one does."""
    lines = "\n".join(f"                    {line}" for line in body.strip().splitlines())
    return worker(
        script,
        f"""
            import os, signal, sys, time
            from pathlib import Path
            from llmtrain.train.console import redirect_output
            from llmtrain.errors import DataError, Problem
            from llmtrain.launch import discover
            from llmtrain.run_dir import RunDir

            def main(rank):
                if True:
{lines}

            rank = discover()
            output = redirect_output(RunDir(Path({str(run_dir.path)!r})), rank)
            try:
                main(rank.rank)
            except Exception as error:
                sys.exit(output.report_failure(error))
        """,
    )


def alive(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition, seconds=END_S):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def pids(folder: Path, count: int) -> list[int]:
    """Ids that `count` workers leave in a folder once they are ready."""
    wait_until(lambda: len(list(folder.glob("*.pid"))) == count)
    return [int(path.stem) for path in folder.glob("*.pid")]


READY = "import os, pathlib, signal, sys, time; pathlib.Path(sys.argv[1], f'{os.getpid()}.pid').touch()\n"


EXTRA = "a b $(c)\nü \udcff"
"""The last of it is no UTF-8."""


def test_each_worker_gets_its_rank(script, run_dir, tmp_path, capfd, monkeypatch, fork_server):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = worker(
        script,
        """
        import dataclasses, json, os, sys
        from llmtrain.launch import discover
        threads, extra = os.environ["OMP_NUM_THREADS"], os.environ["EXTRA"]
        print(json.dumps([dataclasses.asdict(discover()), threads, extra, sys.stdin.read()]))
        """,
    )
    assert run_workers(command, 3, run_dir, {"EXTRA": EXTRA}, fork_server=fork_server) == 0
    outputs = [capfd.readouterr().out, run_dir.log_file(1).read_text(), run_dir.log_file(2).read_text()]
    ranks = [json.loads(output)[0] for output in outputs]
    assert [rank["rank"] for rank in ranks] == [rank["local_rank"] for rank in ranks] == [0, 1, 2]
    assert {(rank["world_size"], rank["local_world_size"], rank["launcher"]) for rank in ranks} == {(3, 3, "local")}
    assert len({(rank["master_addr"], rank["master_port"]) for rank in ranks}) == 1
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert all(json.loads(output)[1:] == [threads, EXTRA, ""] for output in outputs)
    launch = json.loads(run_dir.launch_file.read_text())
    assert (launch["launcher"], launch["world_size"], launch["command"]) == ("local", 3, command)


def test_the_first_error_is_reported(script, run_dir, tmp_path, fork_server):
    """Rank 1 fails; rank 0 fails because of it, and is gone before rank 1 has finished dying."""
    command = guarded(
        script,
        run_dir,
        f"""
failed = Path({str(tmp_path)!r}, "failed")
if rank == 1:
    import atexit; atexit.register(time.sleep, 1)
    failed.touch()
    raise ValueError("the real cause")
while not failed.exists(): time.sleep(0.01)
time.sleep(0.3)
raise ConnectionError("a peer is gone")
        """,
    )
    with pytest.raises(WorkerError) as error:
        run_workers(command, 2, run_dir, fork_server=fork_server)
    assert str(error.value).startswith("rank 1: ValueError: the real cause (")
    assert str(run_dir.log_file(1)) in str(error.value)
    assert "a peer is gone" not in str(error.value)
    assert error.value.exit_code == 5
    assert "raise ValueError" in run_dir.log_file(1).read_text()
    assert "a peer is gone" in run_dir.log_file(0).read_text()


def test_user_errors_are_passed_on(script, run_dir, fork_server):
    command = guarded(
        script,
        run_dir,
        "raise DataError([Problem('data.empty', 'data.sources', 'no text', 'add some'), Problem('b', 'c', 'd')])",
    )
    with pytest.raises(DataError) as error:
        run_workers(command, 2, run_dir, fork_server=fork_server)
    assert error.value.exit_code == 3
    assert str(error.value) == "data.sources: no text [data.empty]\n    add some\nc: d [b]"


@pytest.mark.parametrize(
    ("death", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9 (SIGKILL); the kernel's out-of-memory killer"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11 (SIGSEGV)"),
        ("os._exit(3)", "exited with code 3 without an error message"),
        ("sys.exit('a last word')", "a last word"),
    ],
)
def test_a_death_without_an_error_file_is_described(script, run_dir, death, says, fork_server):
    command = worker(
        script,
        f"""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            print("reading shard 7", flush=True)
            {death}
        time.sleep(60)
        """,
    )
    run_dir.log_file(1).write_text("of an earlier attempt\n")
    started = time.monotonic()
    with pytest.raises(WorkerError) as error:
        run_workers(command, 3, run_dir, fork_server=fork_server)
    assert time.monotonic() - started < END_S
    assert str(error.value).startswith("rank 1: ")
    assert says in str(error.value)
    assert "reading shard 7" in str(error.value)
    assert "earlier attempt" not in str(error.value)


def test_a_worker_that_will_not_end_is_killed(script, run_dir, tmp_path, monkeypatch, fork_server):
    monkeypatch.setattr(local, "GRACE_S", 0.5)
    command = worker(
        script,
        READY
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    while len(list(pathlib.Path(sys.argv[1]).glob("*.pid"))) < 2: time.sleep(0.01)
    time.sleep(0.2)
    sys.exit(1)
time.sleep(60)
""",
    )
    with pytest.raises(WorkerError, match="rank 1: exited with code 1"):
        run_workers([*command, str(tmp_path)], 2, run_dir, fork_server=fork_server)
    assert not any(alive(pid) for pid in pids(tmp_path, 2))


def test_the_grace_period_is_as_documented():
    assert local.GRACE_S == 10 < END_S


def test_children_of_a_dead_worker_end_with_it(script, run_dir, tmp_path, fork_server):
    command = worker(
        script,
        """
        import os, pathlib, subprocess, sys
        child = subprocess.Popen(["sleep", "60"])
        pathlib.Path(sys.argv[1], f"{child.pid}.pid").touch()
        os._exit(1)
        """,
    )
    with pytest.raises(WorkerError):
        run_workers([*command, str(tmp_path)], 1, run_dir, fork_server=fork_server)
    wait_until(lambda: not any(alive(pid) for pid in pids(tmp_path, 1)))


def test_stopping_after_a_save_is_not_a_failure(script, run_dir, fork_server):
    command = worker(script, "import os, sys, time; time.sleep(0.3 * int(os.environ['RANK'])); sys.exit(75)")
    assert run_workers(command, 2, run_dir, fork_server=fork_server) == 75


def test_an_error_of_an_earlier_attempt_is_forgotten(script, run_dir, fork_server):
    run_dir.error_file(0).write_text('{"an": "old one"}')
    assert run_workers(worker(script, ""), 1, run_dir, fork_server=fork_server) == 0
    assert not run_dir.error_file(0).exists()


def launcher(fork_server, run_dir, command, count=2):
    """A launcher in its own process, for the tests that kill it; exits as the command line does."""
    program = f"""
import sys
from pathlib import Path
from llmtrain.errors import UserError
from llmtrain.launch import run_workers
from llmtrain.launch.fork_server import ForkServer
from llmtrain.system.stops import QUIT, STOP_SIGNALS
from llmtrain.system.stops import QUIT, STOP_SIGNALS
from llmtrain.run_dir import RunDir
fork_server = ForkServer(["json"]) if {fork_server is not None} else None
try:
    sys.exit(run_workers({command!r}, {count}, RunDir(Path({str(run_dir.path)!r})), fork_server=fork_server))
except UserError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True)


SLEEP = READY + "time.sleep(60)"


def test_no_worker_outlives_a_killed_launcher(script, run_dir, tmp_path, fork_server):
    process = launcher(fork_server, run_dir, [*worker(script, SLEEP), str(tmp_path)])
    workers = pids(tmp_path, 2)
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on(script, run_dir, tmp_path, number, fork_server):
    process = launcher(fork_server, run_dir, [*worker(script, SLEEP), str(tmp_path)])
    workers = pids(tmp_path, 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=END_S)
    assert process.returncode == 75
    assert "rank" not in output
    assert not any(alive(pid) for pid in workers)


def test_workers_may_save_when_stopped(script, run_dir, tmp_path, fork_server):
    body = """
import os, pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], f'{os.getpid()}.pid').touch()
time.sleep(60)
"""
    process = launcher(fork_server, run_dir, [*worker(script, body), str(tmp_path)])
    pids(tmp_path, 2)
    process.terminate()
    process.communicate(timeout=END_S)
    assert process.returncode == 75


def test_a_second_interrupt_kills(script, run_dir, tmp_path, fork_server):
    body = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SLEEP
    process = launcher(fork_server, run_dir, [*worker(script, body), str(tmp_path)])
    workers = pids(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    assert all(alive(pid) for pid in workers)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=END_S)
    assert process.returncode == 130
    assert not any(alive(pid) for pid in workers)


@pytest.mark.parametrize("before", [[], [signal.SIGTERM]])
def test_a_quit_kills_at_any_time(script, run_dir, tmp_path, fork_server, before):
    body = "".join(f"import signal; signal.signal({int(one)}, signal.SIG_IGN)\n" for one in before) + SLEEP
    process = launcher(fork_server, run_dir, [*worker(script, body), str(tmp_path)])
    workers = pids(tmp_path, 2)
    for number in (*before, QUIT):
        process.send_signal(number)
        time.sleep(0.02)
    process.communicate(timeout=END_S)
    assert process.returncode == 130
    assert not any(alive(pid) for pid in workers)


def test_workers_before_the_first_step_end_at_once(script, run_dir, tmp_path, fork_server, capfd):
    """Nothing is lost with them, and they may need minutes to come to one."""
    body = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP

    def stop():
        pids(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=stop).start()
    command = [*worker(script, body), str(tmp_path)]
    assert run_workers(command, 2, run_dir, heartbeats=HeartbeatPages(2), fork_server=fork_server) == 75
    assert "stopped on SIGTERM before the first step" in capfd.readouterr().err
    assert not any(alive(pid) for pid in pids(tmp_path, 2))


def test_a_killed_worker_is_named_even_if_it_is_noticed_late(script, run_dir, tmp_path, fork_server):
    """The launcher is stopped while rank 1 is killed and rank 0 fails over it, as on a busy machine."""
    body = """
if rank == 1:
    Path(sys.argv[1], f'{os.getpid()}.pid').touch()
    time.sleep(60)
while not Path(sys.argv[1], 'go').exists(): time.sleep(0.01)
raise ConnectionError("a peer is gone")
    """
    process = launcher(fork_server, run_dir, [*guarded(script, run_dir, body), str(tmp_path)])
    (second,) = pids(tmp_path, 1)
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    wait_until(run_dir.error_file(0).exists)
    time.sleep(0.2)
    os.kill(second, signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=END_S)
    assert output.startswith("rank 1: killed by signal 9")
    assert process.returncode == 5


def test_a_command_that_does_not_exist_leaves_nothing(run_dir):
    with pytest.raises(FileNotFoundError):
        run_workers(["/no/such/program"], 2, run_dir)


def test_the_signal_handlers_are_restored(script, run_dir, fork_server):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    run_workers(worker(script, ""), 1, run_dir, fork_server=fork_server)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_only_rank_0_can_use_a_reserved_port():
    with reserved_port() as port:
        others = set()
        for _ in range(200):
            with socket.socket() as other:
                other.bind(("", 0))
                others.add(other.getsockname()[1])
        assert port not in others
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            listener.listen()
            with socket.create_connection(("127.0.0.1", port)):
                pass


def test_the_rendezvous_of_torch_uses_a_reserved_port():
    program = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), 1, True, timeout=timedelta(seconds=10))
store.set("key", "value")
print(store.get("key").decode())
"""
    with reserved_port() as port:
        command = [sys.executable, "-c", program, str(port)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "value\n"


def test_every_user_error_keeps_its_type(run_dir):
    from llmtrain.launch.failure import USER_ERRORS, Failure

    for kind in USER_ERRORS.values():
        Failure.of(1, kind("a sentence")).write(run_dir.error_file(1))
        failure = Failure.read(run_dir.error_file(1))
        assert failure is not None
        error = failure.error(run_dir.log_file(1))
        assert type(error) is kind
        assert str(error) == "a sentence"
        assert isinstance(error, UserError)
