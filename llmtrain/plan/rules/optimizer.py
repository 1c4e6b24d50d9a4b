"""Rules for optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from llmtrain.errors import did_you_mean, format_value
from llmtrain.plan.axes import EXPERT
from llmtrain.plan.draft import Draft
from llmtrain.plan.optimizers import optimizer_of
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule("optim.options", "Each optimizer has options of its own; an unknown one would be ignored.", "arithmetic")
def options(draft: Draft) -> Iterator[Fault]:
    """Refuses options that the optimizer does not have, and values that they cannot have."""
    optim = draft.recipe.optim
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


@rule(
    "optim.schedule_free_mean",
    "Schedule-free AdamW computes the averaged weights from the trained ones, in which they have the share `betas[0]`.",
    "arithmetic",
)
def schedule_free_mean(draft: Draft) -> Iterator[Fault]:
    """Refuses schedule-free AdamW if the trained weights contain no share of the averaged ones."""
    optim = draft.recipe.optim
    if optim.name == "schedule_free_adamw" and not optim.betas[0]:
        message = f"the first must be greater than 0 with 'schedule_free_adamw', not {format_value(optim.betas[0])}"
        yield Fault("optim.betas", message, assignment(optim__betas="'[0.9, 0.999]'"))


@rule(
    "optim.schedule_free_kto",
    "KTO estimates its divergence in evaluation passes, which read the averaged weights of schedule-free AdamW "
    "instead of the trained ones.",
    "read",
)
def schedule_free_kto(draft: Draft) -> Iterator[Fault]:
    """Refuses KTO with schedule-free AdamW."""
    recipe = draft.recipe
    if recipe.optim.name == "schedule_free_adamw" and recipe.objective.name == "kto":
        message = (
            "'schedule_free_adamw' is not supported with KTO, which would estimate its divergence on averaged weights"
        )
        yield Fault("optim.name", message, assignment(optim__name="adamw"))


@rule(
    "optim.schedule_free_rate",
    "The averaging of schedule-free AdamW replaces a decaying learning rate; with both, it averages too little.",
    "read",
    refuses=False,
)
def schedule_free_rate(draft: Draft) -> Iterator[Fault]:
    """Gives a note for a decaying learning rate with schedule-free AdamW."""
    optim = draft.recipe.optim
    if optim.name == "schedule_free_adamw" and optim.schedule != "constant":
        message = f"'{optim.schedule}' is not recommended with 'schedule_free_adamw', which needs no decay"
        yield Fault("optim.schedule", message, assignment(optim__schedule="constant"))


@rule(
    "optim.muon_experts", "With experts distributed over ranks, Muon trained other weights than the reference.", "run"
)
def muon_experts(draft: Draft) -> Iterator[Fault]:
    """Refuses Muon for mixtures of experts."""
    if draft.recipe.optim.name == "muon" and draft.facts is not None and draft.facts.experts:
        message = "'muon' has not been certified for mixtures of experts"
        yield Fault("optim.name", message, assignment(optim__name="adamw"))


@rule(
    "optim.adafactor_experts",
    "Adafactor takes sums over whole weights. Gate and up projections of distributed experts are one weight in two "
    "tensors, which DeepSpeed may update one after the other.",
    "run",
    axis=EXPERT,
)
def adafactor_experts(draft: Draft) -> Iterator[Fault]:
    """Refuses Adafactor for distributed experts."""
    if draft.recipe.optim.name == "adafactor":
        message = f"must be 1, not {draft.parallel.expert}: 'adafactor' needs sums over whole weights of experts"
        yield Fault("parallel.expert", message, assignment(parallel__expert=1))


@rule(
    "optim.adamw_8bit_nvme",
    "DeepSpeed swaps optimizer states through fp32 buffers, in which each byte becomes a number of four bytes.",
    "run",
)
def adamw_8bit_nvme(draft: Draft) -> Iterator[Fault]:
    """Refuses states on disks for 8-bit moments."""
    if optimizer_of(draft.recipe.optim).codes and draft.recipe.parallel.offload_optimizer == "nvme":
        message = (
            f"'nvme' is not supported with '{draft.recipe.optim.name}': its moments are bytes, "
            "which DeepSpeed would swap as fp32 numbers"
        )
        yield Fault("parallel.offload_optimizer", message, assignment(parallel__offload_optimizer="cpu"))


RULES = (
    options,
    muon_experts,
    adafactor_experts,
    adamw_8bit_nvme,
    schedule_free_mean,
    schedule_free_kto,
    schedule_free_rate,
)
