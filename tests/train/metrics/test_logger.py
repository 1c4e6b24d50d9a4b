"""Each line of `metrics.jsonl` has its fields, with all digits and without numbers that are not finite."""

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from llmtrain.plan.facts.own_loss import RESERVED
from llmtrain.run_dir import RunDir
from llmtrain.train.metrics import Evaluation, MetricsLogger, trackers
from llmtrain.train.metrics.logger import forget_after
from tests.helpers.step_metrics import metrics

STEP_KEYS = [
    *("step", "time", "loss", "grad_norm", "lr", "tokens", "samples", "step_time_s"),
    *("tokens_per_second", "tokens_per_second_per_device", "tflops_per_device", "mfu"),
    *("peak_memory_bytes", "data_wait_s", "save_blocked_s", "skipped_steps", "rollbacks"),
    *("left_s", "device_hours"),
]


def strict(line):
    """JSON as the standard has it: Python's reader would take NaN."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(line, parse_constant=refuse)


def records(run_dir):
    return [strict(line) for line in run_dir.metrics_file.read_text().splitlines()]


@pytest.fixture
def plan(plan):
    """Without trackers, which are tested by themselves."""
    return plan.model_copy(update={"recipe": plan.recipe.with_(**{"logging.trackers": []})})


def train(run_dir, plan, first, last, start_step=0):
    """Logs steps first..last in tens, with an evaluation at each 20."""
    with MetricsLogger(run_dir, plan, start_step) as logger:
        for step in range(first, last + 1, 10):
            logger.log(logger.step_record(metrics(step)))
            if step % 20 == 0:
                logger.log(logger.eval_record(step, Evaluation(3.0)))


def test_a_step_has_every_field(run_dir, plan):
    with MetricsLogger(run_dir, plan) as logger:
        record = logger.step_record(metrics(10))
        logger.log(record)
    assert records(run_dir) == [record]
    assert list(record) == STEP_KEYS
    assert set(STEP_KEYS) <= RESERVED, "a user's own loss must not return a metric of this name"
    assert record["step_time_s"] == 0.5
    assert record["data_wait_s"] == 0.05
    assert record["tokens_per_second"] == 2048
    assert record["tokens_per_second_per_device"] == 1024
    assert record["tflops_per_device"] == pytest.approx(1024 * 6000 / 1e12)
    assert record["mfu"] is None
    assert record["peak_memory_bytes"] is None


def test_an_evaluation_is_logged_with_its_perplexity(run_dir, plan):
    with MetricsLogger(run_dir, plan) as logger:
        logger.log(logger.eval_record(20, Evaluation(math.log(50))))
    assert records(run_dir) == [{"step": 20, "eval_loss": math.log(50), "perplexity": pytest.approx(50)}]


def test_bits_per_byte_do_not_depend_on_the_tokenizer(run_dir, plan):
    """Half as many tokens of the same text, each with twice the loss, are as good a prediction."""
    with MetricsLogger(run_dir, plan) as logger:
        logger.log(logger.eval_record(1, Evaluation(math.log(4), bytes_per_token=2.0)))
        logger.log(logger.eval_record(2, Evaluation(2 * math.log(4), bytes_per_token=4.0)))
        logger.log(logger.eval_record(3, Evaluation(1.0, of_objective={"kl": 0.0}, bytes_per_token=2.0)))
    assert [line.get("bits_per_byte") for line in records(run_dir)] == [pytest.approx(1), pytest.approx(1), None]


def test_each_set_has_its_own_metrics(run_dir, plan):
    code = Evaluation(math.inf, {"a": 1.0, "b": 2.0}, own={"accuracy": math.nan})
    sets = {"wiki": Evaluation(math.log(2), bytes_per_token=1.0, own={"accuracy": 0.5}), "code": code}
    with MetricsLogger(run_dir, plan) as logger:
        logger.log(logger.eval_record(20, Evaluation(0.0, own={"accuracy": 0.25}), sets))
    assert records(run_dir) == [
        {
            **{"step": 20, "eval_loss": 0.0, "perplexity": 1.0, "accuracy": 0.25},
            "accuracy_by_set": {"wiki": 0.5, "code": None},
            "eval_loss_by_set": {"wiki": math.log(2), "code": None},
            "perplexity_by_set": {"wiki": pytest.approx(2), "code": None},
            "bits_per_byte_by_set": {"wiki": 1.0},
        }
    ]


def test_an_evaluation_is_logged_by_source(run_dir, plan, monkeypatch):
    """Trackers take numbers only, and MLflow few characters in their names."""
    sent = []
    monkeypatch.setattr(trackers.Trackers, "log", lambda self, values, step: sent.append((values, step)))
    with MetricsLogger(run_dir, plan) as logger:
        logger.log(logger.eval_record(20, Evaluation(2.5, {"/data/a b.jsonl": 2.0, "owner/web": math.nan})))
        logger.log(logger.eval_record(30, Evaluation(2.5, {"alone": 2.5})))
    first, second = records(run_dir)
    assert first["eval_loss_by_source"] == {"/data/a b.jsonl": 2.0, "owner/web": None}
    assert "eval_loss_by_source" not in second
    values, step = sent[0]
    assert step == 20
    assert values == {
        "eval/eval_loss": 2.5,
        "eval/perplexity": pytest.approx(math.exp(2.5)),
        "eval/eval_loss_by_source/_data_a_b_jsonl": 2.0,
        "eval/eval_loss_by_source/owner_web": None,
    }


def test_an_evaluation_before_the_first_step_is_kept(run_dir, plan):
    """A run that continues keeps its line; a new one in the same folder, and a line that was cut off, do not stay."""
    with MetricsLogger(run_dir, plan) as logger:
        logger.log(logger.eval_record(0, Evaluation(3.0)))
        logger.log(logger.step_record(metrics(10)))
    with run_dir.metrics_file.open("a") as file:
        file.write('{"step": 2')
    with MetricsLogger(run_dir, plan, start_step=10):
        pass
    assert [record["step"] for record in records(run_dir)] == [0, 10]
    with MetricsLogger(run_dir, plan):
        pass
    assert records(run_dir) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_null(run_dir, plan, value):
    with MetricsLogger(run_dir, plan) as logger:
        logger.log(logger.step_record(metrics(10, loss=value, grad_norm=value)))
        logger.log(logger.eval_record(10, Evaluation(value)))
        logger.log(logger.eval_record(20, Evaluation(1e6)))
    assert [record.get("loss", record.get("eval_loss")) for record in records(run_dir)] == [None, None, 1e6]
    assert records(run_dir)[0]["grad_norm"] is None
    assert records(run_dir)[2]["perplexity"] is None


def test_numbers_keep_every_digit(run_dir, plan):
    with MetricsLogger(run_dir, plan) as logger:
        logger.log(logger.step_record(metrics(10, loss=0.1 + 0.2)))
    assert records(run_dir)[0]["loss"] == 0.1 + 0.2


def test_a_resumed_run_writes_the_same_metrics_as_an_uninterrupted_one(run_dir, plan, tmp_path):
    def written():
        clocks = ("time", "left_s", "device_hours")
        return [{name: value for name, value in one.items() if name not in clocks} for one in records(run_dir)]

    train(run_dir, plan, 10, 60)
    whole = written()
    train(run_dir, plan, 50, 60, start_step=40)
    assert written() == whole
    assert len(whole) == 9


def test_a_truncated_line_is_dropped(run_dir, plan):
    train(run_dir, plan, 10, 20)
    whole = run_dir.metrics_file.read_text()
    with run_dir.metrics_file.open("a") as file:
        file.write('{"step": 15, "lo')
    forget_after(run_dir.metrics_file, 20)
    assert run_dir.metrics_file.read_text() == whole


def test_samples_have_their_own_file_and_are_removed_like_metrics(run_dir, plan):
    asked = {"samples.every_steps": 10, "samples.prompts": ["a", "b"]}
    sampling = plan.model_copy(update={"recipe": plan.recipe.with_(**asked)})
    lines = [{"step": step, "prompt": "a\u2028", "text": f"{step}\n"} for step in (10, 20, 30)]
    for start, logged in ((0, lines), (20, lines[2:])):
        with MetricsLogger(run_dir, sampling, start) as logger:
            for line in logged:
                logger.log_samples(line["step"], [(line["prompt"], line["text"])])
    assert [strict(line) for line in run_dir.samples_file.read_text().splitlines()] == lines
    with MetricsLogger(run_dir, plan):
        assert run_dir.samples_file.read_text() == ""
    run_dir.samples_file.unlink()
    train(run_dir, plan, 10, 20)
    assert not run_dir.samples_file.exists()


def test_a_new_run_in_an_old_folder_starts_empty(run_dir, plan):
    train(run_dir, plan, 10, 20)
    with MetricsLogger(run_dir, plan, 0):
        assert records(run_dir) == []


def test_a_killed_run_loses_no_logged_line(run_dir, plan):
    (run_dir.path / "plan.json").write_text(plan.model_dump_json())
    program = f"""
import os, signal
from pathlib import Path
from llmtrain.train.metrics import MetricsLogger
from llmtrain.plan.facts.own_loss import RESERVED
from llmtrain.run_dir import RunDir
from tests.helpers.step_metrics import metrics
run_dir = RunDir(Path({str(run_dir.path)!r}))
logger = MetricsLogger(run_dir, run_dir.read_plan())
for step in (10, 20, 30):
    logger.log(logger.step_record(metrics(step)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", program], env=env).returncode == -9
    assert [record["step"] for record in records(run_dir)] == [10, 20, 30]


# Disks.


def _fill(disk):
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1000))


def test_a_temporarily_full_disk_loses_no_line(small_disk, plan, tmp_path):
    run_dir, warned = RunDir(small_disk), []
    with MetricsLogger(run_dir, plan, warn=warned.append) as logger:
        logger.log(logger.step_record(metrics(10)))
        _fill(small_disk)
        for step in range(20, 200, 10):  # more than the block that the file has begun
            logger.log(logger.step_record(metrics(step)))
            logger.flush()
        assert len(run_dir.metrics_file.read_text().splitlines()) < 19
        (small_disk / "filler").unlink()
        logger.log(logger.step_record(metrics(200)))
    assert [record["step"] for record in records(run_dir)] == [*range(10, 210, 10)]
    assert len(warned) == 1
    assert "No space left on device; its lines are kept for later" in warned[0]


def test_a_disk_that_stays_full_is_reported_at_the_end(small_disk, plan):
    warned = []
    with MetricsLogger(RunDir(small_disk), plan, warn=warned.append) as logger:
        _fill(small_disk)
        for step in range(10, 200, 10):
            logger.log(logger.step_record(metrics(step)))
    assert "could not be written" in warned[-1]


def test_the_logger_does_not_wait_for_a_fifo_in_place_of_its_file(run_dir, plan):
    os.mkfifo(run_dir.metrics_file)
    with pytest.raises(OSError, match="is not a regular file"):
        MetricsLogger(run_dir, plan)
