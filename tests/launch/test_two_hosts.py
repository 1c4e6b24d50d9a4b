"""DeepSpeed's launcher, alone and under our command, trains the same on two hosts as one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from llmtrain.launch.authentication import Secret
from llmtrain.run_dir import RunDir
from llmtrain.trials.verify.compare import FP32
from tests.helpers.launching_doc import commands
from tests.helpers.nasty import CANARY, words
from tests.helpers.two_hosts import INTERFACE, Host, TwoHosts, missing, two_hosts

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "recipes" / "tiny.py"
FIELDS = ("logging.every_steps=1", "checkpoint.every_steps=1000", "evaluation.every_steps=3", "export.at_end=false")
STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="module")
def workers_environment(tmp_path_factory):
    return {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LLMTRAIN_CACHE": str(tmp_path_factory.mktemp("cache")),
    }


def _arguments(run_dir: Path | None, *fields: str) -> list[str]:
    sets = [part for field in (*FIELDS, *fields) for part in ("--set", field)]
    return [*(["--run-dir", str(run_dir)] if run_dir else []), "--max-steps", str(STEPS), *sets]


def _logged(run_dir: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.fixture(scope="module")
def one(workers_environment, tmp_path_factory):
    """The run of one process."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    command = [sys.executable, "-m", "llmtrain", "train", f"{RECIPE}:verify", *_arguments(run_dir)]
    result = subprocess.run(command, env={**os.environ, **workers_environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return run_dir


LINES = commands("A hostfile", "recipes/tiny.py")
QUICK = [line for line in LINES if line.startswith("llmtrain")][:1]
STAGES = ("parallel.pipeline=2", "parallel.zero_stage=1")


def _is_the_run_of(one: Path, two: Path) -> None:
    plan = RunDir(two).read_plan()
    assert plan.layout() == {"dp": 2, "pp": 2, "tp": 1, "sp": 1, "ep": 1, "zero_stage": 1}
    assert plan.cluster.nodes == plan.cluster.devices_per_node == 2
    for key, entries in (("loss", STEPS), ("grad_norm", STEPS), ("eval_loss", STEPS // 3)):
        expected = _logged(one, key)
        assert len(expected) == entries
        assert _logged(two, key) == pytest.approx(expected, rel=FP32)


def _chose_the_cable(run_dir: Path, ranks: int) -> None:
    """gloo is not configured, and the host's own name resolves to the loopback."""
    for rank in range(ranks):
        said = (run_dir / "logs" / f"rank_{rank}.log").read_text()
        assert f"network interface of gloo: {INTERFACE} (" in said
        assert "resolves to 127.0.1.1" in said
    assert json.loads((run_dir / "environment.json").read_text())["variables"]["GLOO_SOCKET_IFNAME"] == INTERFACE


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=() if line in QUICK else pytest.mark.breadth) for line in LINES]
)
def test_a_pipeline_over_two_hosts_trains_as_one_process(hosts, workers_environment, one, tmp_path, line):
    """By the documented lines, given on the first host; ours hand on what is set here, and folders with any name."""
    by_us = line.startswith("llmtrain")
    shared, trap = tmp_path / ("it's $(shared)" if by_us else "shared"), tmp_path / "owned"
    left_by_others = set(Path("/tmp").glob("llmtrain-*/job.json"))
    program, *words = line.split()
    words = [word.replace("/shared", str(shared)) for word in words]
    words[words.index("--hostfile") + 1] = str(hosts.hostfile(2))
    recipe = words.index("recipes/tiny.py")
    words[recipe : recipe + 1] = [f"{RECIPE}:verify"] if by_us else [str(RECIPE), "--variant", "verify"]
    start = [sys.executable, Path(sys.executable).parent / program, *words, *_arguments(None, *STAGES)]
    environment = hosts.environment(workers_environment)
    if by_us:
        value = f"a  b'c\"$(touch {trap})`touch {trap}`\n; touch {trap} # \\ ü"
        environment = _environment(hosts, workers_environment, TORCH_TOLD=value)
    command = hosts.hosts[0].command(*start)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    _is_the_run_of(one, shared / "runs" / "tiny")
    _chose_the_cable(shared / "runs" / "tiny", ranks=4)
    if by_us:
        assert result.stderr == ""
        assert "[INFO]" not in result.stdout
        assert "\x1b" not in result.stdout  # lines, and no terminal's progress
        assert not trap.exists()
        assert set(Path("/tmp").glob("llmtrain-*/job.json")) <= left_by_others


def _ours(hosts: TwoHosts, runner: str, hostfile: Path, *arguments: str) -> list[str]:
    """`llmtrain train --launcher deepspeed`, given on the first host."""
    launcher = ("--launcher", "deepspeed", "--runner", runner, "--hostfile", str(hostfile))
    return hosts.hosts[0].command(sys.executable, "-m", "llmtrain", "train", f"{RECIPE}:verify", *launcher, *arguments)


def _environment(hosts: TwoHosts, workers: dict[str, str], **more: str) -> dict[str, str]:
    return {**hosts.environment(workers), "PYTHONPATH": str(REPOSITORY), **more}


TELL = f"""
import json, os, subprocess, sys
from llmtrain.launch import discover

rank = discover()
address = subprocess.run(["ip", "-o", "-4", "address", "show", {INTERFACE!r}], capture_output=True, text=True).stdout
values = [os.environ[f"TORCH_TOLD_{{number}}"] for number in range(int(os.environ["TORCH_TOLD"]))]
told = [values, sys.argv[2:], os.getcwd(), os.environ["CUDA_VISIBLE_DEVICES"], rank.local_rank, rank.world_size,
        rank.master_addr, address.split()[3]]
open(sys.argv[1] + str(rank.rank), "w").write(json.dumps(told))
"""


@pytest.mark.parametrize("runner", ["pdsh", pytest.param("openmpi", marks=pytest.mark.breadth)])
def test_variables_devices_and_ranks_arrive_unchanged(hosts, workers_environment, tmp_path, runner):
    """Each worker writes down what it was given, in place of training; the first host is not the one of the command."""
    values, given = words(1), words(2)
    folder = tmp_path / "it's $(touch executed) ü"
    folder.mkdir()
    here, there = (host.address for host in hosts.hosts)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(f"{there} slots=3\n{here} slots=4\n")
    job = f"""
from pathlib import Path
from llmtrain.launch.hostfile import read_hosts
from llmtrain.launch.hosts import HostsJob, run_on_hosts
from llmtrain.run_dir import RunDir

hosts = tuple(read_hosts(Path({str(hostfile)!r}), "{here}:3@{there}:0,2"))
argv = ("-c", {TELL!r}, {str(tmp_path / "told ")!r}, *{given!r})
raise SystemExit(run_on_hosts(HostsJob(hosts, Path("none"), argv, RunDir(Path({str(tmp_path)!r})), {runner!r})))
"""
    told = {f"TORCH_TOLD_{number}": value for number, value in enumerate(values)}
    environment = _environment(hosts, workers_environment, TORCH_TOLD=str(len(values)), **told)
    command = hosts.hosts[0].command(sys.executable, "-c", job)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    places = [("0,2", 0, there), ("0,2", 1, there), ("3", 0, here)]
    expected = [[values, given, str(folder), devices, local, 3, there, f"{own}/24"] for devices, local, own in places]
    assert [json.loads((tmp_path / f"told {rank}").read_text()) for rank in range(3)] == expected
    assert len(list(tmp_path.glob("told *"))) == 3
    assert not list(tmp_path.rglob(CANARY))
    assert not [place for place in (Path("/"), Path("/tmp"), Path.home()) if (place / CANARY).exists()]


@pytest.mark.breadth
@pytest.mark.parametrize("runner", ["pdsh", "openmpi"])
def test_a_signal_saves_on_all_hosts_and_the_same_command_continues(hosts, workers_environment, tmp_path, runner):
    run_dir = tmp_path / "run"
    steps = ("logging.every_steps=1", "export.at_end=false", "evaluation.every_steps=0", "train.max_steps=100000")
    sets = [part for field in (*steps, "parallel.zero_stage=1") for part in ("--set", field)]
    environment = _environment(hosts, workers_environment)
    codes, logged = [], []
    for _ in range(2):
        command = _ours(hosts, runner, hosts.hostfile(1), "--run-dir", str(run_dir), *sets)
        before = len(logged)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        metrics = run_dir / "metrics.jsonl"
        while process.poll() is None and (not metrics.exists() or len(_logged(run_dir, "loss")) < before + 5):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)  # `ip netns exec` has become the command
        said = process.communicate(timeout=120)[0]
        codes.append(process.returncode)
        logged = sorted(_logged(run_dir, "loss"))
    assert codes == [75, 75], said
    assert "stopped on SIGTERM" in said
    assert "continuing after step" in said
    assert logged == list(range(1, len(logged) + 1))


@pytest.mark.parametrize(
    ("place", "text", "said"),
    [
        (
            REPOSITORY / "llmtrain" / "launch" / "jobs" / "kubernetes.py",
            '"""Another version."""\n',
            "different code of llmtrain",
        ),
        pytest.param(
            Path(metadata.distribution("tokenizers")._path) / "METADATA",  # the metadata in Python's own format
            "Metadata-Version: 2.1\nName: tokenizers\nVersion: 0.1\n",
            f"tokenizers 0.1 instead of {metadata.version('tokenizers')}",
            marks=pytest.mark.breadth,
        ),
        pytest.param(RECIPE, "# another recipe\n", "a different recipe file", marks=pytest.mark.breadth),
    ],
    ids=["llmtrain", "package", "recipe"],
)
def test_a_host_with_another_version_is_named_and_nothing_starts(workers_environment, tmp_path, place, text, said):
    """The second host sees another file in that place."""
    other = tmp_path / "other"
    other.write_text(text)
    (tmp_path / "hosts").mkdir()
    with two_hosts(tmp_path / "hosts", {place: other}) as both:
        command = _ours(both, "pdsh", both.hostfile(1), *_arguments(tmp_path / "run"))
        environment = _environment(both, workers_environment)
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stdout + result.stderr
    [line] = [line for line in result.stderr.splitlines() if "differs from this machine" in line]
    assert line.startswith(f"error: {both.hosts[1].address}: differs from this machine: ")
    assert said in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_host_that_does_not_answer_is_named_and_nothing_starts(hosts, workers_environment, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(f"{hosts.hosts[0].address} slots=1\n192.0.2.77 slots=1\n")
    train = (sys.executable, "-m", "llmtrain", "train", f"{RECIPE}:verify", "--launcher", "deepspeed")
    command = hosts.hosts[0].command(*train, "--hostfile", hostfile, *_arguments(tmp_path / "run"))
    environment = _environment(hosts, workers_environment)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "192.0.2.77: does not answer ssh" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("runner", "lost"),
    [("pdsh", "power"), *(pytest.param("openmpi", lost, marks=pytest.mark.breadth) for lost in ("power", "cable"))],
)
def test_a_host_that_is_lost_ends_the_job_on_the_others(workers_environment, tmp_path, runner, lost):
    """Nothing runs on that host any more, not even its ssh server; or everything runs, but without a network."""
    (tmp_path / "hosts").mkdir()
    with two_hosts(tmp_path / "hosts") as both:
        steps = ("logging.every_steps=1", "train.max_steps=100000", "evaluation.every_steps=0")
        sets = [part for field in (*steps, "parallel.zero_stage=1") for part in ("--set", field)]
        run_dir = tmp_path / "run"
        command = _ours(both, runner, both.hostfile(1), "--run-dir", str(run_dir), *sets)
        environment = _environment(both, workers_environment)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while not (run_dir / "metrics.jsonl").exists() or len(_logged(run_dir, "loss")) < 5:
            assert process.poll() is None
            time.sleep(0.05)
        if lost == "power":
            both.hosts[1].kill_all()
        else:
            both.hosts[1].cut_off()
        said, error = process.communicate(timeout=90)
        assert process.returncode == 5, said + error
        assert "Traceback" not in error
        by_ssh = f"{both.hosts[1].address}: the connection to it was lost, or the host went down"
        by_watcher = "rank 1: ended, or its machine does not answer"
        assert by_ssh in error or (lost == "cable" and by_watcher in error)  # silence is noticed by either first
        # The host without a cable still reaches the run directory, and writes there that it is cut off.
        assert "error: rank 1 on " not in error
        assert not [pid for pid in both.hosts[0].processes() if b"start.py" in _command_line(pid)]


STRANGER = "192.0.2.3"
MEETING = 29733
OWNED = "\x1b]0;owned\x07"
ATTACK = f"""
import json, select, socket, sys
from contextlib import suppress

owned, word = {OWNED!r}, b"0" * 32 + b"\\n"
status = dict(host=owned, pid=1, step=0, phase=2, idle_s=1e9, own_s=0.0, measured=0, limit_s=1.0, waiting=False)
status |= dict(state="T", frame=owned)
problem = dict(rule="worker.hang", field=owned, message=owned, fix=owned)
said = [dict(rank=1, status=status), dict(rank=1, frame=owned), dict(do="end", problem=problem)]
lines = [json.dumps(one).encode() + b"\\n" for one in said]
sealed = [b"0" * 64 + b" " + line for line in lines]
texts = [b"", b"\\n", b"GET / HTTP/1.1\\r\\n\\r\\n", b"[" * 60_000 + b"\\n", bytes(range(256)) * 512, b"\\xff" * 64]
texts += [owned.encode() + b"\\n", *lines, *(word + line for line in (*lines, *sealed))]
held = []
for address, port in json.loads(sys.argv[1]):
    for text in texts:
        connection = socket.create_connection((address, port), source_address=({STRANGER!r}, 0))
        held.append((connection, text.removeprefix(word)))
        with suppress(OSError):  # it was hung up on
            connection.sendall(text)
        connection.setblocking(False)
print("sent", flush=True)
while not select.select([sys.stdin], [], [], 0.05)[0]:  # again and again, as the ranks' own words come again and again
    for connection, text in held:
        with suppress(OSError):
            connection.sendall(text)
"""
"""What nobody has to know anything for."""
READ = f"""
import sys
from torch.distributed import TCPStore

store = TCPStore(sys.argv[1], {MEETING}, wait_for_workers=False)
print({{key: store.get(key) for key in store.list_keys()}})
store.set("llmtrain/stop/0/request", "15")
"""
"""What torch lets anyone do in the store that ranks meet at."""
FORGE = f"""
while True:
    for key in store.list_keys():
        if "/stop/" in key:
            store.set(key, {OWNED!r})
"""


def _secrets(host: Host) -> set[str]:
    """What the workers on a host sign with."""
    environments = [Path(f"/proc/{pid}/environ").read_text() for pid in host.processes()]
    texts = {text for one in environments for text in re.findall(r"LLMTRAIN_SECRET=(\w+)", one)}
    return texts | {Secret(text, is_given=True).authenticator.key for text in texts}


@pytest.mark.breadth
@pytest.mark.parametrize("runner", ["pdsh", "openmpi"])
def test_an_attacker_on_the_network_reads_no_secret_and_stops_nothing(workers_environment, tmp_path, runner):
    """From an address of its own to every port of a run. The store's verdicts it can spoil: then the run says so."""
    run_dir = tmp_path / "run"
    steps = ("logging.every_steps=1", "evaluation.every_steps=0", "train.max_steps=100000", "parallel.zero_stage=1")
    sets = [part for field in steps for part in ("--set", field)]
    (tmp_path / "hosts").mkdir()
    with two_hosts(tmp_path / "hosts") as both:
        here, there = both.hosts
        there.add_address(STRANGER)
        environment = _environment(both, workers_environment, MASTER_PORT=str(MEETING))
        command = _ours(both, runner, both.hostfile(1), "--run-dir", str(run_dir), *sets)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def goes_on() -> None:
            logged = len(_logged(run_dir, "loss")) if (run_dir / "metrics.jsonl").exists() else 0
            while not (run_dir / "metrics.jsonl").exists() or len(_logged(run_dir, "loss")) < logged + 5:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)

        goes_on()
        ports = [(host.address, port) for host in both.hosts for port in host.listening()]
        assert (here.address, MEETING) in ports
        assert {address for address, _ in ports} == {here.address, there.address}
        attack = there.command(sys.executable, "-c", ATTACK, json.dumps(ports))
        attacker = subprocess.Popen(attack, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert attacker.stdout.readline() == "sent\n"
        goes_on()
        read = subprocess.run(
            there.command(sys.executable, "-c", READ, here.address), capture_output=True, text=True, timeout=60
        )
        assert "llmtrain/stop/0/" in read.stdout, read.stderr
        secrets = _secrets(here)
        assert secrets == _secrets(there) != set()
        assert not [one for one in secrets if one in read.stdout]
        goes_on()
        forge = there.command(sys.executable, "-c", READ + FORGE, here.address)
        forger = subprocess.Popen(forge, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        said, error = process.communicate(timeout=90)
        attacker.communicate()
        forger.kill()
        forger.wait()
    assert process.returncode == 5, said + error
    assert "no rank of this run wrote [worker.stranger]" in error
    assert "Traceback" not in error
    assert "owned" not in said + error
    assert "stopped on" not in said


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
