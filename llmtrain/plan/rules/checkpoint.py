"""Rules for checkpoints, evaluations, samples and tasks. They refuse options that have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule
from llmtrain.recipe import DataConfig


@rule(
    "checkpoint.keeps_all",
    "Without `keep_last`, all checkpoints are kept, so the other options have no effect.",
    "arithmetic",
)
def keeps_all(draft: Draft) -> Iterator[Fault]:
    """Refuses options that keep some checkpoints longer if all checkpoints are kept anyway."""
    policy = draft.recipe.checkpoint
    if policy.keep_last is not None:
        return
    for field in ("keep_every_steps", "keep_best"):
        value = getattr(policy, field)
        if value is not None:
            message = f"{value} has no effect: all checkpoints are kept"
            yield Fault(f"checkpoint.{field}", message, assignment(checkpoint__keep_last=3))


@rule(
    "checkpoint.never_saved",
    "Only steps after which a checkpoint is written can be kept: the multiples of `every_steps`, and the last one.",
    "arithmetic",
)
def never_saved(draft: Draft) -> Iterator[Fault]:
    """Refuses a `keep_every_steps` with multiples at which no checkpoint is saved."""
    policy = draft.recipe.checkpoint
    keep, every = policy.keep_every_steps, policy.every_steps
    if keep is None or (every and keep % every == 0):
        return
    what = (
        f"is not a multiple of every_steps={every}"
        if every
        else "needs every_steps, which is 0: only the last checkpoint is written"
    )
    fix = assignment(checkpoint__keep_every_steps=math.ceil(keep / every) * every) if every else ""
    yield Fault("checkpoint.keep_every_steps", f"{keep} {what}", fix)


@rule(
    "checkpoint.never_evaluated",
    "A checkpoint can only rank among the best if its own weights were evaluated, right after "
    "the step of the checkpoint.",
    "arithmetic",
)
def never_evaluated(draft: Draft) -> Iterator[Fault]:
    """Refuses `keep_best` if no checkpoint other than the last one coincides with an evaluation."""
    recipe = draft.recipe
    saved, evaluated = recipe.checkpoint.every_steps, recipe.evaluation.every_steps
    if recipe.checkpoint.keep_best is None:
        return
    if not (saved and evaluated) or math.lcm(saved, evaluated) > (recipe.train.max_steps or math.inf):
        message = (
            f"{recipe.checkpoint.keep_best} has no effect: no step before the last has both a checkpoint "
            f"(every_steps={saved}) and an evaluation (evaluation.every_steps={evaluated})"
        )
        fix = assignment(evaluation__every_steps=saved) if saved else ""
        yield Fault("checkpoint.keep_best", message, fix)


DEFAULT_FRACTION = DataConfig.model_fields["eval_fraction"].default


@rule("evaluation.never", "With `every_steps` 0, nothing is ever evaluated.", "arithmetic")
def never(draft: Draft) -> Iterator[Fault]:
    """Refuses evaluation options if there is no evaluation."""
    evaluation = draft.recipe.evaluation
    if evaluation.every_steps:
        return
    fix = assignment(evaluation__every_steps=draft.recipe.train.max_steps or 100)
    for field in ("sources", "sets", "at_start"):
        if getattr(evaluation, field):
            yield Fault(f"evaluation.{field}", "has no effect: evaluation.every_steps is 0", fix)


@rule("evaluation.fraction", "If `evaluation.sources` are given, no training data are held out.", "arithmetic")
def fraction(draft: Draft) -> Iterator[Fault]:
    """Refuses a held-out fraction together with separate evaluation sources."""
    given = draft.recipe.data.eval_fraction
    if draft.recipe.evaluation.sources and given not in (0, DEFAULT_FRACTION):
        message = f"{given} has no effect: with evaluation.sources no training data are held out"
        yield Fault("data.eval_fraction", message, assignment(data__eval_fraction=0))


@rule("evaluation.weight", "An evaluation reads each source separately, so weights have no effect.", "arithmetic")
def weight(draft: Draft) -> Iterator[Fault]:
    """Refuses weights of sources that are only used for evaluation."""
    for field, source in draft.recipe.evaluation.all_sources.items():
        if source.weight != 1:
            message = f"{source.weight} has no effect: weights only mix the training data"
            yield Fault(f"{field}.weight", message, "leave it out")


@rule("samples.never", "Samples need both prompts and steps after which they are written.", "arithmetic")
def samples_never(draft: Draft) -> Iterator[Fault]:
    """Refuses prompts that are never continued, and samples without prompts."""
    samples = draft.recipe.samples
    if samples.prompts and not samples.every_steps:
        fix = assignment(samples__every_steps=draft.recipe.train.max_steps or 100)
        yield Fault("samples.prompts", "has no effect: samples.every_steps is 0", fix)
    if samples.every_steps and not samples.prompts:
        message = f"{samples.every_steps} has no effect: there are no samples.prompts"
        yield Fault("samples.every_steps", message, """--set 'samples.prompts=["Once upon a time"]'""")


@rule(
    "tasks.never", "Tasks are scored on the checkpoints that a run writes, the last of which is exported.", "arithmetic"
)
def tasks_never(draft: Draft) -> Iterator[Fault]:
    """Refuses tasks that are never scored, and steps without a checkpoint or a task."""
    tasks, saved = draft.recipe.tasks, draft.recipe.checkpoint.every_steps
    if not tasks.names:
        for field in ("every_steps", "include_path", "limit"):
            if value := getattr(tasks, field):
                yield Fault(
                    f"tasks.{field}",
                    f"{value!r} has no effect: tasks.names is empty",
                    """--set 'tasks.names=["arc_easy"]'""",
                )
        return
    if tasks.every_steps and (not saved or tasks.every_steps % saved):
        message = f"{tasks.every_steps} needs checkpoints at these steps, but checkpoint.every_steps is {saved}"
        yield Fault("tasks.every_steps", message, assignment(checkpoint__every_steps=tasks.every_steps))
    if not draft.recipe.export.at_end and not tasks.every_steps:
        message = "has no effect: tasks.every_steps is 0, and the run exports nothing at its end (export.at_end)"
        yield Fault("tasks.names", message, assignment(export__at_end="true"))


RULES = (keeps_all, never_saved, never_evaluated, never, fraction, weight, samples_never, tasks_never)
