"""Tries kernels, one field after another, and keeps the fastest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from llmtrain.data import MicroBatch
from llmtrain.errors import RecipeError
from llmtrain.models.precision import refuse_slower
from llmtrain.plan import KernelChoice, Plan
from llmtrain.plan.axes import model_parallel_size
from llmtrain.plan.rules import resolve
from llmtrain.plan.search.variants import MICRO_BATCH, has_mean_loss, micro_batches
from llmtrain.train.tune.choice import alternatives, device_name, key_of_run
from llmtrain.train.tune.trial import LAYERS, BusyError, Trial, compare_in_turns, with_threads

MIN_GAIN = 0.02
"""Fraction of a pass that another kernel must save to be chosen; less may be noise."""
LONG_RUN_S = 12_000
"""Length of a run in seconds from which two minutes of measuring are worthwhile: one hundredth of it."""
FP8 = "kernels.fp8"
PRECISION = "parallel.precision"
PRECISIONS = ("fp32", "bf16", "autocast_bf16")
"""The precisions to compare on a CPU."""
AGREE = {"fp32": 1e-4}
"""Largest relative deviation of a candidate's loss: far above rounding, and far below a different computation."""
AGREE_LOW = 1e-2
"""The same limit in lower precision."""


@dataclass
class Tuning:
    """The results so far."""

    plan: Plan
    """The plan with the values chosen so far."""
    current: Trial
    loss: float
    """The loss of the first trial."""
    values: dict[str, str | int] = field(default_factory=dict)
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def trial(self, dotted: str, value: str | int) -> Trial:
        """Returns a trial of the values chosen so far, and one more. Raises RecipeError as the engines do."""
        recipe = self.plan.recipe.with_(**self.values | {dotted: value})
        return Trial(self.plan.model_copy(update={"recipe": recipe}), self.current.batch, self.current.device)


def tune(
    plan: Plan,
    batch_of: Callable[[Plan], MicroBatch],
    device: torch.device,
    threads: int,
    always: bool,
    say: Callable[[str], None],
) -> KernelChoice:
    """Measures every value that no rule refuses, field by field, with the other fields as chosen so far.

    batch_of: returns a micro-batch of a run. always: whether to measure for a short run, too. say: is called with
    FIELD=VALUE before it is tried. Raises RecipeError if the default kernels cannot be computed, or fp8 is slower than
    bf16; BusyError if others use the cores meanwhile.
    """
    on_cpu = device.type == "cpu"
    name = device_name(device, threads)
    key = key_of_run(plan, name)
    trial = Trial(with_threads(plan, threads) if on_cpu else plan, batch_of(plan), device)
    tuning = Tuning(plan, trial, trial.warm())
    expected = run_seconds(plan, trial.seconds())
    if not always and expected < LONG_RUN_S:
        _compare_fp8(tuning)
        why = (
            f"chosen by the rules, because a run of about {expected:,.0f} s is too short to measure; "
            "run `llmtrain tune` to measure"
        )
        return KernelChoice(key=key, device=name, why=why, values={})
    for dotted, values in alternatives(plan, on_cpu, threads):
        tuning.values[dotted] = values[0]
        for value in values[1:]:
            say(f"{dotted}={value}")
            _try(tuning, dotted, value)
    _compare_fp8(tuning)
    if always:
        _compare_micro_batches(tuning, batch_of, say)
    if on_cpu and always:
        _compare_precisions(tuning, say)
    return KernelChoice(
        key=key,
        device=name,
        why=f"measured: forward and backward of a micro-batch through {LAYERS} layers and the head",
        values=tuning.values,
        milliseconds=tuning.milliseconds,
        failed=tuning.failed,
    )


def run_seconds(plan: Plan, seconds: float) -> float:
    """Estimates the duration of a run. seconds: duration of a pass of the trial."""
    layers = max(plan.model.layers / LAYERS, 1) / model_parallel_size(plan.parallel)
    return seconds * layers * plan.batch.gradient_accumulation_steps * plan.recipe.train.steps


def _try(tuning: Tuning, dotted: str, value: str | int) -> None:
    """Measures a value against the best so far, and keeps it if it is faster."""
    with _noting_failure(tuning, f"{dotted}={value}"):
        trial = tuning.trial(dotted, value)
        _check(trial.warm(), tuning.loss, tuning.plan)
        compared = compare_in_turns(tuning.current, trial)
        milliseconds = tuning.milliseconds.setdefault(dotted, {})
        # The device's speed differs between comparisons: times of a field are scaled to its first comparison.
        current_ms = milliseconds.setdefault(str(tuning.values[dotted]), round(compared.seconds * 1000, 3))
        milliseconds[str(value)] = round(current_ms * compared.ratio, 3)
        if compared.is_faster and compared.ratio <= 1 - MIN_GAIN:
            tuning.values[dotted], tuning.current = value, trial
    trial = None  # type: ignore[assignment]
    gc.collect()
    if tuning.current.device.type == "cuda":
        torch.cuda.empty_cache()


def _compare_micro_batches(tuning: Tuning, batch_of: Callable[[Plan], MicroBatch], say: Callable[[str], None]) -> None:
    """Measures larger micro-batches for people, as long as they become faster; if none is faster, smaller ones.

    The recipe's size is kept, because a larger one needs more memory. Times are for as many sequences as the recipe's
    micro-batch has. Nothing is measured in a pipeline, which waits longer if its micro-batches are larger.
    """
    plan, recipe_size = tuning.plan, tuning.plan.batch.micro_batch_size
    if plan.parallel.pipeline > 1:
        return
    sizes = micro_batches(plan.recipe, plan.data_parallel_size, has_mean_loss(plan.model))
    milliseconds = {str(recipe_size): round(tuning.current.seconds() * 1000, 3)}
    for others in (
        [size for size in sizes if size > recipe_size],
        [size for size in reversed(sizes) if size < recipe_size],
    ):
        best, lowest_ms = tuning.current, milliseconds[str(recipe_size)]
        for size in others:
            say(f"{MICRO_BATCH}={size}")
            compared = None
            with _noting_failure(tuning, f"{MICRO_BATCH}={size}"):
                changed = resolve(plan.recipe.with_(**tuning.values, **{MICRO_BATCH: size}), plan.cluster, plan.model)
                trial = Trial(changed, batch_of(changed), best.device)
                trial.warm()
                compared = compare_in_turns(best, trial)
            if compared is None:
                break
            of_sequence = compared.ratio * best.plan.batch.micro_batch_size / size
            milliseconds[str(size)] = round(lowest_ms * of_sequence, 3)
            if of_sequence > 1 - MIN_GAIN:
                break
            best, lowest_ms = trial, milliseconds[str(size)]
        if best is not tuning.current:
            break
    tuning.milliseconds[MICRO_BATCH] = milliseconds


def _compare_precisions(tuning: Tuning, say: Callable[[str], None]) -> None:
    """Measures other precisions for people.

    Whether a processor is faster in bf16 depends on its instructions. The recipe's precision is kept.
    """
    recipe_precision = tuning.plan.recipe.parallel.precision
    milliseconds = {str(recipe_precision): round(tuning.current.seconds() * 1000, 3)}
    for precision in PRECISIONS:
        if precision == recipe_precision:
            continue
        say(f"{PRECISION}={precision}")
        with _noting_failure(tuning, f"{PRECISION}={precision}"):
            trial = tuning.trial(PRECISION, precision)
            trial.warm()
            milliseconds[precision] = round(trial.seconds() * 1000, 3)
    tuning.milliseconds[PRECISION] = milliseconds


def _compare_fp8(tuning: Tuning) -> None:
    """Measures matrix products in fp8 against bf16 if a recipe chooses fp8, with the other kernels as chosen.

    Raises RecipeError if fp8 is slower.
    """
    kind = tuning.plan.recipe.kernels.fp8
    if kind == "off":
        return
    plain = tuning.trial(FP8, "off")
    plain.warm()
    compared = compare_in_turns(plain, tuning.current)
    bf16, in_fp8 = compared.seconds, compared.seconds * compared.ratio
    tuning.milliseconds[FP8] = {"off": round(bf16 * 1000, 3), kind: round(in_fp8 * 1000, 3)}
    refuse_slower(kind, bf16, in_fp8)


class WrongLossError(Exception):
    """A kernel computes something else."""


def _check(loss: float, expected: float, plan: Plan) -> None:
    tolerance = AGREE.get(plan.recipe.parallel.precision, AGREE_LOW)
    if not abs(loss - expected) <= tolerance * abs(expected):  # also rejects NaN
        raise WrongLossError(f"{loss:.6g}, but {expected:.6g} was expected")


@contextmanager
def _noting_failure(tuning: Tuning, assignment: str) -> Iterator[None]:
    """Notes why a value cannot be computed: any library may raise, for example when out of memory."""
    try:
        yield
    except BusyError:
        raise
    except RecipeError as error:
        tuning.failed[assignment] = error.problems[0].message
    except Exception as error:
        tuning.failed[assignment] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
