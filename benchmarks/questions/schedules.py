"""The schedules of a pipeline, on two cores that compute."""

from collections.abc import Sequence

from benchmarks.pairs import Case, Side
from benchmarks.question import Question, Result, Verdict
from benchmarks.questions.trainer import sets

FIELDS = (
    *("model.config.num_hidden_layers=8", "model.config.hidden_size=384", "model.config.intermediate_size=1024"),
    *("batch.global_batch_size=16", "batch.micro_batch_size=2", "logging.every_steps=1"),
    *("kernels.blocks=eager", "kernels.loss=whole", "kernels.threads=1"),
    *("parallel.zero_stage=1", "parallel.pipeline=2"),
)
"""Eight micro-batches of passes that take tenths of a second."""
OTHERS = {"zero bubble": "zero_bubble", "interleaved": "interleaved"}


def cases(quick: bool) -> Sequence[Case]:
    """All schedules; those with two stages on each rank beside 1F1B."""
    steps = "3" if quick else "8"

    def side(name: str, *fields: str) -> Side:
        command = ["python", "-m", "benchmarks.programs.ours", "--ranks", "2", "--steps", steps]
        return Side(name, [*command, *sets((*FIELDS, *fields))])

    chunked = [
        side(name, f"parallel.pipeline_schedule={value}", "parallel.pipeline_chunks=2")
        for name, value in OTHERS.items()
    ]
    return [Case("2 ranks, 8 micro-batches", [side("1F1B"), *chunked])]


def verdicts(result: Result) -> Sequence[Verdict]:
    """No schedule is slower than 1F1B, pair by pair."""
    (case,) = result["cases"]
    found = []
    for name in OTHERS:
        ratio = case["against"][name]["step_ms"]  # of 1F1B to the other
        text = f"{ratio['median']:.3f}× ({ratio['lowest']:.3f} to {ratio['highest']:.3f})"
        found.append(Verdict(f"{name}: a step of 1F1B takes at least as long", text, ratio["lowest"] >= 1))
    return found


QUESTION = Question(
    name="schedules",
    title="The pipeline's schedules beside each other, on CPUs that compute",
    asks=(
        "A pipeline of two ranks, each with a core of its own and eight layers between them, trains under every "
        "schedule. By arithmetic, 1F1B idles for one ninth of a step with eight micro-batches. Unlike in the benchmark "
        "with passes that sleep, the gradients of weights that a zero bubble schedule delays cost time here."
    ),
    cases=cases,
    columns={"step_ms": ("ms a step", ".0f"), "tokens_per_second": ("tokens/s", ",.0f")},
    verdicts=verdicts,
    minutes=8,
)
