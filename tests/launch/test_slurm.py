"""Jobs on a real Slurm train, stop, requeue and end as documented."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.manifest import read_manifests
from llmtrain.launch.discovery.slurm_step import hosts
from tests.helpers.commands import BREAKABLE
from tests.helpers.launching_doc import commands
from tests.helpers.slurm_cluster import missing, slurm_cluster

REPOSITORY = Path(__file__).parents[2]
RECIPE = f"{REPOSITORY / 'recipes' / 'tiny.py'}:verify"
STEPS = 60
FIELDS = (
    *(
        "logging.every_steps=1",
        "checkpoint.every_steps=1000",
        "evaluation.every_steps=20",
        "evaluation.max_sequences=4",
    ),
    *("logging.trackers=[]", "export.at_end=false", f"train.max_steps={STEPS}"),
)
SETS = tuple(part for field in FIELDS for part in ("--set", field))

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def workers_environment(tmp_path_factory) -> dict[str, str]:
    return {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LLMTRAIN_CACHE": str(tmp_path_factory.mktemp("cache")),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the committed scripts call `python`
    }


@pytest.fixture(scope="module")
def prepared(cluster, workers_environment, tmp_path_factory) -> str:
    """What the job that prepares the data of all others said."""
    return one_node(cluster, workers_environment, "prepare_data", tmp_path_factory.mktemp("data"))


def one_node(cluster, environment, name: str, folder: Path, *arguments: str) -> str:
    """Runs one of the committed scripts that need one node, to its end; its log."""
    script = REPOSITORY / "slurm" / f"{name}.sbatch"
    options = ("--wait", "--cpus-per-task=1", "--gpus-per-node=0", f"--chdir={folder}", "--output=log")
    try:
        cluster.run("sbatch", *options, script, RECIPE, *arguments, **environment)
    finally:
        told = (folder / "log").read_text()
        print(told)
    return told


@pytest.fixture(scope="module")
def uninterrupted(prepared, workers_environment, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    command = [sys.executable, "-m", "llmtrain", "train", RECIPE, "--nproc", "2", "--run-dir", str(run_dir), *SETS]
    done = subprocess.run(command, env={**os.environ, **workers_environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return logged(run_dir)


def logged(run_dir: Path) -> list[tuple]:
    """What a run computed, in the order that it was written."""
    with suppress(FileNotFoundError):
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)]
        wanted = ("step", "loss", "grad_norm", "tokens", "samples", "eval_loss")
        return [tuple(line[key] for key in wanted if key in line) for line in lines]
    return []


class Submitted:
    """A job that `llmtrain train --launcher slurm` has put into the queue."""

    def __init__(self, cluster, environment, run_dir: Path, *arguments: str) -> None:
        self.cluster, self.run_dir = cluster, run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        line = ["train", RECIPE, "--launcher", "slurm", "--run-dir", str(run_dir), *SETS, *arguments]
        log = ("--slurm", f"output={run_dir.parent}/job.log")
        told = cluster.run(sys.executable, "-m", "llmtrain", *line, *log, **environment)
        self.number = re.search(r"^job (\d+): ", told, re.MULTILINE)[1]
        assert f"squeue --job {self.number}" in told
        assert f"scancel {self.number}" in told
        assert f"log            {run_dir.parent}/job.log" in told

    @property
    def log(self) -> str:
        with suppress(FileNotFoundError):
            return (self.run_dir.parent / "job.log").read_text()
        return ""

    def until(self, condition, seconds: float = 120):
        def still():
            assert self.cluster.job(self.number)["JobState"] not in ("FAILED", "COMPLETED"), self.log
            return condition()

        return self.cluster.until(still, seconds, self.number)

    def ranks(self) -> dict[int, dict[str, str]]:
        """Process → environment of each rank that trains."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                environ = (entry / "environ").read_bytes().decode().split("\0")
                env = dict(part.split("=", 1) for part in environ if "=" in part)
                is_python = Path(os.fsdecode(command[0])).name.startswith("python")
                in_step = env.get("SLURM_JOB_ID") == self.number and "SLURM_STEP_ID" in env
                if is_python and in_step and b"llmtrain" in command:
                    found[int(entry.name)] = env
        return found

    def hold(self, after: int) -> int:
        """Stops the ranks where they are, once so many lines are logged; returns how many there are."""
        deadline = time.monotonic() + 120
        while len(logged(self.run_dir)) < after:
            assert time.monotonic() < deadline, self.log + self.cluster.told(self.number)
            time.sleep(0.02)
        for pid in self.ranks():
            os.kill(pid, signal.SIGSTOP)
        return len(logged(self.run_dir))

    def kill_rank(self, number: int) -> None:
        """Kills a rank, and not the watcher beside it."""
        ranks = self.ranks().items()
        named = {
            pid: Path(f"/proc/{pid}/comm").read_text().strip()
            for pid, env in ranks
            if env["SLURM_PROCID"] == str(number)
        }
        os.kill(next(pid for pid, name in named.items() if name != "llmtrain-watch"), signal.SIGKILL)

    def let_go(self) -> None:
        for pid in self.ranks():
            os.kill(pid, signal.SIGCONT)

    def completed(self) -> dict[str, str]:
        try:
            return self.cluster.wait(self.number, "COMPLETED", seconds=180)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None


@pytest.fixture
def submit(cluster, workers_environment, tmp_path):
    """Submits a job, and cancels it if the test fails."""
    jobs = []

    def start(*arguments: str, folder: str = "a folder", nodes: int = 2) -> Submitted:
        extent = ("--nodes", str(nodes), "--gpus-per-node", "1", "--slurm", "time=20")
        jobs.append(Submitted(cluster, workers_environment, tmp_path / folder / "run", *extent, *arguments))
        return jobs[-1]

    yield start
    for job in jobs:
        cluster.run("scancel", "--signal=KILL", job.number, check=False)
        cluster.run("scancel", job.number, check=False)


@pytest.mark.breadth
def test_data_are_prepared(prepared, workers_environment):
    assert "tokens" in prepared
    assert list(Path(workers_environment["LLMTRAIN_CACHE"]).iterdir())


@pytest.mark.breadth
def test_a_node_verifies_a_recipe(cluster, prepared, workers_environment, tmp_path):
    told = one_node(
        cluster, workers_environment, "verify", tmp_path, "--plans", "dp1-zero1-acc1", "--steps", "1", "--json"
    )
    document = json.loads(told[told.index("{") :])
    assert [plan["certified"] for plan in document["plans"]] == [True]


def test_the_printed_script_trains_the_same_on_two_nodes_as_one_machine(
    cluster, workers_environment, uninterrupted, tmp_path
):
    run_dir = tmp_path / "run $(touch executed) ü"
    """The documented line, for a run that is short and lies elsewhere."""
    [line] = commands("Slurm", "| sbatch")
    assert line == "llmtrain train recipes/tiny.py --launcher slurm --nodes 2 --dry-run | sbatch"
    line = line.replace("llmtrain", f"{sys.executable} -m llmtrain", 1).replace("recipes/tiny.py", RECIPE)
    line = line.replace(" | ", f" --run-dir '{run_dir}' {' '.join(SETS)} | ") + f" --parsable --chdir={tmp_path}"
    job = cluster.run("bash", "-c", line, **workers_environment).strip()
    try:
        cluster.wait(job, seconds=180)
    except AssertionError as error:
        raise AssertionError(f"{error} {[path.read_text() for path in tmp_path.glob('*.log')]}") from None
    assert logged(run_dir) == uninterrupted
    assert not (tmp_path / "executed").exists()
    launch, plan = (json.loads((run_dir / name).read_text()) for name in ("launch.json", "plan.json"))
    assert (launch["launcher"], launch["world_size"], plan["cluster"]["nodes"]) == ("slurm", 2, 2)


@pytest.mark.breadth
def test_the_time_limit_warns_saves_requeues_and_finishes(cluster, submit, uninterrupted):
    job = submit("--slurm", "warn_s=5")
    job.hold(after=3)
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
    job.until(lambda: "told to stop" in job.log, seconds=90)  # by Slurm, which checks every half minute
    job.let_go()
    job.until(lambda: "back into the queue" in job.log)
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=20")
    step = read_manifests(newest(job.run_dir / "checkpoints"))[0].step
    assert 3 <= step < STEPS
    assert f"stopped on SIGUSR1 after step {step}" in job.log
    assert job.completed()["Restarts"] == "1"
    assert f"continuing after step {step}" in job.log
    assert logged(job.run_dir) == uninterrupted


@pytest.mark.breadth
def test_scancel_saves_and_stays_cancelled(cluster, submit):
    job = submit()
    job.hold(after=3)
    cluster.run("scancel", job.number)
    job.let_go()
    cluster.wait(job.number, "CANCELLED")
    cluster.until(lambda: not job.ranks(), 30, job.number)
    checkpoint = newest(job.run_dir / "checkpoints")
    assert checkpoint is not None, job.log
    verify_checkpoint(checkpoint)
    assert f"stopped on SIGTERM after step {read_manifests(checkpoint)[0].step}" in job.log
    time.sleep(3)
    assert cluster.job(job.number)["JobState"] == "CANCELLED"


@pytest.mark.breadth
def test_a_job_that_is_requeued_by_hand_and_loses_a_node_finishes_on_others(cluster, submit, uninterrupted):
    job = submit()
    job.hold(after=3)
    cluster.run("scontrol", "requeue", job.number)
    job.let_go()
    job.until(lambda: "continuing after step" in job.log)
    lines = job.hold(after=len(logged(job.run_dir)) + 1)
    assert lines < len(uninterrupted)
    lost = cluster.job(job.number)["NodeList"]
    assert hosts(lost) == ["n1", "n2"]
    cluster.kill_node("n2")
    job.let_go()
    try:
        assert int(job.completed()["Restarts"]) == 2
        assert hosts(cluster.job(job.number)["NodeList"]) == ["n1", "n3"]
    finally:
        cluster.start_node("n2")
    assert logged(job.run_dir) == uninterrupted


@pytest.mark.breadth
def test_a_preempted_job_saves_waits_and_finishes(cluster, submit, uninterrupted, tmp_path):
    job = submit()
    job.hold(after=3)
    whole = ("--exclusive", "--nodes=3", f"--output={tmp_path}/urgent.log", "--parsable")
    urgent = cluster.run("sbatch", "--partition=urgent", *whole, "--wrap=sleep 3").strip()  # Slurm lets the ranks go
    cluster.wait(urgent)
    step = read_manifests(newest(job.run_dir / "checkpoints"))[0].step
    assert f"stopped on SIGTERM after step {step}" in job.log
    assert ": preempted\n" in job.log
    assert job.completed()["Restarts"] == "1"
    assert f"continuing after step {step}" in job.log
    assert logged(job.run_dir) == uninterrupted


@pytest.mark.breadth
def test_a_run_that_died_continues_from_its_last_checkpoint(cluster, submit, uninterrupted):
    job = submit("--set", "checkpoint.every_steps=5")
    job.until(lambda: newest(job.run_dir / "checkpoints"))
    job.hold(after=7)
    job.kill_rank(1)
    job.let_go()
    job.until(lambda: "back into the queue" in job.log)
    assert job.completed()["Restarts"] == "1"
    assert re.search(r"continuing after step \d*[05]$", job.log, re.MULTILINE)
    assert logged(job.run_dir) == uninterrupted


@pytest.mark.breadth
def test_a_run_that_dies_twice_in_one_place_ends(cluster, prepared, workers_environment, tmp_path):
    environment = {**workers_environment, "PYTHONPATH": BREAKABLE, "FAULT": "abort:1:6"}
    extent = ("--nodes", "2", "--gpus-per-node", "1", "--slurm", "time=20")
    job = Submitted(cluster, environment, tmp_path / "job" / "run", *extent)
    state = cluster.wait(job.number, "FAILED", seconds=300)
    assert state["Restarts"] == "1"
    assert "died twice in the same place" in job.log
    assert not job.ranks()


@pytest.mark.breadth
def test_an_array_trains_each_choice(cluster, submit):
    short = ("--max-steps", "2", "--slurm", "sweep=train.seed=1", "--slurm", "sweep=train.seed=2")
    job = submit(*short, nodes=1)
    cluster.until(lambda: not cluster.run("squeue", "-h", "-j", job.number).strip(), 180, job.number)
    runs = {name: logged(job.run_dir / name) for name in ("train.seed=1", "train.seed=2")}
    assert [len(lines) for lines in runs.values()] == [2, 2], job.log
    assert runs["train.seed=1"] != runs["train.seed=2"]
