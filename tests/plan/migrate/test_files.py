"""Files of other programs are read without running anything, and a mistake in them is named with its line."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import zipfile
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.errors import RecipeError
from llmtrain.plan.load import load_recipe
from llmtrain.plan.migrate.files import read_foreign
from llmtrain.plan.migrate.programs import translate

ARGS = {"per_device_train_batch_size": 2, "learning_rate": 1e-4, "model_name_or_path": "x/y"}


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def refusal(*paths: Path, **options) -> str:
    with pytest.raises(RecipeError) as error:
        translate(paths, **options).check()
    return str(error.value)


def pickled(path: Path, content: object) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    return path


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.made_by = function, arguments

    def __reduce__(self):
        return self.made_by


@pytest.mark.parametrize("function", [os.system, eval, subprocess.check_call, os.mkdir, getattr])
def test_nothing_in_a_pickle_runs(function, tmp_path):
    mark = tmp_path / "ran"
    arguments = (os, "system") if function is getattr else (str(mark),)
    if function is getattr:
        arguments = (Path, "touch")
    text = refusal(pickled(tmp_path / "training_args.bin", Runs(function, *arguments)))
    assert "cannot be read: names" in text
    assert function.__name__ in text
    assert not mark.exists()


@pytest.mark.parametrize("content", [{"a": 1}, [1], "text", None])
def test_a_pickle_of_something_else_is_refused(content, tmp_path):
    assert "contains no object with arguments" in refusal(pickled(tmp_path / "args.bin", content))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_what_is_no_archive_is_refused(content, tmp_path):
    (tmp_path / "args.bin").write_bytes(content)
    assert "cannot be read" in refusal(tmp_path / "args.bin")


@pytest.mark.slow
def test_training_args_are_read(tmp_path):
    import torch
    from transformers import TrainingArguments
    from trl import SFTConfig

    shared = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "lr_scheduler_type": "cosine"}
    torch.save(TrainingArguments(**shared, learning_rate=3e-4, max_steps=7), tmp_path / "training_args.bin")
    torch.save(SFTConfig(**shared, packing=True, report_to="wandb"), tmp_path / "sft.bin")
    first = translate([tmp_path / "training_args.bin"], 1)
    assert (first.fields["optim.lr"], first.fields["train.max_steps"], first.fields["name"]) == (3e-4, 7, "out")
    assert first.fields["optim.schedule"] == "cosine"
    second = translate([tmp_path / "sft.bin"], 1)
    assert (second.program, second.fields["data.packing"]) == ("TRL's SFT", "best_fit")
    assert [str(line) for one in (first, second) for line in one.of("unsupported")] == []


def test_variables_of_a_shell_are_named(tmp_path):
    script = written(
        tmp_path,
        "run.sh",
        'LR=1e-4\nD=$(date)\npython sft.py --learning_rate $LR \\\n --dataset_name "${DATA}/a" --x `pwd`\n',
    )
    text = refusal(script)
    assert "run.sh:3: ${DATA} is set outside of the file" in text
    assert "`pwd`" in text
    assert "$LR" not in text


def test_a_script_is_never_run(tmp_path):
    mark = tmp_path / "ran"
    text = (
        f"open({str(mark)!r}, 'w')\nLR = 1e-4\nLR2 = 2 * LR\n"
        "args = TrainingArguments('out', learning_rate=LR, weight_decay=LR2, warmup_steps=len('ab'), **more)\n"
    )
    translation = translate([written(tmp_path, "train.py", text)], 1)
    assert not mark.exists()
    assert translation.fields["optim.lr"] == 1e-4
    left = {line.key: line.text for line in translation.of("missing")}
    assert "line 4: LR2" in left["weight_decay"]
    assert "line 4: len('ab')" in left["warmup_steps"]
    assert "line 4: more" in left["TrainingArguments(**…)"]
    assert translation.comments["optim.weight_decay"].startswith("FILL IN")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("args.json", '{"learning_rate": 1e-4,', "args.json:1:24: is not JSON"),
        (
            "args.json",
            '{"num_train_epochs": 1, "num_train_epochs": 2}',
            "args.json:1: num_train_epochs: is given twice",
        ),
        ("args.yaml", "max_steps: 1\nseed: 1\nmax_steps: 2\n", "args.yaml:1: max_steps: is given twice"),
        ("args.yaml", "a: &x 1\nb: *x\n", "args.yaml:2:4: uses YAML aliases"),
        ("args.yaml", "- 1\n", "contains no settings"),
        ("args.yaml", "!!python/object:os.system {}\n", "uses the YAML tag"),
        ("args.toml", "a = \n", "is not TOML"),
        ("train.py", "def (\n", "train.py:1: is not Python"),
        ("train.py", "x = 1\n", "constructs none of"),
        ("run.sh", "ls\n", "has no command that starts training"),
        ("run.sh", "python a.py --b 1\npython c.py\n", "starts 2 scripts"),
        ("run.sh", "python a.py 'b\n", "run.sh:1: cannot be read"),
        ("args.json", '{"favourite": 1}', "is for no program that is known here; it has favourite"),
        ("grpo.sh", "trl grpo --learning_rate 1e-6 --num_generations 8\n", "trains on texts that the model generates"),
        ("x.yaml", "beta: 0.1\nlearning_rate: 1.0e-4\n", "--from trl-dpo or --from trl-kto or --from trl-orpo"),
    ],
)
def test_a_mistake_is_named(name, text, said, tmp_path, monkeypatch):
    folder = tmp_path / "somewhere"
    folder.mkdir()
    assert said in refusal(written(folder, name, text))


def test_a_wrong_value_is_named_with_its_line(tmp_path):
    text = "per_device_train_batch_size: 2\nlearning_rate: fast\nnum_train_epochs: -1\n"
    said = refusal(written(tmp_path, "args.yaml", text))
    assert "args.yaml:2: learning_rate (the Trainer → optim.lr): 'fast' is invalid" in said
    assert "args.yaml:3: num_train_epochs" in said
    said = refusal(written(tmp_path, "micro.yaml", text.replace("size: 2", "size: -2")))
    assert "micro.yaml:1: per_device_train_batch_size (the Trainer → batch.micro_batch_size): -2 is invalid" in said
    assert "batch.global_batch_size" not in said
    said = refusal(written(tmp_path, "steps.yaml", f"{text}gradient_accumulation_steps: -3\n"))
    assert "steps.yaml:4: gradient_accumulation_steps (the Trainer → batch.global_batch_size): -3 is invalid" in said


def test_files_of_one_run_are_joined_in_any_order(tmp_path):
    args = written(tmp_path, "args.json", json.dumps(ARGS))
    ds = written(tmp_path, "ds.json", json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}))
    for paths in ((args, ds), (ds, args)):
        assert translate(paths, 1).fields["parallel.zero_stage"] == 2
    assert "translate one run at a time" in refusal(args, written(tmp_path, "two.json", json.dumps(ARGS)))


def test_a_file_that_is_named_and_missing_is_left_to_fill_in(tmp_path):
    args = written(tmp_path, "args.json", json.dumps(ARGS | {"deepspeed": "ds.json"}))
    assert "deepspeed" in {line.key for line in translate([args], 1).of("missing")}


def test_the_devices_follow_from_the_files(tmp_path):
    run = "torchrun --nproc_per_node 4 --nnodes=2 run_clm.py --per_device_train_batch_size 2 --max_steps 5\n"
    file = written(tmp_path, "run.sh", run)
    assert translate([file]).fields["batch.global_batch_size"] == 16
    assert translate([file], 3).fields["batch.global_batch_size"] == 6
    written(tmp_path, "acc.yaml", "distributed_type: MULTI_GPU\nnum_processes: 5\n")
    named = "accelerate launch --config_file acc.yaml run_clm.py --per_device_train_batch_size 2 --max_steps 5\n"
    assert translate([written(tmp_path, "run.sh", named)]).fields["batch.global_batch_size"] == 10
    named = "deepspeed --include localhost:0,1,3 run_clm.py --per_device_train_batch_size 2 --max_steps 5\n"
    assert translate([written(tmp_path, "run.sh", named)]).fields["batch.global_batch_size"] == 6
    alone = translate([written(tmp_path, "args.json", json.dumps(ARGS))])
    assert "--devices" in {line.key for line in alone.of("missing")}


def test_words_of_yaml_are_read_as_these_programs_do(tmp_path):
    text = "bf16: yes\nfp16: off\nlearning_rate: 2e-5\nname: 'no'\n"
    values = read_foreign(written(tmp_path, "a.yaml", text)).values
    assert values == {"bf16": True, "fp16": False, "learning_rate": 2e-5, "name": "no"}


def test_the_command(tmp_path, monkeypatch, capsys):
    args = written(tmp_path, "args.json", json.dumps(ARGS | {"max_steps": 3, "nonsense": 1}))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["import", str(args), *arguments])
        return (int(ended.value.code or 0), *capsys.readouterr())

    code, out, err = run()
    assert code == 0
    assert "pretrained: x/y" in out
    assert "not supported (1)\n  nonsense: 1: is no setting" in err
    code, out, err = run("--out", "mine.py", "--devices", "2")
    assert (code, err) == (0, "")
    assert "wrote mine.py" in out
    recipe, _ = load_recipe("mine.py", [])
    assert recipe.batch.global_batch_size == 4
    code, out, err = run("--out", "mine.py")
    assert (code, err.splitlines()[0]) == (2, "error: mine.py: exists [import.out]")
    code, out, err = run("--json")
    document = json.loads(out)
    assert document["recipe"]["train"] == {"max_steps": 3, "seed": 42}
    assert {"unsupported"} == {line["kind"] for line in document["lines"] if line["key"] == "nonsense"}
    code, out, err = run("--from", "axolotle", "--json")
    assert json.loads(out)["problems"][0]["rule"] == "import.program"
