"""The table of all legality rules, and `resolve`, which returns the plan of a recipe that breaks none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.axes import ring_degree
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.facts.own_code import examined
from llmtrain.plan.facts.own_loss import Sizes
from llmtrain.plan.facts.vocabulary import with_resized_vocabulary
from llmtrain.plan.flops import flops_per_token
from llmtrain.plan.plan import Batch, Plan
from llmtrain.plan.predict import memory_of
from llmtrain.plan.predict.memory import LABELS, by_part
from llmtrain.plan.rules import adapter, backends, deepspeed, images, kernels, layout, model, own, training
from llmtrain.plan.rules.rule import ENGINE, Fault, Rule, rule, rules_of
from llmtrain.plan.stages import plan_stages
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import GIB, Cluster

DEEPSPEED_RULES = rules_of(deepspeed)
LEGALITY: tuple[Rule, ...] = (
    *rules_of(model, images, own, adapter, training, kernels, layout),
    *layout.DIVISIBILITY,
    *DEEPSPEED_RULES,
    *rules_of(backends),
)
"""Rules that do not depend on the amount of memory."""


def assemble(draft: Draft, notes: list[Problem] | None = None) -> Plan:
    """Returns the plan of a draft without checking any rule (`resolve` does). Needs facts and integer degrees."""
    recipe, facts = draft.recipe, draft.facts
    accumulation = draft.accumulation
    assert facts is not None, "a draft without facts has been refused"
    assert accumulation is not None, "the rules of layout and batch have refused the rest"
    # Without validation, because the parts are valid, and a search assembles thousands of plans.
    batch = Batch.model_construct(
        global_batch_size=recipe.batch.global_batch_size,
        micro_batch_size=recipe.batch.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        tokens_per_step=recipe.batch.global_batch_size * recipe.data.sequence_length,
    )
    return Plan.model_construct(
        recipe=recipe,
        cluster=draft.cluster,
        batch=batch,
        model=facts,
        stages=plan_stages(facts, draft.parallel.stages, recipe.data.sequence_length),
        flops_per_token=flops_per_token(facts, recipe.data.sequence_length),
        notes=tuple(problem.as_dict() for problem in notes or ()),
        optimizer=draft.optimizer,
    )


@rule("memory.fits", "arithmetic")
def fits(draft: Draft) -> Iterator[Fault]:
    """Refuses plans whose fullest rank needs more memory than a device has, if capacity and all degrees are known."""
    facts, stages = draft.facts, draft.parallel.stages
    if draft.cluster.spec.memory_bytes is None or facts is None or not draft.accumulation or stages > facts.layers:
        return
    if draft.parallel.expert > draft.cluster.world_size // draft.parallel.pipeline:
        return
    if draft.parallel.sequence % ring_degree(draft.parallel, facts):
        return
    memory = memory_of(assemble(draft))
    if memory is None or memory.fits or memory.capacity is None:
        return
    fullest = memory.stages[memory.fullest]
    where = f" on stage {memory.fullest}" if stages > 1 else ""
    message = (
        f"needs {memory.needed / GIB:,.1f} GiB of {memory.capacity / GIB:,.1f} GiB on a {draft.cluster.device}{where}, "
        f"{LABELS[fullest.moment]}: {by_part(fullest.peak)}"
    )
    yield Fault("parallel", message, "use more devices or larger ones, or change the layout or the precision")


RULES: tuple[Rule, ...] = (*LEGALITY, fits)

__all__ = ["ENGINE", "RULES", "Fault", "Rule", "allowed", "assemble", "broken", "resolve", "resolves"]


def broken(draft: Draft, rules: Sequence[Rule] = RULES) -> tuple[list[Problem], list[Problem]]:
    """Returns the problems of a draft: refusals, and notes on legal but questionable choices."""
    applicable = _applicable(draft, rules)
    refusals = [problem for rule in applicable if rule.refuses for problem in rule.problems(draft)]
    notes = [problem for rule in applicable if not rule.refuses for problem in rule.problems(draft)]
    return refusals, notes


def allowed(draft: Draft, rules: Sequence[Rule]) -> bool:
    """Whether no rule refuses a draft. Stops at the first refusal, because searches check many drafts."""
    return not any(rule.refuses and any(rule.faults(draft)) for rule in _applicable(draft, rules))


def _applicable(draft: Draft, rules: Sequence[Rule]) -> Sequence[Rule]:
    """Returns the rules that apply to the draft's backend."""
    if draft.parallel.strategy == "deepspeed":
        return rules
    return [rule for rule in rules if rule not in DEEPSPEED_RULES]


def resolve(recipe: Recipe, cluster: Cluster, facts: ModelFacts | None = None) -> Plan:
    """Returns the plan of a recipe on a cluster.

    facts: derived from the recipe by default. Raises RecipeError with all faults at once: those of the model's
    configuration, and every broken rule.
    """
    faults: list[Problem] = []
    code = None
    if facts is None:
        try:
            resized = with_resized_vocabulary(recipe)
            facts = model_facts(resized.model, resized.vocab_size, resized.code_dir)
            code = examined(recipe, Sizes(facts.vocab_size, facts.outputs))
            recipe = resized
        except RecipeError as error:
            faults.extend(error.problems)
    draft = Draft(recipe, cluster, facts)
    try:
        _ = draft.optimizer
    except RecipeError as error:  # the rules need what its trial would have found
        raise RecipeError([*faults, *error.problems]) from None
    refusals, notes = broken(draft)
    faults.extend(refusals)
    if faults:
        raise RecipeError(faults)
    return assemble(draft, notes).model_copy(update={"code": code})


def resolves(recipe: Recipe, cluster: Cluster, facts: ModelFacts, fields: dict[str, Any]) -> bool:
    """Whether a recipe with changed fields resolves to a plan."""
    try:
        resolve(recipe.with_(**fields), cluster, facts)
    except RecipeError:
        return False
    return True
