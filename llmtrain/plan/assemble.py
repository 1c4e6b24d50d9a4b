"""Builds a plan from a draft, whether or not the rules accept it."""

from __future__ import annotations

from llmtrain.errors import Problem
from llmtrain.plan.draft import Draft
from llmtrain.plan.flops import flops_per_token
from llmtrain.plan.plan import Batch, Layout, Plan, note
from llmtrain.plan.stages import plan_stages


def assemble(draft: Draft, notes: list[Problem] | None = None) -> Plan:
    """Returns the plan of a draft, legal or not; `resolve` checks the rules. Needs facts and integer degrees."""
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
