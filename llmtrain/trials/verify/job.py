"""The input and the output of a verification: the files that the launcher and the workers exchange."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import Field

from llmtrain.errors import Problem, RecipeError, did_you_mean
from llmtrain.plan import Plan
from llmtrain.plan.facts.families import FAMILIES
from llmtrain.plan.facts.model_facts import dropout_of, model_facts
from llmtrain.plan.facts.pretrained_config import quantization_of
from llmtrain.plan.search.enumerate import NamedPlan, RefusedPlan
from llmtrain.recipe import Part, Recipe
from llmtrain.system.untrusted import read_json
from llmtrain.trials.jobs import Job

PROBES = ("recipe", "sgd")
"""Runs of each plan.

`recipe`: as declared. `sgd`: with plain SGD, a noticeable weight decay and, if the recipe clips, a clipping that is
active at every step. Adam's update does not change if all gradients are scaled, so a wrong clipping, or a loss
divided by a wrong number, does not affect its weights; those of SGD are affected at once.
"""

COMPARABLE = ("fp32", "bf16", "autocast_bf16")
"""Precisions that the reference supports too."""
DEQUANTIZED = ("fp8", "mxfp4")
"""Methods of quantization that `transformers` itself dequantizes, without other packages."""
METRICS = {"cross_entropy": "llmtrain.trials.verify.compare:cross_entropy"}
"""What is compared in place of the user's own metrics of evaluations. These are sums over tokens, as their trial shows,
and right if they are given the right tokens. But an accuracy, for example, jumps where two logits are almost equal,
while the cross-entropy must be that of the reference, within the same tolerance as any loss."""
NUMBERS = ("loss", "grad_norm", "weights")
"""The fields of a deviation that are numbers."""

JOB_FILE = "job.json"
"""The file that the workers read."""
VERDICTS_FILE = "verdicts.jsonl"
"""The file of verdicts, one `Verdict` per line, appended as they are found."""
CURRENT_FILE = "current"
"""The file with the name of the plan in progress.

A failure of the workers is attributed to that plan until its verdict exists.
"""


class VerifyJob(Job):
    """The work of the workers of one world size; those of size 1 train the reference first."""

    file = JOB_FILE
    work = "llmtrain.trials.verify.train:verify_rank"

    recipe: Recipe
    steps: int
    plans: dict[str, Plan]
    """Name → plan."""
    started: float = Field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def on_cpu(self) -> bool:
        """Whether the plans are for CPUs; all are for one kind of device."""
        return next(iter(self.plans.values())).cluster.spec.on_cpu

    def of_size(self, world_size: int) -> list[tuple[str, Plan]]:
        """Returns the plans for this number of workers."""
        return [(name, plan) for name, plan in self.plans.items() if plan.workers == world_size]


class Deviation(Part):
    """The deviations of one run from another; None for a number that is not finite."""

    loss: float | None
    """Largest relative difference of a step's loss, or of the evaluation loss."""
    grad_norm: float | None
    """Largest relative difference of a step's gradient norm, before clipping."""
    weights: float | None
    """Largest ‖a − b‖ / ‖b − initial‖ of a weight at the end."""
    same_lr: bool
    """Whether every step had exactly the same learning rate."""

    def within(self, tolerance: Deviation) -> bool:
        """Whether no number exceeds its tolerance."""
        pairs = ((getattr(self, name), getattr(tolerance, name)) for name in NUMBERS)
        return self.same_lr and all(ours is not None and ours <= limit for ours, limit in pairs)


class Verdict(Part):
    """The comparison of one plan."""

    name: str
    layout: dict[str, int]
    deviations: dict[str, Deviation] = Field(default={})
    """Probe → the worst deviations of all ranks; empty for a plan that failed."""
    failure: str | None = None
    """The error that ended its workers, if any."""
    seconds: float


class Reference(Part):
    """The plain PyTorch run of a probe."""

    fields: dict[str, Any]
    """The fields that the probe changes in the recipe."""
    tolerance: Deviation
    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    lr: tuple[float, ...]
    evaluation: float | None
    """Loss on held-out sequences; None if the recipe holds none out."""
    rounding: tuple[str, ...] = ()
    """Names of the weights whose gradients are nothing but rounding, or amplify it."""


class Certificate(Part):
    """All results of `verify`, and the conditions under which they were obtained."""

    recipe: Recipe
    """The recipe that was compared."""
    steps: int
    device: str
    """Name of the workers' device in the catalogue of devices."""
    started: str
    """Start in ISO 8601, UTC."""
    seconds: float
    """Seconds from the start to the end."""
    environment: dict[str, Any]
    """Versions, machine, commit and variables, as in a run's `environment.json`."""
    reference: dict[str, Reference]
    """Probe → reference."""
    verdicts: tuple[Verdict, ...]
    refused: tuple[dict[str, str], ...]

    def certified(self, verdict: Verdict) -> bool:
        """Whether a plan is certified."""
        return certified(verdict, self.reference)

    @property
    def deviating(self) -> list[str]:
        """Names of the plans that are not certified."""
        return [verdict.name for verdict in self.verdicts if not self.certified(verdict)]

    def document(self) -> dict[str, Any]:
        """Returns the certificate as JSON data."""
        reference = {probe: run.model_dump(mode="json") for probe, run in self.reference.items()}
        return self.model_dump(mode="json", exclude={"reference", "verdicts", "refused"}) | {
            "reference": {"engine": "plain PyTorch in one process", "probes": reference},
            "plans": [self._plan(verdict) for verdict in self.verdicts],
            "refused": list(self.refused),
        }

    def max_deviation(self, verdict: Verdict) -> dict[str, float | None]:
        """Returns the largest deviations of all probes; None for one that is not finite, or if the plan failed."""
        return worst_of(verdict.deviations.values()) if verdict.deviations else dict.fromkeys(NUMBERS)

    def _plan(self, verdict: Verdict) -> dict[str, Any]:
        return {
            "name": verdict.name,
            "layout": verdict.layout,
            "certified": self.certified(verdict),
            "failure": verdict.failure,
            "max_deviation": self.max_deviation(verdict),
            "probes": {probe: deviation.model_dump() for probe, deviation in verdict.deviations.items()},
            "seconds": verdict.seconds,
        }


def certified(verdict: Verdict, reference: Mapping[str, Reference]) -> bool:
    """Whether every probe of a plan ended, and stayed within its tolerance.

    reference: probe → reference.
    """
    compared = verdict.deviations.keys() == reference.keys()
    return compared and all(
        deviation.within(reference[probe].tolerance) for probe, deviation in verdict.deviations.items()
    )


def worst(values: Iterable[float | None]) -> float | None:
    """Returns the largest value, or None if one is None or not finite, since JSON has no infinity."""
    largest = 0.0
    for value in values:
        if value is None or not math.isfinite(value):
            return None
        largest = max(largest, value)
    return largest


def worst_of(deviations: Collection[Deviation]) -> dict[str, float | None]:
    """Returns the worst of each of the numbers."""
    return {name: worst(getattr(deviation, name) for deviation in deviations) for name in NUMBERS}


def comparable(recipe: Recipe, steps: int) -> Recipe:
    """Returns the recipe to compare: the whole schedule within `steps`, no dropout, no skipped update, and `METRICS`.

    Ranks draw different dropout masks, as they should, so with dropout no two layouts train the same. The reference has
    no guard against spikes. Raises RecipeError for a precision that the reference does not support, and for an unknown
    model.
    """
    if recipe.kernels.fp8 != "off":
        message = (
            f"'{recipe.kernels.fp8}' cannot be verified: by design, products in fp8 differ from those of the reference"
        )
        raise RecipeError(Problem("verify.fp8", "kernels.fp8", message, "--set kernels.fp8=off"))
    if recipe.parallel.precision not in COMPARABLE:
        message = f"'{recipe.parallel.precision}' cannot be verified: its loss scale skips steps, unlike the reference"
        raise RecipeError(
            Problem("verify.precision", "parallel.precision", message, "--set parallel.precision=autocast_bf16")
        )
    quantization = quantization_of(recipe.model)
    if quantization is not None and quantization.method not in DEQUANTIZED:
        message = (
            f"cannot be verified: the reference dequantizes {' and '.join(DEQUANTIZED)}, not {quantization.method}"
        )
        fix = "verify the recipe with plain weights"
        raise RecipeError(Problem("verify.quantized", "model.pretrained", message, fix))
    if recipe.model.images:
        message = "cannot be verified: the reference reads texts only"
        raise RecipeError(Problem("verify.images", "model.images", message, "--set model.images=false"))
    if recipe.model.build is not None:
        _check_own_model(recipe)
    fields: dict[str, Any] = {
        "train.max_steps": steps,
        "train.epochs": None,
        "optim.warmup_steps": min(recipe.optim.with_warmup_steps(steps).warmup_steps, steps // 4),
        "optim.warmup_ratio": 0.0,
        "train.neftune_alpha": 0.0,
        "optim.decay_steps": min(recipe.optim.decay_steps, steps // 2),
        "guard.spike_sigma": 0.0,
    }
    fields |= {f"model.config.{key}": 0.0 for key in dropout_of(_model_values(recipe))}
    if recipe.model.adapter is not None:
        fields["model.adapter.dropout"] = 0.0
    if recipe.evaluation.metrics and recipe.objective.name == "language_model":
        fields["evaluation.metrics"] = METRICS
    return recipe.with_(**fields)


def _check_own_model(recipe: Recipe) -> None:
    """Raises RecipeError for a user's own model that no reference can train in the same way."""
    trials = model_facts(recipe.model, recipe.vocab_size, recipe.code_dir).trials
    assert trials is not None
    problems = []
    if trials.is_random:
        message = (
            f"{recipe.model.build} has dropout that no field of model.config turns off, and each layout draws another"
        )
        problems.append(
            Problem("verify.dropout", "model.build", message, "let an argument, such as dropout, set its rate")
        )
    if trials.auxiliary_loss and recipe.data.has_document_mask:
        message = "the reference runs each document alone, but the loss of a model's own is of a whole micro-batch"
        problems.append(Problem("verify.documents", "data.mask_documents", message, "--set data.packing=none"))
    if problems:
        raise RecipeError(problems)


def _model_values(recipe: Recipe) -> dict[str, Any]:
    """Returns the model's configuration with the defaults of its family."""
    if recipe.model.build is not None:
        return dict(recipe.model.config)
    family = FAMILIES.get(recipe.model.architecture or "")
    if family is not None:
        return {**family.defaults, **recipe.model.config}
    from llmtrain.models.build import model_configuration  # for any other family, which loads torch

    values: dict[str, Any] = model_configuration(recipe).to_dict()
    return values


def choose_plans(plans: list[NamedPlan], refused: list[RefusedPlan], wanted: str) -> list[NamedPlan]:
    """Returns the plans of `--plans`: `all`, or names and patterns (`dp2-*`) separated by commas.

    Raises RecipeError for each part that matches no plan, and if no plan runs.
    """
    by_name = {named_plan.name: named_plan for named_plan in plans}
    rules = {refusal.name: refusal.problem for refusal in refused}
    patterns = ["*"] if wanted == "all" else [part.strip() for part in wanted.split(",") if part.strip()]
    lost = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in by_name)]
    if lost or not patterns:
        raise RecipeError([_unknown(pattern, list(by_name), rules) for pattern in lost or [wanted]])
    return [named_plan for named_plan in plans if any(fnmatchcase(named_plan.name, pattern) for pattern in patterns)]


def _unknown(pattern: str, known: Sequence[str], rules: dict[str, Problem]) -> Problem:
    if pattern in rules:
        problem = rules[pattern]
        return Problem(problem.rule, "--plans", f"{pattern} is refused: {problem.field}: {problem.message}")
    fix = (
        f"plans: {', '.join(known[:6])}{', ...' if len(known) > 6 else ''}"
        if known
        else "no plan of this recipe runs here"
    )
    return Problem(
        "verify.plans", "--plans", f"'{pattern}' matches no plan that runs here{did_you_mean(pattern, known)}", fix
    )


def reference_file(folder: Path, probe: str) -> Path:
    """Returns the file of a `Reference`; the weights are next to it, as safetensors."""
    return folder / f"reference-{probe}.json"


def read_references(folder: Path) -> dict[str, Reference]:
    """Returns the references by probe."""
    return {probe: read_json(reference_file(folder, probe), Reference) for probe in PROBES}


def read_verdicts(folder: Path) -> list[Verdict]:
    """Returns the verdicts found so far."""
    path = folder / VERDICTS_FILE
    return [Verdict.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_verdict(folder: Path, verdict: Verdict) -> None:
    """Appends a verdict."""
    with (folder / VERDICTS_FILE).open("a", encoding="utf-8") as file:
        file.write(verdict.model_dump_json() + "\n")
