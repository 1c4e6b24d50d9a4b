"""The lines that a run prints, and its summary."""

import io
import re

import pytest
from rich.console import Console

from llmtrain.system.quantities import compact, duration
from llmtrain.train.metrics import TrainingProgress

RECORD = {
    "step": 50,
    "loss": 2.34567,
    "grad_norm": 0.987654,
    "lr": 3e-4,
    "tokens": 51200,
    "tokens_per_second": 12345.6,
    "mfu": 0.4123,
    "step_time_s": 2.0,
    "left_s": 100.0,
}
EVALUATION = {"step": 50, "eval_loss": 3.0, "perplexity": 20.0855}


def plain():
    return Console(file=io.StringIO(), width=40)


def lines(console):
    return console.file.getvalue().splitlines()


def test_a_log_gets_one_line_per_logged_step():
    console = plain()
    with TrainingProgress(console, 100) as progress:
        for step in range(1, 51):
            progress.advance(step)
        progress.show(RECORD)
        with progress.busy("evaluating"):
            pass
        progress.show(EVALUATION)
        progress.show({**EVALUATION, "eval_loss_by_source": {"web": 2.9, "code": None}})
        progress.show(
            {**EVALUATION, "bits_per_byte": 1.5, "eval_loss_by_set": {"wiki": 2}, "bits_per_byte_by_set": {"wiki": 1}}
        )
    assert lines(console) == [
        "step 50/100  loss 2.3457  grad 0.9877  lr 3.00e-04  12.3k tok/s  41.2% mfu  1m40s left",
        "step 50  eval loss 3.0000  perplexity 20.09",
        "step 50  eval loss 3.0000  perplexity 20.09  web 2.9000  code not finite",
        "step 50  eval loss 3.0000  perplexity 20.09  bits per byte 1.5000",
        "step 50  eval loss of wiki 2.0000  bits per byte 1.0000",
    ]


def test_own_metrics_are_shown_once():
    console, sets = plain(), {"eval_loss_by_set": {"wiki": 2}, "hits_by_set": {"wiki": None}}
    progress = TrainingProgress(console, 100, own_metrics=["hits", "accuracy"])
    progress.show({**EVALUATION, "hits": 0.25, "accuracy": 0.5, "other": 1.0, **sets})
    assert lines(console) == [
        "step 50  eval loss 3.0000  perplexity 20.09  accuracy 0.5000  hits 0.2500",
        "step 50  eval loss of wiki 2.0000  hits not finite",
    ]


def test_a_sample_does_not_fill_the_screen_with_empty_lines():
    console = plain()
    TrainingProgress(console, 100).show_samples(7, [("def", " f\n\n\n   \n\nx\n\ny")])
    assert [line.strip("│ ") for line in lines(console)[1:-1]] == ["def f", "", "x", "", "y"]


def test_the_end_of_a_long_run_and_its_cost():
    console = plain()
    TrainingProgress(console, 100).show({**RECORD, "left_s": 7200.0, "cost": 1.0, "cost_at_end": 1234.5})
    (line,) = lines(console)
    assert re.search(r"  2h00m left, until \w+ \d\d \w+ \d\d:\d\d  cost 1\.00 of 1,234\.50$", line)


def test_control_characters_of_a_sample_are_not_printed():
    console = plain()
    TrainingProgress(console, 100).show_samples(1000, [("[bold]a", "b\x1b[31m\nc")])
    shown = "\n".join(lines(console))
    assert "sample after step 1,000" in shown
    assert "[bold]ab\\x1b[31m" in shown
    assert "\x1b" not in shown


def test_unknown_values_are_omitted():
    console = plain()
    progress = TrainingProgress(console, 100)
    progress.show({**RECORD, "mfu": None, "grad_norm": None, "loss": None})
    assert lines(console) == ["step 50/100  loss not finite  lr 3.00e-04  12.3k tok/s  1m40s left"]


def test_the_summary_reports_the_training():
    console = plain()
    progress = TrainingProgress(console, 50, start_step=20)
    progress.show({**RECORD, "step": 30, "tokens_per_second": 2000.0})  # 10 steps in 20 s
    progress.show({**RECORD, "step": 50, "tokens_per_second": 500.0})  # 20 steps in 40 s
    progress.show(EVALUATION)
    progress.advance(50)
    progress.summary()
    assert lines(console)[3:] == ["trained 30 steps in 0s (1.00k tokens/s while training)  loss 2.3457"]


def test_the_summary_counts_the_steps_after_the_last_logged_one():
    console = plain()
    progress = TrainingProgress(console, 100, start_step=20)
    progress.show({**RECORD, "step": 50})
    progress.advance(56)
    progress.summary()
    assert lines(console)[-1] == "trained 36 steps in 0s (12.3k tokens/s while training)  loss 2.3457 (step 50)"


def test_the_summary_counts_steps_that_were_not_logged():
    console = plain()
    progress = TrainingProgress(console, 100, start_step=20)
    progress.summary()
    progress.advance(22)
    progress.summary()
    assert lines(console) == ["trained 2 steps in 0s"]


def test_a_terminal_keeps_each_logged_step_above_the_live_line():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with TrainingProgress(console, 100) as progress:
        progress.show(RECORD)
    assert "step 50/100  loss 2.3457  grad 0.9877  lr 3.00e-04" in console.file.getvalue()


def test_a_quiet_console_gets_nothing():
    console = Console(file=io.StringIO(), quiet=True)
    with TrainingProgress(console, 100) as progress:
        progress.show(RECORD)
        progress.summary()
    assert lines(console) == []


def test_text_is_not_interpreted_as_markup():
    console = plain()
    TrainingProgress(console, 100).note("saved [/tmp/x] [red]")
    assert lines(console) == ["saved [/tmp/x] [red]"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_live_line_is_one_line_at_any_width(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    progress = TrainingProgress(console, 100_000)
    progress.advance(50)
    progress.show(RECORD)
    assert progress._bar is not None
    with console.capture() as capture:
        console.print(progress._bar.get_renderable())
    (line,) = capture.get().splitlines()
    assert "50/100,000" in line
    assert "loss 2.3457" in line
    assert ("12.3k tok/s" in line) == (width >= 80)
    assert ("grad 0.9877" in line) == ("41.2% mfu" in line) == (width >= 120)
    assert "…" not in line
    assert len(line) <= width


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00k"), (12345, "12.3k"), (123456, "123k"), (4.56e6, "4.56M"), (1.5e13, "15.0T")],
)
def test_numbers_are_abbreviated(value, text):
    assert compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (131, "2m11s"), (3900, "1h05m"), (3 * 86400 + 4 * 3600, "3d04h")],
)
def test_durations_are_formatted(seconds, text):
    assert duration(seconds) == text
