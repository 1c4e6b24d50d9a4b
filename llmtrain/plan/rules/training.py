"""Rules for the objective, the optimizer, and what a run evaluates, samples, scores and saves."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import ValidationError

from llmtrain.errors import did_you_mean, format_value
from llmtrain.plan.axes import SEQUENCE
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.families import MIXES_DOCUMENTS
from llmtrain.plan.facts.own_loss import RESERVED
from llmtrain.plan.optimizers import optimizer_of
from llmtrain.plan.rules.rule import Fault, assignment, fault_for, rule
from llmtrain.recipe import DataConfig, Recipe
from llmtrain.recipe.own_code import is_path


@rule("objective.whole_pairs", "read")
def objective_whole_pairs(draft: Draft) -> Iterator[Fault]:
    """Refuses options that split, cut or separate documents (`llmtrain/data/samples.py`) for losses that are not a sum
    over tokens. A part of a completion has another log-probability than the whole completion."""
    data, objective = draft.recipe.data, draft.recipe.objective
    if not objective.reads_whole_documents:
        return
    if data.packing == "concat":
        what = "completions are" if objective.reads_completions else "the loss of a document is"
        message = f"`concat` cuts sequences anywhere, but {what} never split"
        yield Fault("data.packing", message, assignment(data__packing="best_fit"))
    if data.packing == "none" and objective.compares_pairs:
        message = "with `none` a sequence is one document, but a pair is two conversations in one sequence"
        yield Fault("data.packing", message, assignment(data__packing="best_fit"))
    if data.too_long == "cut_turns" and objective.reads_completions:
        message = "`cut_turns` is not possible: completions are read whole, and those that are too long are dropped"
        yield Fault("data.too_long", message, assignment(data__too_long="drop"))


@rule("objective.completions", "arithmetic")
def objective_completions(draft: Draft) -> Iterator[Fault]:
    """Refuses losses that include the prompt's tokens: they depend on the probability of a completion, given its
    prompt."""
    if draft.recipe.objective.reads_completions and draft.recipe.data.train_on == "all":
        message = "`all` has no effect: only the turns of the assistant in completions count"
        yield Fault("data.train_on", message, assignment(data__train_on="assistant"))


@rule("objective.documents", "read")
def objective_documents(draft: Draft) -> Iterator[Fault]:
    """Refuses attention across documents, and families that carry state from one document to the next, for losses that
    are not a sum over tokens. One sequence contains several documents: each would depend on the previous one."""
    facts, objective = draft.facts, draft.recipe.objective
    if not objective.reads_whole_documents or draft.recipe.data.packing == "none":
        return
    each = "each completion would be computed from those before it in its sequence, such as the chosen one"
    if not objective.reads_completions:
        each = "each document would be computed from those before it in its sequence"
    if not draft.recipe.data.mask_documents:
        message = each
        yield Fault("data.mask_documents", message, assignment(data__mask_documents="true"))
    elif facts is not None and facts.text_type in MIXES_DOCUMENTS:
        message = f"'{facts.text_type}' lets packed documents influence each other, whatever the attention mask: {each}"
        yield Fault("objective.name", message, "use a model of another family, such as llama or qwen3")


@rule("objective.slices", "arithmetic", axis=SEQUENCE)
def objective_slices(draft: Draft) -> Iterator[Fault]:
    """Refuses slices of sequences for a user's own loss of whole documents. A rank has the logits of its slice only,
    and its documents may begin or end on another rank."""
    objective = draft.recipe.objective
    if objective.is_own and objective.reads_whole_documents:
        message = (
            f"must be 1, not {draft.parallel.sequence}: with objective.unit={objective.unit}, {objective.name} needs "
            "the logits of whole documents, of which each rank would have a slice"
        )
        yield Fault("parallel.sequence", message, assignment(parallel__sequence=1))


@rule("objective.hidden_states", "read")
def objective_hidden_states(draft: Draft) -> Iterator[Fault]:
    """Refuses a loss of hidden states if the head is split, copied for threads, or part of a model of one's own. The
    loss is called in place of the head, with its whole weight."""
    recipe, parallel = draft.recipe, draft.parallel
    if not recipe.objective.hidden_states:
        return
    reasons = {
        "tensor parallel ranks hold slices of the head": parallel.tensor > 1,
        "nn.DataParallel copies the model, but not a replacement of its head": parallel.strategy == "data_parallel",
        "the head of a model of your own may be any code": recipe.model.build is not None,
    }
    fix = assignment(objective__hidden_states="false")
    yield from fault_for(reasons, "objective.hidden_states", "hidden states are not available", fix)


@rule("train.neftune", "read")
def neftune(draft: Draft) -> Iterator[Fault]:
    """Refuses NEFTune with tensor or sequence parallelism, with `nn.DataParallel`, and for objectives on preferences.
    Ranks would hold slices of the embeddings, threads would share them, and the reference model has no noise."""
    recipe, parallel = draft.recipe, draft.parallel
    if not recipe.train.neftune_alpha:
        return
    reasons = {
        "tensor parallel ranks may hold slices of the embeddings": parallel.tensor > 1,
        "each rank has a slice of the sequences": parallel.sequence > 1,
        "the threads of nn.DataParallel share the embedding": parallel.strategy == "data_parallel",
        f"'{recipe.objective.name}' compares with log-probabilities that have no noise": recipe.objective.is_preference,
    }
    fix = assignment(train__neftune_alpha=0)
    yield from fault_for(reasons, "train.neftune_alpha", "noise cannot be added", fix)


@rule("objective.dropout", "read", refuses=False)
def objective_dropout(draft: Draft) -> Iterator[Fault]:
    """Gives a note for dropout of the model's configuration, which is turned off (`training_configuration`). The
    reference's log-probabilities are computed without dropout."""
    objective, facts = draft.recipe.objective, draft.facts
    if facts is None or not objective.is_preference:
        return
    off = {name: rate for name, rate in facts.dropout if name not in draft.recipe.model.config}
    if off:
        message = f"the dropout of the model's configuration is off with '{objective.name}': {', '.join(off)}"
        fix = "to keep it: " + assignment(**{f"model__config__{name}": rate for name, rate in off.items()})
        yield Fault("model.config", message, fix)


@rule("optim.options", "arithmetic")
def optim_options(draft: Draft) -> Iterator[Fault]:
    """Refuses options that the optimizer does not have, and values that they cannot have. Each optimizer has options of
    its own; an unknown one would be ignored."""
    optim = draft.recipe.optim
    if is_path(optim.name):  # its trial has built it with them
        return
    model = optimizer_of(optim).options
    known = tuple(model.model_fields)
    try:
        model.model_validate(optim.options)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            name = str(fault["loc"][0])
            if fault["type"] == "extra_forbidden":
                message = f"'{optim.name}' has no such option{did_you_mean(name, known)}"
                fix = f"options of {optim.name}: {', '.join(known)}" if known else assignment(optim__options="{}")
            else:
                reason = fault["msg"].replace("Input should be", "must be", 1)
                message = f"{format_value(fault['input'])} is invalid: {reason}"
                fix = ""
            yield Fault(f"optim.options.{name}", message, fix)


@rule("optim.own_fields", "read")
def optim_own_fields(draft: Draft) -> Iterator[Fault]:
    """Refuses fields that a class of one's own does not get. It is built with `lr`, `weight_decay` and `optim.options`;
    a class without weight decay would silently not decay."""
    optim, tried = draft.recipe.optim, draft.optimizer
    if tried is None:
        return
    for name in ("betas", "eps"):
        value = getattr(optim, name)
        if value != type(optim).model_fields[name].default:
            message = (
                f"{format_value(value)} has no effect on {optim.name}, which gets its arguments from optim.options"
            )
            yield Fault(f"optim.{name}", message, f"leave it out, or name the argument in optim.options: {name}")
    if optim.weight_decay and not tried.decays:
        message = f"{optim.weight_decay} has no effect on {optim.name}, which has no `weight_decay` in its defaults"
        yield Fault("optim.weight_decay", message, assignment(optim__weight_decay=0))


@rule("optim.own_parts", "run")
def optim_own_parts(draft: Draft) -> Iterator[Fault]:
    """Refuses plans that give parts of weights to a class of one's own that needs whole ones. Before a run, flat parts
    of a few weights are trained beside the whole ones (`plan/facts/own_optimizer.py`): a class whose update depends on
    other elements of a weight, or on their number, trains other weights, or keeps other numbers in its groups."""
    tried, parallel = draft.optimizer, draft.parallel
    if tried is None or tried.unit == "element":
        return
    name, whole = draft.recipe.optim.name, tried.unit == "weight"
    needs = "whole weights" if whole else "all weights of the model together"
    if tried.others:
        why = f"it keeps {', '.join(tried.others)} of another shape than the weight"
    elif tried.deviation > 1:
        why = "it failed with flat parts of weights, or trained entirely other weights"
    else:
        what = (
            "weights differ by" if not tried.group_numbers else "weights, or the numbers of its groups, differ by up to"
        )
        why = f"with flat parts of weights, its {what} {tried.deviation:.1%}"
    message = f"{name} needs {needs}: {why}"
    on_parts = {"parallel.tensor": parallel.tensor, "parallel.expert": parallel.expert}
    if not whole:
        on_parts["parallel.pipeline"] = parallel.pipeline
    for field, degree in on_parts.items():
        if degree > 1:
            yield Fault(field, f"must be 1, not {degree}: {message}", f"--set {field}=1")
    if parallel.strategy == "fsdp2":
        yield Fault("parallel.accelerate", f"'fsdp2' shards weights; {message}", assignment(parallel__accelerate="ddp"))
    elif parallel.strategy == "deepspeed" and parallel.zero_stage:
        yield Fault(
            "parallel.zero_stage",
            f"must be 0, not {parallel.zero_stage}: {message}",
            assignment(parallel__zero_stage=0),
        )
    elif parallel.strategy == "deepspeed" and draft.weight_dtype != "fp32":
        message = f"'{parallel.precision}' makes DeepSpeed train flat copies; {message}"
        yield Fault("parallel.precision", message, assignment(parallel__precision="fp32"))


@rule("optim.own_horovod", "read")
def optim_own_horovod(draft: Draft) -> Iterator[Fault]:
    """Refuses Horovod with a class of one's own. Horovod builds another object of its class, without its arguments
    (`horovod/torch/optimizer.py`)."""
    if draft.optimizer is not None and draft.parallel.strategy == "horovod":
        message = f"'horovod' would build {draft.recipe.optim.name} again without the arguments in optim.options"
        yield Fault("parallel.backend", message, assignment(parallel__backend="deepspeed"))


@rule("optim.own_nvme", "read")
def optim_own_nvme(draft: Draft) -> Iterator[Fault]:
    """Refuses states on disks for a class of one's own. DeepSpeed swaps the tensors of a state through fp32 buffers; it
    has been tried with torch's Adam alone."""
    if draft.optimizer is not None and draft.parallel.offload_optimizer == "nvme":
        message = f"'nvme' is not supported with {draft.recipe.optim.name}, whose states DeepSpeed may not swap"
        yield Fault("parallel.offload_optimizer", message, assignment(parallel__offload_optimizer="cpu"))


@rule("optim.own_memory", "read", refuses=False)
def optim_own_memory(draft: Draft) -> Iterator[Fault]:
    """Gives a note for states of other shapes than their weight. Only the class knows their sizes, so the predicted
    memory leaves them out."""
    if draft.optimizer is not None and draft.optimizer.others:
        names = ", ".join(draft.optimizer.others)
        message = f"{draft.recipe.optim.name} also keeps {names}, which the predicted memory does not include"
        yield Fault("optim.name", message)


@rule("optim.schedule_free_mean", "arithmetic")
def optim_schedule_free_mean(draft: Draft) -> Iterator[Fault]:
    """Refuses schedule-free AdamW if the trained weights contain no share of the averaged ones. Schedule-free AdamW
    computes the averaged weights from the trained ones, in which they have the share `betas[0]`."""
    optim = draft.recipe.optim
    if optim.name == "schedule_free_adamw" and not optim.betas[0]:
        message = f"the first must be greater than 0 with 'schedule_free_adamw', not {format_value(optim.betas[0])}"
        yield Fault("optim.betas", message, assignment(optim__betas="'[0.9, 0.999]'"))


@rule("optim.schedule_free_kto", "read")
def optim_schedule_free_kto(draft: Draft) -> Iterator[Fault]:
    """Refuses KTO with optimizers that average, as schedule-free AdamW does. KTO estimates its divergence in evaluation
    passes, which read the averaged weights instead of the trained ones."""
    recipe, own = draft.recipe, draft.optimizer
    if recipe.objective.name == "kto" and (recipe.optim.name == "schedule_free_adamw" or (own and own.averages)):
        message = (
            f"{recipe.optim.name} is not supported with KTO, which would estimate its divergence on averaged weights"
        )
        yield Fault("optim.name", message, assignment(optim__name="adamw"))


@rule("optim.schedule_free_rate", "read", refuses=False)
def optim_schedule_free_rate(draft: Draft) -> Iterator[Fault]:
    """Gives a note for a decaying learning rate with schedule-free AdamW. The averaging of schedule-free AdamW replaces
    a decaying learning rate; with both, it averages too little."""
    optim = draft.recipe.optim
    if optim.name == "schedule_free_adamw" and optim.schedule != "constant":
        message = f"'{optim.schedule}' is not recommended with 'schedule_free_adamw', which needs no decay"
        yield Fault("optim.schedule", message, assignment(optim__schedule="constant"))


@rule("optim.adamw_8bit_nvme", "run")
def optim_adamw_8bit_nvme(draft: Draft) -> Iterator[Fault]:
    """Refuses states on disks for 8-bit moments. DeepSpeed swaps optimizer states through fp32 buffers, in which each
    byte becomes a number of four bytes."""
    if optimizer_of(draft.recipe.optim).codes and draft.recipe.parallel.offload_optimizer == "nvme":
        message = (
            f"'nvme' is not supported with '{draft.recipe.optim.name}': its moments are bytes, "
            "which DeepSpeed would swap as fp32 numbers"
        )
        yield Fault("parallel.offload_optimizer", message, assignment(parallel__offload_optimizer="cpu"))


@rule("checkpoint.keeps_all", "arithmetic")
def checkpoint_keeps_all(draft: Draft) -> Iterator[Fault]:
    """Refuses options that keep some checkpoints longer if all checkpoints are kept anyway. Without `keep_last`, all
    checkpoints are kept, so the other options have no effect."""
    policy = draft.recipe.checkpoint
    if policy.keep_last is not None:
        return
    for field in ("keep_every_steps", "keep_best"):
        value = getattr(policy, field)
        if value is not None:
            message = f"{value} has no effect: all checkpoints are kept"
            yield Fault(f"checkpoint.{field}", message, assignment(checkpoint__keep_last=3))


@rule("checkpoint.never_saved", "arithmetic")
def checkpoint_never_saved(draft: Draft) -> Iterator[Fault]:
    """Refuses a `keep_every_steps` with multiples at which no checkpoint is saved. Only steps after which a checkpoint
    is written can be kept: the multiples of `every_steps`, and the last one."""
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


@rule("checkpoint.never_evaluated", "arithmetic")
def checkpoint_never_evaluated(draft: Draft) -> Iterator[Fault]:
    """Refuses `keep_best` if no checkpoint other than the last one coincides with an evaluation. A checkpoint can only
    rank among the best if its own weights were evaluated, right after the step of the checkpoint. Callbacks may ask for
    further checkpoints and evaluations."""
    recipe = draft.recipe
    saved, evaluated = recipe.checkpoint.every_steps, recipe.evaluation.every_steps
    if recipe.checkpoint.keep_best is None or (evaluated and recipe.callbacks):
        return
    if not (saved and evaluated) or math.lcm(saved, evaluated) > (recipe.train.max_steps or math.inf):
        message = (
            f"{recipe.checkpoint.keep_best} has no effect: no step before the last has both a checkpoint "
            f"(every_steps={saved}) and an evaluation (evaluation.every_steps={evaluated})"
        )
        fix = assignment(evaluation__every_steps=saved) if saved else ""
        yield Fault("checkpoint.keep_best", message, fix)


@rule("evaluation.metric", "arithmetic")
def evaluation_metric(draft: Draft) -> Iterator[Fault]:
    """Refuses a metric by which checkpoints are compared, or a run ends, if no evaluation has it. Callbacks and losses
    of the user's own may add any metric to an evaluation."""
    recipe = draft.recipe
    if recipe.callbacks or is_path(recipe.objective.name):
        return
    stopping = recipe.train.early_stopping
    wanted = {"checkpoint.best_metric": recipe.checkpoint.best_metric}
    if stopping:
        wanted["train.early_stopping.metric"] = stopping.metric
    known = evaluation_metrics(recipe)
    for field, name in wanted.items():
        if not (name in known or name.startswith(OF_SOURCE)):
            message = f"{format_value(name)} is no metric of an evaluation{did_you_mean(name, known)}"
            yield Fault(field, message, f"its metrics are {', '.join(known)}")


OF_SOURCE = "eval_loss_by_source/"
OF_PARTS = ("_by_set", "_by_source")


def evaluation_metrics(recipe: Recipe) -> list[str]:
    """Returns the names of the metrics that every evaluation of a recipe has, except for those of its sources."""
    names = ["eval_loss"]
    if not recipe.objective.is_preference:
        names += ["perplexity", "bits_per_byte"]
    else:
        names += ["rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy"]
        names += [] if recipe.objective.compares_pairs else ["kl"]
    names += recipe.evaluation.metrics
    return [*names, *(f"{name}_by_set/{of}" for of in recipe.evaluation.sets for name in names)]


@rule("evaluation.metrics", "arithmetic")
def evaluation_metrics_of_tokens(draft: Draft) -> Iterator[Fault]:
    """Refuses metrics of one's own for losses of completions, and under names that a run uses. A metric is a mean over
    target tokens, which would not distinguish chosen completions from rejected ones."""
    recipe = draft.recipe
    for name in recipe.evaluation.metrics:
        if recipe.objective.reads_completions:
            message = "would be a mean over the tokens of chosen and rejected completions alike"
            yield Fault(f"evaluation.metrics.{name}", message, "return it as a further metric of a loss of your own")
        if name in RESERVED or name.endswith(OF_PARTS):
            yield Fault(f"evaluation.metrics.{name}", "is a name that the metrics of a run have", "use another word")


@rule("early_stopping.never", "arithmetic")
def early_stopping_never(draft: Draft) -> Iterator[Fault]:
    """Refuses early stopping if nothing is ever evaluated, or if the run ends before it can stop."""
    stopping, every = draft.recipe.train.early_stopping, draft.recipe.evaluation.every_steps
    steps = draft.recipe.train.max_steps
    if stopping is None:
        return
    if not every:
        fix = assignment(evaluation__every_steps=max(1, (steps or 1000) // 20))
        yield Fault("train.early_stopping", "has no effect: evaluation.every_steps is 0", fix)
    elif steps and not draft.recipe.callbacks and stopping.patience * every >= steps:
        message = f"{stopping.patience} has no effect: {steps:,} steps have too few evaluations, one every {every:,}"
        yield Fault("train.early_stopping.patience", message, assignment(evaluation__every_steps=max(1, every // 2)))


DEFAULT_FRACTION = DataConfig.model_fields["eval_fraction"].default


@rule("evaluation.never", "arithmetic")
def evaluation_never(draft: Draft) -> Iterator[Fault]:
    """Refuses evaluation options if `every_steps` is 0, so that nothing is ever evaluated."""
    evaluation = draft.recipe.evaluation
    if evaluation.every_steps:
        return
    fix = assignment(evaluation__every_steps=draft.recipe.train.max_steps or 100)
    for field in ("sources", "sets", "at_start", "metrics"):
        if getattr(evaluation, field):
            yield Fault(f"evaluation.{field}", "has no effect: evaluation.every_steps is 0", fix)


@rule("evaluation.fraction", "arithmetic")
def evaluation_fraction(draft: Draft) -> Iterator[Fault]:
    """Refuses a held-out fraction together with separate evaluation sources. If `evaluation.sources` are given, no
    training data are held out."""
    given = draft.recipe.data.eval_fraction
    if draft.recipe.evaluation.sources and given not in (0, DEFAULT_FRACTION):
        message = f"{given} has no effect: with evaluation.sources no training data are held out"
        yield Fault("data.eval_fraction", message, assignment(data__eval_fraction=0))


@rule("evaluation.weight", "arithmetic")
def evaluation_weight(draft: Draft) -> Iterator[Fault]:
    """Refuses weights of sources that are only used for evaluation. An evaluation reads each source separately, so
    weights have no effect."""
    for field, source in draft.recipe.evaluation.all_sources.items():
        if source.weight != 1:
            message = f"{source.weight} has no effect: weights only mix the training data"
            yield Fault(f"{field}.weight", message, "leave it out")


@rule("samples.never", "arithmetic")
def samples_never(draft: Draft) -> Iterator[Fault]:
    """Refuses prompts that are never continued, and samples without prompts. Samples need both prompts and steps after
    which they are written."""
    samples = draft.recipe.samples
    if samples.prompts and not samples.every_steps:
        fix = assignment(samples__every_steps=draft.recipe.train.max_steps or 100)
        yield Fault("samples.prompts", "has no effect: samples.every_steps is 0", fix)
    if samples.every_steps and not samples.prompts:
        message = f"{samples.every_steps} has no effect: there are no samples.prompts"
        yield Fault("samples.every_steps", message, """--set 'samples.prompts=["Once upon a time"]'""")


@rule("tasks.never", "arithmetic")
def tasks_never(draft: Draft) -> Iterator[Fault]:
    """Refuses tasks that are never scored, and steps without a checkpoint or a task. Tasks are scored on the
    checkpoints that a run writes, the last of which is exported."""
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
