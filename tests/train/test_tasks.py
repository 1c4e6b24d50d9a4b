"""Downstream tasks are scored during a run, on its checkpoints and at its end."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.cli import app
from llmtrain.errors import CheckpointError, RecipeError, UserError
from llmtrain.models import build_model
from llmtrain.run_dir import RunDir, write_json
from llmtrain.train import tasks
from llmtrain.train.tasks import BackgroundScoring, Score, ScoringError, score_table, scores
from tests.helpers.batches import VOCAB, tiny_recipe
from tests.helpers.commands import llmtrain
from tests.helpers.word_tokenizer import write_word_tokenizer

RESULTS = {
    "arc": {"acc,none": 0.25, "acc_stderr,none": 0.05, "acc_norm,none": 0.5, "acc_norm_stderr,none": "N/A"},
    "gsm": {"exact_match,strict": 0.125, "perplexity,none": None},
}


def test_the_numbers_among_results_are_scores():
    assert scores(RESULTS) == [
        Score("arc", "acc", 0.25, 0.05),
        Score("arc", "acc_norm", 0.5, None),
        Score("gsm", "exact_match (strict)", 0.125, None),
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(score_table(RESULTS, 1200))
    shown = console.file.getvalue()
    assert "after step 1,200" in shown
    assert "0.1250" in shown


@pytest.fixture
def background(tmp_path, monkeypatch):
    """Scores every tenth step of a run that continues after step 10; `begun` are the processes by their step."""
    run, begun = RunDir(tmp_path), {}

    def begin(run, step):
        begun[step] = SimpleNamespace(returncode=None, poll=lambda: begun[step].returncode)
        return begun[step]

    monkeypatch.setattr(tasks, "_start", begin)
    return SimpleNamespace(run=run, scoring=BackgroundScoring(run, 10, 10), begun=begun)


def end(background, step: int, code: int = 0) -> None:
    if code == 0:
        background.run.eval_file(step).parent.mkdir(exist_ok=True)
        write_json(background.run.eval_file(step), {"results": RESULTS})
    background.begun[step].returncode = code


def save(background, step: int) -> None:
    (background.run.checkpoints / f"step_{step:08d}").mkdir(parents=True)


def test_only_the_newest_complete_checkpoint_is_scored_at_a_time(background):
    save(background, 10)
    assert background.scoring.poll(19) is None  # that of the step from which the run continues
    assert background.scoring.poll(20) is None  # it is not written yet
    assert not background.begun
    save(background, 20)
    assert background.scoring.poll(21) is None
    save(background, 30)
    save(background, 40)
    assert background.scoring.poll(42) is None
    assert list(background.begun) == [20]
    end(background, 20)
    assert background.scoring.poll(43) == RESULTS
    assert background.scoring.poll(44) is None
    assert list(background.begun) == [20, 40]


def test_scores_that_were_not_computed_are_reported_and_the_next_ones_follow(background):
    save(background, 20)
    background.scoring.poll(20)
    end(background, 20, code=4)
    with pytest.raises(ScoringError, match=r"step 20 has no scores: the process ended with code 4, see .*eval\.log"):
        background.scoring.poll(21)
    save(background, 30)
    background.scoring.poll(30)
    background.begun[30].returncode = 0  # without having written anything
    with pytest.raises(ScoringError, match="step_00000030"):
        background.scoring.poll(31)


def test_folders_without_a_run_and_a_missing_harness_are_refused(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"has no recipe\.json"):
        app(["eval", str(tmp_path)], standalone_mode=False)
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'llmtrain\[eval\]'"):
        tasks.check_harness()


QUESTIONS = [
    ("import", [" os", " banana"]),
    ("def", [" f", ":"]),
    ("for i in", [" range", " class"]),
    ("retu", ["rn", "q"]),
]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"text": text, "choices": choices, "answer": 0}) for text, choices in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    (folder / "which_word.yaml").write_text(
        f"""
task: which_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "questions.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    return folder


MISTAKES = [
    ("doc_to_text", '"{{text"', "which_word in FOLDER: TemplateSyntaxError"),
    ("doc_to_text", "!function code.text", "FOLDER/code.py:2: KeyError: 'nothing'"),
    ("doc_to_text", "!function code.nothing", "which_word in FOLDER: AttributeError"),
    ("test_split", "nothing", "which_word in FOLDER: KeyError: 'nothing'"),
    ("output_type", "[", "FOLDER/own.yaml: cannot be read"),
    ("dataset_kwargs", "{data_files: {test: /nothing.jsonl}}", "which_word: FileNotFoundError"),
]


@pytest.mark.parametrize(("key", "value", "words"), MISTAKES, ids=[words for _, _, words in MISTAKES])
def test_a_mistake_in_a_task_is_named(key, value, words, task_folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from lm_eval.models.dummy import DummyLM

    from llmtrain.train import lm_eval_harness

    monkeypatch.setattr(lm_eval_harness, "load_model", lambda *_: (None, torch.nn.Linear(1, 1)))
    monkeypatch.setattr(lm_eval_harness, "HFLM", lambda **_: DummyLM())
    lines = (task_folder / "which_word.yaml").read_text().strip().splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith(f"{key}:"))
    lines[place] = f"{key}: {value}"
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    (tmp_path / "code.py").write_text('def text(document):\n    return document["nothing"]\n')

    def score() -> None:
        manager = lm_eval_harness.tasks_of(["which_word"], tmp_path)
        lm_eval_harness.results_of(tmp_path, ["which_word"], manager, tmp_path, None, 1)

    with pytest.raises(UserError) as error:
        score()
    assert words.replace("FOLDER", str(tmp_path)) in error.value.report()


def accuracy(folder: Path) -> float:
    """How many of the first choices are likelier than the second ones."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)

    def likelihood(text: str, choice: str) -> float:
        prompt, ids = tokenizer(text)["input_ids"], tokenizer(text + choice)["input_ids"]
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(found[place - 1, ids[place]].item() for place in range(len(prompt), len(ids)))

    right = [likelihood(text, first) > likelihood(text, second) for text, (first, second) in QUESTIONS]
    return sum(right) / len(right)


def test_tables_that_an_adapter_holds_apart_are_not_tied_again(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from llmtrain.train import lm_eval_harness

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    build_model(tiny_recipe(), torch.float32, torch.device("cpu")).save_pretrained(base)
    both = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), both)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(generator=torch.Generator().manual_seed(2))
    model.save_pretrained(adapter)
    write_word_tokenizer(adapter, VOCAB)
    seen = []
    monkeypatch.setattr(
        lm_eval_harness.lm_eval, "simple_evaluate", lambda scored, **_: seen.append(scored) or {"results": {}}
    )
    lm_eval_harness.results_of(adapter, [], None, None, None, 1)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(seen[0].model(ids).logits, model(ids).logits)


SCORE = """
import sys
import torch
from lm_eval.models.dummy import DummyLM
from llmtrain.errors import UserError
from llmtrain.train import lm_eval_harness
lm_eval_harness.load_model = lambda *_: (None, torch.nn.Linear(1, 1))
lm_eval_harness.HFLM = lambda **_: DummyLM()
own = lm_eval_harness.Path(sys.argv[1])
try:
    lm_eval_harness.results_of(own, ["which_word"], lm_eval_harness.tasks_of(["which_word"], own), own, None, 1)
except UserError as error:
    print(error.report())
"""


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once(task_folder, tmp_path):
    """Each of its clients would try again for minutes."""
    pytest.importorskip("lm_eval")
    lines = (task_folder / "which_word.yaml").read_text().splitlines()
    lines = ["dataset_path: owner/name" if line.startswith("dataset_path") else line for line in lines]
    (tmp_path / "own.yaml").write_text("\n".join(line for line in lines if "data_files" not in line))
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found = subprocess.run(
            [sys.executable, "-c", SCORE, str(tmp_path)],
            env={**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        silent.setblocking(False)
        asked = 0
        with suppress(BlockingIOError):
            while silent.accept():
                asked += 1
    assert "which_word: ConnectionError: Couldn't reach 'owner/name'" in found.stdout, found.stderr
    assert asked == 1


@pytest.mark.breadth
def test_a_run_scores_a_checkpoint_and_its_export(small_recipe, task_folder, tmp_path):
    fields = ['tasks.names=["which_word"]', f"tasks.include_path={task_folder}", "tasks.every_steps=4"]
    fields += ["train.max_steps=6", "evaluation.every_steps=0"]
    run = tmp_path / "run"
    done = llmtrain("train", small_recipe, "--run-dir", run, *(f"--set={one}" for one in fields))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Scores after step 6" in done.stdout, (run / "logs/eval.log").read_text()
    found = {step: json.loads((run / f"eval/step_{step:08d}.json").read_text()) for step in (4, 6)}
    for one in found.values():
        assert 0 <= one["results"]["which_word"]["acc,none"] <= 1
        assert one["computed"]["which_word"]["limit"] is None
    assert math.isclose(found[6]["results"]["which_word"]["acc,none"], accuracy(run / "export"))
    assert not list(run.glob(".eval-*"))
    refused = llmtrain("eval", run, "--tasks", "which_wrd")
    assert (refused.returncode, "which_word" in refused.stderr) == (2, True), refused.stderr
    with pytest.raises(CheckpointError, match="has no checkpoint of step 5"):
        app(["eval", str(run), "--step", "5"], standalone_mode=False)
