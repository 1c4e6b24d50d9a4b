"""A user error causes one clear message and the documented exit code; nothing is started or lost."""

from __future__ import annotations

import json
import socket
import sys
from importlib.util import find_spec

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.commands.launchers import SUPPORTED, option_name
from llmtrain.commands.train_request import TrainRequest
from llmtrain.errors import RecipeError
from tests.helpers.commands import forked_llmtrain, run

USAGE, DATA, CHECKPOINT = 2, 3, 4
ON_DISK = [
    *("--set", "parallel.zero_stage=3", "--set", "parallel.offload_optimizer=nvme"),
    *("--set", "parallel.nvme_path=/dev/null/states"),
]


def _refused(result, code: int, *words: str) -> str:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipes/tinny.py"], ["does not exist", "tiny.py"]),
        (["{recipe}:64gpu"], ["64gpu"]),
        (["{recipe}", "--set", "optim.lrr=1"], ["optim.lrr", "did you mean 'lr'"]),
        (["{recipe}", "--set", "paralel.zero_stage=1"], ["did you mean 'parallel'"]),
        (["{recipe}", "--set", "optim.lr=fast", "--set", "parallel.zero_stage=4"], ["optim.lr", "parallel.zero_stage"]),
        (["{recipe}", "--set", "optim.lr"], ["KEY=VALUE"]),
        (["{recipe}", "--set", "batch.global_batch_size=9"], ["9", "8", "10"]),
        (["{recipe}", "--set", "model.config.hiden_size=64"], ["hiden_size", "hidden_size"]),
        (["{recipe}", "--set", "parallel.precision=bf16"], ["precision.stage0"]),
        (["{recipe}", "--set", "parallel.offload_param=cpu"], ["parallel.offload_param"]),
        (["{recipe}", "--set", "parallel.precision=fp16"], ["fp16"]),
        (["{recipe}", "--nproc", "3", "--set", "parallel.tensor=3"], ["parallel.tensor", "heads"]),
        (["{recipe}", "--nproc", "2", "--set", "parallel.pipeline=2"], ["--set parallel.zero_stage=1"]),
        (["{recipe}", "--nproc", "2", "--set", "parallel.backend=data_parallel"], ["data_parallel.devices"]),
        (["{recipe}", "--set", "parallel.backend=horovod", "--set", "parallel.zero_stage=1"], ["backend.zero_stage"]),
        (["{recipe}", *ON_DISK], ["nvme.path", "/dev/null is not a folder"]),
        (["{recipe}", "--nproc", "0"], ["nproc"]),
        (["{recipe}", "--frobnicate"], ["frobnicate"]),
        (
            ["{recipe}", "--max-restarts", "2", "--dry-run"],
            ["--max-restarts: is not supported with --launcher local --dry-run"],
        ),
        (["{recipe}", "--max-restarts", "2", "--launcher", "slurm"], ["--slurm max_requeues=2"]),
        (["{recipe}", "--set", "watchdog.factor=-1"], ["watchdog.factor"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith(("{", "recipes")) else "",
)
def test_an_invalid_command_line_starts_nothing(arguments, words, small_recipe, tmp_path):
    filled = [argument.format(recipe=small_recipe) for argument in arguments]
    result = forked_llmtrain("train", *filled, "--run-dir", tmp_path / "run")
    _refused(result, USAGE, *words)
    assert not (tmp_path / "run").exists()


FEW = "localhost slots=1\n127.0.0.2 slots=2\n"


@pytest.mark.parametrize(
    ("hostfile", "arguments", "words"),
    [
        ("a slots=2\na slots=2\n", [], ["hosts:2", "names 'a' twice"]),
        ("a slots=2\nb gpus=2\n", [], ["hosts:2", "'b gpus=2' is not HOST slots=N"]),
        ("a slots=0\n", [], ["hosts:1", "'a' has no slots"]),
        ("# nothing\n\n", [], ["names no host"]),
        (
            FEW,
            ["--set", "parallel.zero_stage=1", "--set", "parallel.pipeline=2"],
            ["does not divide 3 × 1 = 3 devices"],
        ),
        (FEW, ["--include", "127.0.0.2:2"], ["'127.0.0.2' has 2 slots, and no device 2"]),
        (FEW, ["--runner", "mpich"], ["'mpich' is not one of 'pdsh', 'openmpi'"]),
        (
            FEW,
            ["--nproc", "2", "--nodes", "2"],
            ["--nproc: is not supported with --launcher", "--nodes: is not"],
        ),
    ],
)
def test_impossible_hosts_start_nothing(hostfile, arguments, words, small_recipe, tmp_path):
    (tmp_path / "hosts").write_text(hostfile)
    where = ("--launcher", "deepspeed", "--hostfile", tmp_path / "hosts", "--run-dir", tmp_path / "run")
    _refused(forked_llmtrain("train", small_recipe, *where, *arguments, COLUMNS="300"), USAGE, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--launcher", "torchrun", "--nodes", "2"], ["--nodes", "--launcher torchrun --dry-run"]),
        (
            ["--launcher", "accelerate", "--max-restarts", "2"],
            ["--max-restarts: is not supported"],
        ),
        (["--launcher", "accelerate", "--set", "parallel.backend=horovod"], ["horovod"]),
        (["--launcher", "kubernetes", "--dry-run"], ["--kubernetes image: is required", "--kubernetes pvc"]),
        (["--kubernetes", "image=x", "--slurm", "time=1"], ["--launcher kubernetes", "--launcher slurm"]),
        (["--runner", "openmpi"], ["--launcher deepspeed"]),
        (["--launcher", "deepspeed", "--nodes", "2"], ["--launcher slurm or"]),
        (
            ["--launcher", "slurm", "--hostfile", "H"],
            ["--hostfile: is not supported", "use --launcher deepspeed"],
        ),
    ],
    ids=" ".join,
)
def test_impossible_launcher_options_start_nothing(arguments, words, small_recipe, tmp_path):
    _refused(forked_llmtrain("train", small_recipe, *arguments, "--run-dir", tmp_path / "run"), USAGE, *words)
    assert not (tmp_path / "run").exists()


def test_each_option_that_a_launcher_may_lack_is_one_of_train():
    known = {option for parameter in get_command(app).commands["train"].params for option in parameter.opts}
    for field in SUPPORTED:
        assert field in TrainRequest.__dataclass_fields__
        assert option_name(field) in known


@pytest.mark.slow
def test_a_port_that_another_program_has_is_named(small_recipe, tmp_path):
    """Rank 0 of two, started by hand, cannot listen there."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        result = run(sys.executable, small_recipe, "--run-dir", tmp_path / "run", **rank, MASTER_PORT=port)
    _refused(result, USAGE, "MASTER_PORT", f"{port} is in use on this machine", "--master-port")


def test_a_worker_of_another_launcher_starts_nothing_again(small_recipe, tmp_path):
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = forked_llmtrain("train", small_recipe, "--max-restarts", "2", "--run-dir", tmp_path / "run", **torchrun)
    _refused(result, USAGE, "launch.restarts", "torchrun --max-restarts=2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_this_name\n", ["nothing_of_this_name", "line 1"]),
        ("def recipe(:\n", ["line 1"]),
        ("x = 1\n", ["recipe"]),
        ("def recipe():\n    return 3\n", ["int"]),
        (
            "from llmtrain import *\ndef recipe():\n    return OptimConfig(lr=-1, weight_decy=0.1)\n",
            ["optim.lr", "weight_decay"],
        ),
    ],
)
def test_a_broken_recipe_file_is_named_with_its_line(text, words, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(text)
    _refused(forked_llmtrain("train", file, "--run-dir", tmp_path / "run"), USAGE, *words)


def _with_source(recipe, name, tmp_path, *more: str):
    source = json.dumps([{"name": str(name)}])
    return forked_llmtrain("train", recipe, "--run-dir", tmp_path / "run", "--set", f"data.sources={source}", *more)


def test_an_empty_corpus_is_refused(small_recipe, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    _refused(_with_source(small_recipe, tmp_path / "empty.jsonl", tmp_path), DATA, "empty.jsonl")


def test_text_must_be_utf8(small_recipe, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    _refused(_with_source(small_recipe, tmp_path / "latin.txt", tmp_path), DATA, "latin.txt", "UTF-8")


def test_a_missing_column_is_refused(small_recipe, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"content": "a text"}\n' * 50)
    _refused(_with_source(small_recipe, tmp_path / "c.jsonl", tmp_path), DATA, "text", "content")


def test_a_corpus_that_does_not_exist(small_recipe, tmp_path):
    _refused(_with_source(small_recipe, tmp_path / "nothing.jsonl", tmp_path), DATA, "nothing.jsonl")


def test_a_corpus_shorter_than_one_batch_is_refused(small_recipe, tmp_path):
    with (tmp_path / "short.jsonl").open("w") as file:
        for number in range(40):
            file.write(json.dumps({"text": f"document {number} is short"}) + "\n")
    more = ["--set", "batch.global_batch_size=512", "--set", "batch.micro_batch_size=8"]
    said = _refused(_with_source(small_recipe, tmp_path / "short.jsonl", tmp_path, *more), DATA, "512")
    assert said.count("training sequences") == 1
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(small_recipe, tmp_path):
    result = forked_llmtrain(
        "train", small_recipe, "--run-dir", tmp_path / "run", "--set", "model.config.vocab_size=300"
    )
    _refused(result, USAGE, "300", "512")


def test_a_folder_that_is_not_a_checkpoint_is_refused(small_recipe, tmp_path):
    result = forked_llmtrain("train", small_recipe, "--run-dir", tmp_path / "run", "--resume", tmp_path)
    _refused(result, CHECKPOINT, "--resume")


@pytest.mark.parametrize("command", [["checkpoint", "list"], ["checkpoint", "verify"], ["export"]])
def test_a_folder_that_is_not_a_run_is_refused(command, tmp_path):
    out = [tmp_path / "out"] if command == ["export"] else []
    _refused(forked_llmtrain(*command, tmp_path, *out), CHECKPOINT, "is not a run directory")


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_tracker_is_refused(small_recipe, tmp_path):
    result = forked_llmtrain(
        "train", small_recipe, "--run-dir", tmp_path / "run", "--set", 'logging.trackers=["wandb"]'
    )
    _refused(result, USAGE, "llmtrain[wandb]")


def test_plan_refuses_in_json(small_recipe):
    result = forked_llmtrain("plan", small_recipe, "--json", "--set", "batch.global_batch_size=9")
    assert result.returncode == USAGE
    answer = json.loads(result.stdout)
    assert answer["legal"] is False
    assert {"rule", "field", "message", "fix"} == set(answer["problems"][0])
    assert answer["nearest"] == [*(f"--set batch.micro_batch_size={size}" for size in (3, 1, 9))]


PIPELINE = ("--set", "parallel.pipeline=2", "--set", "parallel.zero_stage=1")


@pytest.mark.parametrize(
    ("arguments", "rule", "nearest"),
    [
        (["--nproc", "4", *PIPELINE, "--set", "parallel.pipeline=4"], "pipeline.layers", "--set parallel.pipeline=2"),
        (["--nproc", "3", *PIPELINE], "layout.world", None),
        (
            ["--nproc", "2", *PIPELINE, "--set", "parallel.zero_stage=3"],
            "pipeline.zero_stage",
            "--set parallel.zero_stage=1",
        ),
        (["--nproc", "8", "--set", "parallel.tensor=8"], "layout.tensor_divides", "--set parallel.tensor=1"),
        (["--nproc", "5", "--set", "parallel.sequence=5"], "layout.sequence_divides", None),
        (["--set", "parallel.precision=bf16"], "precision.stage0", "--set parallel.zero_stage=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_ends_with_the_nearest_legal_plans(arguments, rule, nearest, small_recipe, tmp_path):
    result = forked_llmtrain("train", small_recipe, *arguments, "--run-dir", tmp_path / "run")
    _, _, plans = _refused(result, USAGE, f"[{rule}]").partition("nearest legal plans")
    assert bool(plans) == bool(nearest)
    assert nearest is None or nearest in plans
    assert not (tmp_path / "run").exists()


@pytest.mark.breadth
def test_a_family_that_cannot_be_split_starts_nothing(small_recipe, tmp_path):
    """Found by comparing a tiny copy, before the data is prepared and a worker started."""
    config = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = ("--set", "model.architecture=zaya", "--set", f"model.config={json.dumps(config)}")
    result = forked_llmtrain("train", small_recipe, "--nproc", "2", *PIPELINE, *model, "--run-dir", tmp_path / "run")
    said = _refused(result, USAGE, "zaya", "[pipeline.family]", "nearest legal plans")
    assert said.endswith("    --set parallel.pipeline=1\n")
    assert not (tmp_path / "run").exists()


def test_json_contains_the_stages(small_recipe):
    answer = json.loads(forked_llmtrain("plan", small_recipe, "--gpus-per-node", "2", *PIPELINE, "--json").stdout)
    stages = answer["layout"]["stages"]
    assert [stage["layers"] for stage in stages] == [[0, 0], [1, 1]]
    assert sum(stage["cost_share"] for stage in stages) == pytest.approx(1)


def test_plan_in_json_has_the_documented_fields(small_recipe):
    answer = json.loads(forked_llmtrain("plan", small_recipe, "--json").stdout)
    assert answer["legal"] is True
    assert answer["layout"] == {"dp": 1, "pp": 1, "tp": 1, "sp": 1, "ep": 1, "zero_stage": 0}
    assert answer["batch"]["gradient_accumulation_steps"] == 4
    assert answer["ds_config"]["gradient_clipping"] == 0.5


def test_json_contains_the_time_of_a_plan(small_recipe):
    told = json.loads(forked_llmtrain("plan", small_recipe, "--json", "--device", "h100").stdout)["time"]
    assert {"compute_s", "communication_s", "bubble", "update_s", "step_s", "tokens_per_second", "mfu"} <= set(told)
    assert (
        json.loads(forked_llmtrain("plan", small_recipe, "--json").stdout)["time"] is None
    )  # a CPU, of which nothing is known


def test_search_prints_the_same_plans_as_text_and_as_json(small_recipe, tmp_path):
    node = ("plan", small_recipe, "--device", "h100", "--gpus-per-node", "4", "--search")
    told = json.loads(forked_llmtrain(*node, "--json").stdout)
    first = told["best"][0]
    assert first["set"] in forked_llmtrain(*node).stdout
    pasted = json.loads(forked_llmtrain(*node[:-1], *first["set"].split(), "--json").stdout)
    assert pasted["time"] == first["time"]
    _refused(forked_llmtrain(*node, "--write", tmp_path), USAGE, "--write", "[search.write]")
    _refused(forked_llmtrain("plan", small_recipe, "--search"), USAGE, "the datasheet of cpu lacks", "[search.device]")


def test_write_leaves_a_picture_of_the_pipeline(small_recipe, tmp_path):
    assert forked_llmtrain("plan", small_recipe, "--gpus-per-node", "2", *PIPELINE, "--write", tmp_path).returncode == 0
    assert "1F1B, 2 stages" in (tmp_path / "schedule.svg").read_text()
    assert forked_llmtrain("plan", small_recipe, "--write", tmp_path / "whole").returncode == 0
    assert not (tmp_path / "whole/schedule.svg").exists()


def test_plan_without_deepspeed_has_no_configuration_of_it(small_recipe):
    answer = json.loads(forked_llmtrain("plan", small_recipe, "--json", "--set", "parallel.backend=accelerate").stdout)
    assert (answer["legal"], answer["backend"], answer["strategy"]) == (True, "accelerate", "ddp")
    assert answer["ds_config"] is None


def test_a_page_of_data_that_cannot_be_written_is_named_with_its_option(monkeypatch, tmp_path):
    for name in ("prepare", "report", "preview.first_sequences", "preview.render_html"):
        monkeypatch.setattr(f"llmtrain.data.{name}", lambda *_: "")
    result = CliRunner().invoke(app, ["data", "recipes/tiny.py", "--html", str(tmp_path)])
    assert isinstance(result.exception, RecipeError)
    assert str(result.exception.problems[0]).startswith(f"--html: cannot write {tmp_path}: Is a directory [data.html]")
