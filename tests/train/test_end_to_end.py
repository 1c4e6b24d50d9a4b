"""The same recipe file under every launcher of one machine trains the same run."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import events, forked_llmtrain, llmtrain, losses, run
from tests.helpers.launching_doc import commands

BIN = Path(sys.executable).parent
OURS, *OTHERS = commands("Launching", "recipes/tiny.py", " 2")[:7]
"""As documented, of one machine."""


SAMPLES = ("--set=samples.every_steps=8", '--set=samples.prompts=["def ", "import os\\n"]', "--set=samples.tokens=9")


@pytest.fixture(scope="module")
def one_worker(small_recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run_dir = folder / "a [red] run"  # no markup
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *SAMPLES)
    assert result.returncode == 0, result.stderr
    return run_dir, result


@pytest.fixture(scope="module")
def two_workers(small_recipe, tmp_path_factory):
    return _launch(OURS, small_recipe, tmp_path_factory.mktemp("two") / "run")


def _launch(line: str, recipe: Path, run_dir: Path):
    """Runs a documented command for another recipe."""
    program, *arguments = line.replace("recipes/tiny.py", str(recipe)).split()
    result = run(BIN / program, *arguments, "--run-dir", run_dir)
    assert result.returncode == 0, result.stderr + result.stdout
    return run_dir, result


def test_one_worker_trains_and_leaves_a_run_directory(one_worker):
    run_dir, result = one_worker
    present = {path.name for path in run_dir.iterdir()}
    assert present >= {
        *("recipe.json", "plan.json", "ds_config.json", "launch.json", "environment.json", "metrics.jsonl"),
        *("checkpoints", "logs", "export", "tokenizer"),
    }
    first, last = losses(run_dir)[0], losses(run_dir)[-2]
    assert last[0] == 12
    assert last[1] < first[1]
    assert "unigram" in result.stdout
    assert f"run directory {run_dir}\n" in result.stdout
    assert f"exported {run_dir / 'export'}\n" in result.stdout
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [(one["step"], one["prompt"]) for one in samples] == [
        (step, prompt) for step in (8, 12) for prompt in ("def ", "import os\n")
    ]
    assert all(one["text"] for one in samples)
    assert "sample after step 12" in result.stdout
    # The chatter of the libraries is in the log and nowhere else.
    assert "deepspeed" in (run_dir / "logs" / "rank_0.log").read_text().lower()
    assert "WARNING" not in result.stdout + result.stderr
    assert result.stderr == ""
    assert [(one["event"], one["step"]) for one in events(run_dir)] == [("started", 0), ("finished", 12)]
    assert "finished at step 12 of 12" in (run_dir / "report.html").read_text()


def test_two_workers_train_the_same_as_one(one_worker, two_workers):
    for ours, theirs in zip(losses(two_workers[0]), losses(one_worker[0]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_every_launcher_is_documented():
    assert OURS.startswith("llmtrain train")
    assert [line.split()[0] for line in OTHERS] == [
        *("python", "torchrun", "deepspeed", "accelerate"),
        *["llmtrain"] * 2,
    ]


@pytest.mark.breadth
@pytest.mark.parametrize("line", OTHERS)
def test_every_launcher_trains_the_same_losses(line, small_recipe, two_workers, tmp_path):
    run_dir, _ = _launch(line, small_recipe, tmp_path / "run")
    assert losses(run_dir) == losses(two_workers[0])
    assert (run_dir / "logs" / "rank_1.log").is_file()


@pytest.mark.slow
def test_accelerate_trains_with_the_configuration_of_the_plan(small_recipe, two_workers, tmp_path):
    """By the documented line."""
    [line] = commands("Launching", "llmtrain plan", "accelerate launch")
    line = line.replace("recipes/tiny.py", str(small_recipe)).replace("--write tiny", f"--write {tmp_path}")
    line = line.replace("tiny/accelerate.yaml", f"{tmp_path}/accelerate.yaml")
    result = run("sh", "-ec", f"{line} --run-dir {tmp_path}/run", PATH=f"{BIN}:{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr + result.stdout
    assert losses(tmp_path / "run") == losses(two_workers[0])


@pytest.mark.breadth
def test_accelerate_trains_with_a_configuration_that_starts_one_process_of_two(small_recipe, two_workers, tmp_path):
    configuration = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"
    (tmp_path / "accelerate.yaml").write_text(configuration)
    _trains_alike(tmp_path / "accelerate.yaml", small_recipe, two_workers, tmp_path / "run")


def _trains_alike(configuration: Path, recipe: Path, two_workers, run_dir: Path) -> None:
    """`accelerate launch` with a configuration trains on two workers."""
    result = run(BIN / "accelerate", "launch", "--config_file", configuration, recipe, "--run-dir", run_dir)
    assert result.returncode == 0, result.stderr + result.stdout
    assert losses(run_dir) == losses(two_workers[0])


def test_the_exported_model_has_the_evaluation_loss_of_the_run(one_worker, small_recipe):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llmtrain.data import BatchLoader, prepare
    from llmtrain.engines.plain import PlainLoop
    from llmtrain.plan.load import load_recipe

    run_dir, _ = one_worker
    recipe, _ = load_recipe(str(small_recipe), [])
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    assert tokenizer.decode(tokenizer("def f(x):\n\treturn 1")["input_ids"]) == "def f(x):\n\treturn 1"
    engine = PlainLoop(model.to(torch.float32), recipe)
    sizes = {"global_batch_size": 8, "micro_batch_size": 8, "gradient_accumulation_steps": 1}
    data = BatchLoader(prepare(recipe), seed=1, dp_rank=0, dp_size=1, **sizes)
    batches = list(data.eval_batches(10))
    targets = sum(batch.target_tokens for batch in batches)
    loss = sum(engine.eval_step(batch).item() * batch.target_tokens for batch in batches) / targets
    assert loss == pytest.approx(losses(run_dir)[-1][-1], rel=1e-5)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_generate_continues_a_prompt(one_worker):
    run_dir, _ = one_worker
    result = forked_llmtrain("generate", run_dir, "--prompt", "import ", "--tokens", 8)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("import ")
    assert len(result.stdout) > len("import \n")


def test_a_finished_run_is_not_trained_again(one_worker, small_recipe):
    run_dir, _ = one_worker
    before = losses(run_dir)
    result = forked_llmtrain("train", small_recipe, "--run-dir", run_dir)
    assert result.returncode == 0, result.stderr
    assert "is finished: 12 steps" in result.stdout
    assert losses(run_dir) == before


@pytest.mark.slow
def test_a_missing_export_is_made(one_worker, small_recipe):
    run_dir, _ = one_worker
    weights = (run_dir / "export" / "model.safetensors").read_bytes()
    shutil.rmtree(run_dir / "export")
    before = losses(run_dir)
    result = llmtrain("train", small_recipe, "--run-dir", run_dir)
    assert result.returncode == 0, result.stderr
    assert (run_dir / "export" / "model.safetensors").read_bytes() == weights
    assert losses(run_dir) == before
