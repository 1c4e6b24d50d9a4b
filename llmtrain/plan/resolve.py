"""A recipe on a cluster, resolved into a plan, or refused with every fault that it has."""

from __future__ import annotations

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.draft import Draft
from llmtrain.plan.flops import flops_per_token
from llmtrain.plan.model_facts import model_facts
from llmtrain.plan.plan import Batch, Layout, ModelFacts, Plan, note
from llmtrain.plan.rules import broken
from llmtrain.plan.stages import plan_stages
from llmtrain.recipe import Recipe


def resolve(recipe: Recipe, cluster: Cluster, facts: ModelFacts | None = None) -> Plan:
    """The plan of a recipe on a cluster.

    `facts` are found from the recipe where they are not given. Raises RecipeError with all faults at
    once: those of the model's configuration, and every broken rule.
    """
    faults: list[Problem] = []
    if facts is None:
        try:
            facts = model_facts(recipe.model, recipe.vocab_size)
        except RecipeError as error:
            faults.extend(error.problems)
    draft = Draft(recipe, cluster, facts)
    refusals, notes = broken(draft)
    faults.extend(refusals)
    if faults:
        raise RecipeError(faults)
    return assemble(draft, notes)


def assemble(draft: Draft, notes: list[Problem] | None = None) -> Plan:
    """The plan of a draft, legal or not; `resolve` is what asks the rules. Needs facts and whole degrees."""
    recipe, parallel, facts = draft.recipe, draft.recipe.parallel, draft.facts
    dp, accumulation = draft.dp, draft.accumulation
    assert facts is not None, "a draft without facts has been refused"
    assert dp is not None and accumulation is not None, "the rules of layout and batch have refused the rest"  # noqa: PT018
    layout = Layout(
        dp=dp,
        pp=parallel.pipeline,
        tp=parallel.tensor,
        sp=parallel.sequence,
        ep=parallel.expert,
        zero_stage=parallel.zero_stage,
    )
    batch = Batch(
        global_batch_size=recipe.batch.global_batch_size,
        micro_batch_size=recipe.batch.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        tokens_per_step=recipe.batch.global_batch_size * recipe.data.sequence_length,
    )
    return Plan(
        recipe=recipe,
        cluster=draft.cluster,
        layout=layout,
        batch=batch,
        model=facts,
        stages=plan_stages(facts, parallel.pipeline, recipe.data.sequence_length),
        flops_per_token=flops_per_token(facts, recipe.data.sequence_length),
        notes=tuple(note(problem) for problem in notes or ()),
    )
