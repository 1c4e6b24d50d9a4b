"""Applies docs/extending.md to a copy of the package, and runs the result."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
EDIT = re.compile(
    r"(?:In `(?P<file>[^`]+)`, (?P<how>after|before|replacing) `(?P<anchor>[^\n]+?)`|New file `(?P<new>[^`]+)`):\n\n"
    r"```(?:python|text)\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)

PROGRAM = """
import sys
import torch
from tests.helpers.batches import GLOBAL_BATCH, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import assert_same, engine_of, plan_of, reference_of, trace

STEPS = 3
ROWS = tiny_recipe(**{"batch.micro_batch_size": 2, "optim.name": "sgd", "optim.lr": 0.1, "parallel.rows": 2})
NESTEROV = ROWS.with_(**{"parallel.rows": 1, "parallel.zero_stage": 1, "optim.name": "nesterov:Nesterov"})
NESTEROV = NESTEROV.with_(code_dir=sys.path[0])


def train(rank, recipes):
    found = []
    for recipe in recipes:
        plan = plan_of(recipe, 2)
        engine, batch = engine_of(plan), plan.batch
        own = (engine.data_parallel_rank, plan.data_parallel_size)
        found.append(trace(engine, range(STEPS), batch.micro_batch_size, batch.gradient_accumulation_steps, *own))
    return found


if __name__ == "__main__":
    assert plan_of(ROWS, 2).layout()["rp"] == 2
    recipes = [ROWS, ROWS.with_(**{"parallel.zero_stage": 2}), NESTEROV]
    alone = [recipe.with_(**{"parallel.rows": 1}) for recipe in recipes]
    expected = [trace(reference_of(recipe), range(STEPS), 1, GLOBAL_BATCH) for recipe in alone]
    for runs in run_ranks(2, train, recipes):
        for run, other, recipe in zip(runs, expected, recipes, strict=True):
            assert_same(run, other, recipe.optim.name)
    print("trained")
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the package with all that the page adds."""
    folder = tmp_path_factory.mktemp("extended")
    for part in ("llmtrain", "packages/lint"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    edits = list(EDIT.finditer(PAGE))
    assert len(edits) == len(re.findall("```[a-z]", PAGE))
    for edit in edits:
        if edit["new"]:
            (folder / edit["new"]).parent.mkdir(exist_ok=True)
            (folder / edit["new"]).write_text(edit["code"], encoding="utf-8")
            continue
        path, anchor, code = folder / edit["file"], edit["anchor"], edit["code"]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        [at] = [
            number for number, line in enumerate(lines) if line.startswith(anchor) or line.strip() == anchor.strip()
        ]
        first, after = {"after": (at + 1, at + 1), "before": (at, at), "replacing": (at, at + 1)}[edit["how"]]
        path.write_text("".join([*lines[:first], code, *lines[after:]]), encoding="utf-8")
    return folder


def run(extended: Path, *command: str, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (extended, extended / "packages/lint", ROOT)))}
    command = (sys.executable, *command)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=extended, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_an_added_axis_and_optimizer_train_as_the_plain_loop(extended):
    program = extended / "program.py"
    program.write_text(PROGRAM)
    assert "trained" in run(extended, str(program))


def train_two_steps(extended: Path, tmp_path: Path, corpus: Path, **own) -> tuple[str, list[dict]]:
    """Trains `my_recipe.py` with other fields on two ranks; returns what is printed, and the metrics."""
    shutil.copy(ROOT / "recipes/tiny.py", extended)
    fields = {
        "data.sources": [{"name": str(corpus)}],
        "data.cache_dir": str(tmp_path / "cache"),
        "data.tokenizer": {"vocab_size": 300},
        "data.sequence_length": 64,
        "logging.trackers": [],
        "logging.every_steps": 1,
        "evaluation.every_steps": 2,
        "evaluation.max_sequences": 16,
        "batch.global_batch_size": 8,
        "batch.micro_batch_size": 2,
        **own,
    }
    changes = [part for name, value in fields.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    command = ("-m", "llmtrain", "train", "my_recipe.py", "--nproc", "2", "--run-dir", str(tmp_path / "run"))
    printed = run(extended, *command, "--max-steps", "2", *changes)
    return printed, [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_loss_of_ones_own_trains_and_is_evaluated(extended, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(20000)))
    printed, (*steps, last) = train_two_steps(extended, tmp_path, corpus)
    assert "loss     my_losses:smoothed, a mean over each token" in printed
    assert all(0 <= line["accuracy"] <= 1 for line in (*steps, last))
    assert last["step"] == 2
    assert last["eval_loss"] > 0
    assert "perplexity" not in last
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert set(plan["code"]["files"]) == {"my_losses.py"}
    hidden = json.dumps({"name": "my_hidden:targets_only", "hidden_states": True})
    printed = run(extended, "-m", "llmtrain", "plan", "my_recipe.py", "--set", f"objective={hidden}")
    assert "loss     my_hidden:targets_only, a mean over each token" in printed


@pytest.mark.slow
def test_a_loss_of_ones_own_is_given_a_column_of_the_data(extended, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"text": f"{number} bottles of beer on the wall", "weight": 1024} for number in range(20000)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"objective.name": "weighted_losses:weighted", "objective.columns": ["weight"], "objective.options": {}}
    (first, *_) = train_two_steps(extended, tmp_path, corpus, **own)[1]
    assert first["loss"] / 1024 == pytest.approx(math.log(300), rel=0.1)


def test_an_axis_is_searched_and_its_rule_refuses(extended):
    sizes = ("--set", "batch.micro_batch_size=3", "--set", "batch.global_batch_size=768", "--set", "parallel.rows=2")
    refused = run(extended, "-m", "llmtrain", "plan", str(ROOT / "recipes/llama_1b.py"), *sizes, code=2)
    assert "does not divide a micro-batch of 3" in refused
    found = "from llmtrain.plan.search.variants import degrees; print([split for split in degrees(8)])"
    assert "'parallel.rows': 8" in run(extended, "-c", found)


METRICS = """
import sys
from pathlib import Path
from llmtrain.recipe.cluster import Cluster
from llmtrain.train.callbacks import Callbacks
from llmtrain.train.metrics import MetricsLogger, StepMetrics, Window
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import resolve
from llmtrain.run_dir import RunDir

own = ['logging.trackers=["csv_tracker:CsvTracker"]', 'callbacks=["data_wait:DataWaitShare"]']
recipe, _ = load_recipe(sys.argv[1], [*own, f"code_dir={Path.cwd()}"])
folder = Path(sys.argv[2])
with MetricsLogger(RunDir(folder), resolve(recipe, Cluster())) as logger:
    window = Window(steps=10, seconds=5.0, tokens=10240, data_wait_s=0.5)
    record = logger.step_record(StepMetrics(10, 2.0, 1.0, 1e-3, 10240, 80, window, None))
    logger.log(record | Callbacks(recipe, folder).call("on_step_end", 10, record).metrics)
print((folder / "metrics.csv").read_text())
"""
LAUNCHED = """
from llmtrain.launch import discover
worker = {"LAUNCH_RANK": "1", "LAUNCH_LOCAL_RANK": "1", "LAUNCH_SIZE": "2", "LAUNCH_LOCAL_SIZE": "2"}
print(discover({**worker, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}))
"""


def test_a_schedule_is_accepted(extended):
    recipe = (str(ROOT / "recipes/tiny.py"), "--set", f"code_dir={extended}", "--set", "optim.warmup_steps=0")
    run(extended, "-m", "llmtrain", "plan", *recipe, "--set", "optim.schedule=my_schedules:warm_restarts")
    misspelt = run(
        extended, "-m", "llmtrain", "plan", *recipe, "--set", "optim.schedule=my_schedules:warm_restart", code=2
    )
    assert "did you mean 'warm_restarts'" in misspelt


def test_a_tracker_gets_a_metric(extended, tmp_path):
    logged = run(extended, "-c", METRICS, str(ROOT / "recipes/tiny.py"), str(tmp_path))
    assert "data_wait_share,0.1\n" in logged


def test_a_launcher_gives_workers_their_places(extended):
    """The folder is installed as pip would, without its hashes."""
    package = extended / "site_launcher"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    ((group, entries),) = project["entry-points"].items()
    info = package / "site_launcher-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    program = f"import sys; sys.path.insert(0, {str(package)!r})\n{LAUNCHED}"
    assert "rank=1, local_rank=1, world_size=2, local_world_size=2" in run(extended, "-c", program)


READ = """
import sys
from pathlib import Path
from llmtrain.data.cache import Cache
from llmtrain.data.progress import Progress
from llmtrain.data.sources.corpus import open_corpora
from llmtrain.recipe import Source

source, cache = Source(sys.argv[1] + "/*.md", reader="paragraphs:read"), Cache(Path(sys.argv[1]), Progress())
(corpus,) = open_corpora([source], cache, code_dir=sys.argv[2])
print([document.text for document in corpus.documents()])
"""


def test_a_reader_of_ones_own_reads_a_format(extended, tmp_path):
    (tmp_path / "a.md").write_text("one\n\ntwo\n")
    assert "['one', 'two\\n']" in run(extended, "-c", READ, str(tmp_path), str(extended))


def test_an_added_lint_rule_works(extended, tmp_path):
    config = tmp_path / "odd.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 3}')
    assert "lint.batch_odd" in run(extended, "-m", "llmtrain", "lint", str(config))
