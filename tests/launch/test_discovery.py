"""Each launcher's variables give a worker its rank; impossible or contradictory ones are named."""

import json
import os
import subprocess
import sys

import pytest

from llmtrain.errors import RecipeError
from llmtrain.launch.discovery.discover import Rank, discover, without_local_rank

COMMON = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29501",
}
TORCHRUN = {**COMMON, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = {**COMMON, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "node-1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "29501",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "758841345",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29501",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29501",
}


def expected(launcher: str) -> Rank:
    return Rank(3, 1, 4, 2, "node-1", 29501, launcher)


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (DEEPSPEED, "deepspeed"),
        (HOROVODRUN, "horovodrun"),
        ({**COMMON, "LOCAL_WORLD_SIZE": "2"}, "environment"),
        ({**COMMON, "LOCAL_WORLD_SIZE": "2", "LLMTRAIN_LAUNCHER": "local"}, "local"),
        (OPEN_MPI, "openmpi"),
        (MPICH, "mpich"),
        ({**COMMON, "LOCAL_WORLD_SIZE": "2", **OPEN_MPI}, "openmpi"),
        # torchrun's workers, one torchrun for each process of mpirun
        ({**TORCHRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "torchrun"),
        # The same by a script that numbers them itself
        ({**COMMON, "LOCAL_WORLD_SIZE": "2", **MPICH, "PMI_RANK": "1", "PMI_SIZE": "2"}, "environment"),
        # The innermost launcher is believed.
        ({**TORCHRUN, **DEEPSPEED, **HOROVODRUN, "LLMTRAIN_LAUNCHER": "local"}, "local"),
    ],
)
def test_each_launcher_is_recognised(env, launcher):
    assert discover(env) == expected(launcher)


SITE = {
    **{"SITE_RANK": "3", "SITE_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "node-1", "MASTER_PORT": "29501"},
}
ROW = "SITE = Launcher('site', markers=('SITE_RANK',), rank='SITE_RANK', world_size='SITE_SIZE')"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Returns a function that installs a package with an entry point for a launcher, for this process."""

    def install(module: str) -> None:
        (tmp_path / "site_launcher.py").write_text(f"from llmtrain.launch import Launcher\n{module}\n")
        info = tmp_path / "site_launcher-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-launcher\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[llmtrain.launchers]\nsite = site_launcher:SITE\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("site_launcher", None)


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (SITE, "site"),
        # It also sets the variables of torch.
        ({**SITE, **COMMON}, "site"),
        # Its processes are torchruns, which start the workers.
        ({**SITE, **TORCHRUN}, "torchrun"),
        # It runs within a Slurm job.
        ({**SITE, **OPEN_MPI}, "site"),
    ],
)
def test_a_launcher_of_an_installed_package_is_recognised(installed, env, launcher):
    installed(ROW)
    assert discover(env) == expected(launcher)
    assert discover({}) is None


@pytest.fixture
def recipe_of_site(tmp_path) -> str:
    """A recipe next to a module that describes the launcher of the site."""
    (tmp_path / "own_site.py").write_text(f"from llmtrain.launch import Launcher\n{ROW}\nOTHER = 'torchrun'\n")
    (tmp_path / "mine.yaml").write_text("extends: tiny\n")
    return str(tmp_path / "mine.yaml")


def _train(recipe: str, *options: str, **env: str) -> str:
    command = [sys.executable, "-m", "llmtrain", "train", recipe, *options]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_launcher_is_named_by_its_path(recipe_of_site):
    """The command refuses a dry run, because it knows that it is a worker."""
    told = _train(recipe_of_site, "--launched-by", "own_site:SITE", "--dry-run", **SITE)
    assert "--dry-run: starts its own workers, but site has started this process as a worker" in told
    unknown = _train(recipe_of_site, "--dry-run", **SITE)
    assert "RANK" in unknown
    assert "but site has started" not in unknown


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_site:SITE", "--launched-by: own_site:SITE has not started this process: no variable SITE_RANK is set"),
        ("own_site:OTHER", "own_site:OTHER is 'torchrun', but must be a llmtrain.launch.Launcher of another name"),
        ("own_site", "--launched-by: 'own_site' must have the form package.module:name"),
    ],
)
def test_a_path_that_leads_to_no_launcher_of_this_process_is_refused(recipe_of_site, path, message):
    assert message in _train(recipe_of_site, "--launched-by", path)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import nowhere", "site_launcher:SITE cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("SITE = 'RANK'", "site_launcher:SITE is 'RANK', but must be a llmtrain.launch.Launcher of another name"),
        ("SITE = Launcher('torchrun', markers=('SITE',))", "but must be a llmtrain.launch.Launcher of another name"),
    ],
)
def test_an_entry_point_without_a_launcher_is_refused(installed, module, message):
    installed(module)
    with pytest.raises(RecipeError) as error:
        discover(SITE)
    (problem,) = error.value.problems
    assert problem.field == "entry point site of site-launcher"
    assert message in problem.message


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        # accelerate's simple launcher, with --num_processes 2 on a CPU
        {"ACCELERATE_USE_CPU": "False", "ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"},
        {"RANK": ""},
        {**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'},
        {"TF_CONFIG": '{"cluster": {}, "task": {}}'},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_process_without_a_launcher_is_not_a_worker(env):
    assert discover(env) is None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"WORLD_SIZE": None}, ["WORLD_SIZE"]),
        ({"RANK": None}, ["RANK"]),
        ({"WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": "x"}, ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        ({"LOCAL_WORLD_SIZE": None}, ["LOCAL_WORLD_SIZE"]),
        ({"RANK": "4"}, ["RANK"]),
        ({"RANK": "-1"}, ["RANK"]),
        ({"RANK": "٣"}, ["RANK"]),
        ({"RANK": "1.0"}, ["RANK"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK"]),
        ({"RANK": "0"}, ["LOCAL_RANK"]),
        ({"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE"]),
    ],
)
def test_impossible_values_are_named(change, names):
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(RecipeError) as error:
        discover(env)
    assert [problem.field for problem in error.value.problems] == names
    assert {problem.rule for problem in error.value.problems} == {"launch.environment"}


@pytest.mark.parametrize(
    ("env", "name", "said"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_SIZE", "is not set, although OMPI_COMM_WORLD_RANK is"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE", "'two' is not a number"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK", "1 is not below"),
        ({"PMI_SIZE": "٣", "PMI_RANK": "0"}, "PMI_SIZE", "is not a number"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "MPI_LOCALNRANKS", "is not set, although PMI_SIZE, PMI_RANK is"),
        ({"MPI_LOCALRANKID": "1"}, "PMI_SIZE", "is not set, although MPI_LOCALRANKID is"),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS", "'x' is not a number"),
    ],
)
def test_parts_of_a_launchers_variables_do_not_make_a_process_of_its_own(env, name, said):
    """Each of several workers would train alone."""
    [(field, message, _)] = problems_of(env)
    assert field == name
    assert said in message


@pytest.mark.parametrize("name", sorted(HOROVODRUN.keys() - {"HOROVOD_RANK"}))
def test_variables_missing_from_horovodrun_are_named(name):
    with pytest.raises(RecipeError) as error:
        discover({key: value for key, value in HOROVODRUN.items() if key != name})
    assert name in [problem.field for problem in error.value.problems]


def test_local_rank_argument_must_agree():
    assert discover(DEEPSPEED, ["--local_rank=1", "--max-steps", "3"]) == expected("deepspeed")
    with pytest.raises(RecipeError, match="--local_rank=0"):
        discover(DEEPSPEED, ["--local_rank=0"])


def test_the_local_rank_argument_is_removed():
    assert without_local_rank(["--local_rank=1", "--set", "a=--local_rank=1"]) == ["--set", "a=--local_rank=1"]


def problems_of(env):
    with pytest.raises(RecipeError) as error:
        discover(env)
    return [(problem.field, problem.message, problem.fix) for problem in error.value.problems]


def test_stale_rank_variables_under_mpirun_are_refused():
    stale = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    fields = [field for field, _, _ in problems_of({**OPEN_MPI, **stale})]
    assert fields == ["RANK", "LOCAL_RANK", "WORLD_SIZE"]


def test_the_rendezvous_of_mpi_is_local_or_given():
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    told = {name: value for name, value in alone.items() if not name.startswith("MASTER")}
    rank = discover(told)
    assert rank.master_addr == "127.0.0.1"
    assert (
        rank.master_port
        == discover({**told, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).master_port
    )
    assert rank.master_port != discover({**told, "PMIX_NAMESPACE": "758841346"}).master_port
    [(field, _, fix)] = problems_of({**OPEN_MPI, "MASTER_ADDR": ""})
    assert field == "MASTER_ADDR"
    assert "mpirun -x MASTER_ADDR=HOST" in fix
    assert [field for field, _, _ in problems_of({**MPICH, "MASTER_ADDR": "", "MASTER_PORT": ""})] == [
        "MASTER_ADDR",
        "MASTER_PORT",
    ]


def mpirun(rank, head="tcp://192.0.2.1:39399", parent=0):
    """Of Open MPI 4.1 on two machines, where nobody said where to meet. parent: the daemon of this rank."""
    env = {name: value for name, value in OPEN_MPI.items() if not name.startswith("MASTER")}
    env |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2)}
    own = {0: f"55.0;{head}"}.get(parent, f"55.{parent};tcp://192.0.2.2:40000")
    return {**env, "OMPI_MCA_orte_hnp_uri": f"55.0;{head}", "OMPI_MCA_orte_local_daemon_uri": own}


def test_the_rendezvous_of_open_mpi_is_the_machine_of_mpirun():
    ranks = [discover(mpirun(rank, parent=rank // 2)) for rank in range(4)]
    assert {(rank.master_addr, rank.master_port) for rank in ranks} == {("192.0.2.1", ranks[0].master_port)}
    with_ipv6 = "tcp://192.0.2.1:39399;tcp6://[fd00::1]:55463"
    assert discover(mpirun(2, with_ipv6, parent=1)).master_addr == "192.0.2.1"


def test_open_mpi_requires_a_rendezvous_if_it_cannot_be_determined():
    [(field, message, fix)] = problems_of(mpirun(0, parent=1))
    assert field == "MASTER_ADDR"
    assert "rank 0 is not on the machine of mpirun" in message
    assert "mpirun -x MASTER_ADDR=HOST" in fix
    [(_, message, _)] = problems_of(mpirun(2, "tcp://192.0.2.1,172.17.0.1:39399", parent=1))
    assert "mpirun's machine has the addresses 192.0.2.1, 172.17.0.1" in message
    assert discover({**mpirun(0, parent=1), "MASTER_ADDR": "node-1"}).master_addr == "node-1"


def tf_config(kind="worker", index=1, **cluster):
    cluster = cluster or {"chief": ["a:2222"], "worker": ["a:2223", "b:2222", "b:2223"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("kind", "index", "numbers"),
    [("chief", 0, (0, 0)), ("worker", 0, (1, 1)), ("worker", 1, (2, 0)), ("worker", 2, (3, 1))],
)
def test_ranks_are_numbered_by_tf_config(kind, index, numbers):
    assert discover(tf_config(kind, index)) == Rank(*numbers, 4, 2, "a", 2222, "tf_config", nodes=2)


def test_ipv6_addresses_are_read():
    rank = discover(tf_config(index=1, worker=["[fd00::1]:2222", "[fd00::2]:2222"]))
    assert (rank.master_addr, rank.master_port, rank.local_rank) == ("fd00::1", 2222, 0)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TF_CONFIG": "{"}, "is not JSON"),
        ({"TF_CONFIG": "[1, 2]"}, "the required fields `cluster` and `task`"),
        (tf_config("evaluator", 0), "'evaluator', which does not train"),
        (tf_config("worker", 9), "says that this is worker 9, but there are only 3"),
        (tf_config("worker", 0, worker=["a:1", "b:2"], ps=["c:1"]), "tasks of the type ps"),
        (tf_config("worker", 0, worker=["a:1", "b"]), "names 'b', which is not host:port"),
        (tf_config("worker", 0, worker=["a:1", "b:99999"]), "not host:port"),
        (tf_config("worker", 1, worker=["a:1"]), "says that this is worker 1, but there are only 1"),
        (tf_config("worker", 1e400, worker=["a:1"]), "cannot convert float infinity to integer"),
        ({"TF_CONFIG": '{"cluster":' + "[" * 100_000}, "is nested too deeply"),
    ],
)
def test_an_impossible_description_is_refused(env, said):
    [(field, message, _)] = problems_of(env)
    assert field == "TF_CONFIG"
    assert said in message


def test_a_launcher_takes_precedence_over_tf_config():
    assert discover({**TORCHRUN, **tf_config()}).launcher == "torchrun"
