"""Distributes the decoder layers over pipeline stages by their FLOPs, and computes the share of each stage.

FLOPs are counted with the convention of published MFU figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.plan import StagePlan
from llmtrain.recipe import ParallelConfig


def matmul_parameters(facts: ModelFacts) -> int:
    """Returns N: the active parameters without the input tables.

    Looking up a row costs no FLOPs. A tied table counts once, since it is also the matrix of the output projection;
    learned positions are never multiplied.
    """
    tied_head = head_parameters(facts) if facts.tied_embeddings else 0
    return facts.active_parameters - facts.embedding_parameters + tied_head


def flops_per_token(facts: ModelFacts, sequence_length: int) -> float:
    """Returns the model FLOPs of forward and backward per token: 6·N + 12·L·d·T (PaLM, arXiv 2204.02311, appendix B).

    d is heads × head_dim. Attention counts in full: halving it because it is causal, as some do, lowers the figure.
    Recomputation under activation checkpointing does not count. A frozen weight has no product for its gradient: 4·N;
    below the first trained one there is no backward pass: 2·N.
    """
    if facts.trained_parameters is None:
        return float(6 * matmul_parameters(facts) + facts.layers * attention_flops(facts, sequence_length))
    return sum(layer_costs(facts, sequence_length))


def backward_layers(facts: ModelFacts) -> int:
    """Returns the number of layers that the backward pass reaches: from the first trained one on."""
    if facts.trained_parameters is None or facts.trains_embedding:
        return facts.layers
    below = next((n for n, trained in enumerate(facts.layer_trained_parameters) if trained), facts.layers)
    return facts.layers - below


def attention_flops(facts: ModelFacts, sequence_length: int) -> int:
    """Returns the FLOPs of one layer's attention per token, forward and backward."""
    return 12 * facts.heads * facts.head_dim * sequence_length


def head_parameters(facts: ModelFacts) -> int:
    """Returns the number of elements of the output projection, tied or not."""
    return facts.vocab_size * facts.hidden_size


@dataclass(frozen=True)
class StageBounds:
    """Decoder layers [first, last) of one stage."""

    first: int
    last: int


def balance(costs: Sequence[float], stages: int) -> list[StageBounds]:
    """Splits the layers into contiguous stages so that the cost of the costliest one is minimal.

    costs: one per decoder layer, in any unit; the embedding's is part of the first, the head's of the last. Raises
    RecipeError if there are more stages than layers.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        message = f"cannot cut {layers} layers into {stages} stages: every stage needs at least one layer"
        raise RecipeError(Problem("pipeline.layers", "parallel.pipeline", message, f"--set parallel.pipeline={layers}"))
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # The best splits of layers [0, end) into the stages so far.
    tables: list[Best] = [{end: (sums[end], 0) for end in range(1, layers + 1)}]
    for stage in range(2, stages + 1):
        tables.append(_one_more(stage, tables[-1], sums))
    bounds, end = [], layers
    for table in reversed(tables):
        cut = table[end][1]
        bounds.append(StageBounds(cut, end))
        end = cut
    return bounds[::-1]


Best = dict[int, tuple[float, int]]
"""Number of layers → cost of the costliest stage, and where the last stage begins."""


def _one_more(stage: int, previous: Best, sums: Sequence[float]) -> Best:
    """Returns the best splits into `stage` stages, from those into one fewer; if equal, with the longest last stage.

    As the last cut moves on, the stages before it cost more and the last one less. The best cut is where both costs
    meet, and it moves on with the end, so one walk along the layers serves all ends.
    """
    best: Best = {}
    cut = stage - 1
    for end in range(stage, len(sums)):
        while cut < end - 1 and previous[cut][0] < sums[end] - sums[cut]:
            cut += 1
        candidates = [cut - 1, cut] if cut > stage - 1 else [cut]
        cost, chosen = min(
            (max(previous[candidate][0], sums[end] - sums[candidate]), candidate) for candidate in candidates
        )
        while chosen > stage - 1 and max(previous[chosen - 1][0], sums[end] - sums[chosen - 1]) == cost:
            chosen -= 1
        best[end] = cost, chosen
    return best


def layer_costs(facts: ModelFacts, sequence_length: int) -> list[float]:
    """Returns the FLOPs per token of each decoder layer, the head's in the last one; see `flops_per_token`.

    An embedding is looked up, which takes almost no time; in a mixture of experts only the experts count that a token
    is routed to.
    """
    attention = attention_flops(facts, sequence_length)
    below = facts.layers - backward_layers(facts)
    costs = []
    for index, (parameters, idle) in enumerate(zip(facts.layer_parameters, facts.layer_idle_parameters, strict=True)):
        used = parameters - idle
        trained = min(facts.layer_trained_parameters[index], used) if facts.layer_trained_parameters else used
        is_reached = index >= below
        costs.append(2.0 * ((1 + is_reached) * used + trained) + (attention if is_reached else attention / 3))
    costs[-1] += (6.0 if facts.trains_head else 4.0) * head_parameters(facts)
    return costs


def stage_bounds(facts: ModelFacts, stages: int, sequence_length: int) -> list[StageBounds]:
    """Returns the layers of each stage, balanced by cost. Raises RecipeError if there are more stages than layers."""
    return balance(layer_costs(facts, sequence_length), stages)


@lru_cache(maxsize=4096)  # a search requests the same few repeatedly
def plan_stages(facts: ModelFacts, stages: int, sequence_length: int) -> tuple[StagePlan, ...]:
    """Returns all stages of the pipeline; empty without one. Raises as `stage_bounds` does.

    The input tables count for the first stage, the final norm and the head for the last, where a tied head is a copy.
    Families whose later layers look up other tables have those in addition.
    """
    if stages == 1:
        return ()
    costs = layer_costs(facts, sequence_length)
    bounds = balance(costs, stages)
    parameters = [sum(facts.layer_parameters[bound.first : bound.last]) for bound in bounds]
    parameters[0] += facts.embedding_parameters
    outside = facts.parameters - sum(facts.layer_parameters) - facts.embedding_parameters
    parameters[-1] += outside + (head_parameters(facts) if facts.tied_embeddings else 0)
    return tuple(
        StagePlan(
            layers=(bound.first, bound.last - 1),
            parameters=held,
            cost_share=sum(costs[bound.first : bound.last]) / sum(costs),
        )
        for bound, held in zip(bounds, parameters, strict=True)
    )


def describe_stages(stages: Sequence[StagePlan]) -> list[str]:
    """Returns a line for each stage; neighbouring stages that are equal share one."""
    lines = []
    shown = [(stage.layers[1] - stage.layers[0] + 1, stage.parameters, f"{stage.cost_share:.1%}") for stage in stages]
    for (layers, parameters, work), alike in groupby(enumerate(stages), key=lambda item: shown[item[0]]):
        members = list(alike)
        (number, first), (last_number, last) = members[0], members[-1]
        name = f"stage {number}" if len(members) == 1 else f"stages {number} to {last_number}"
        each = "" if len(members) == 1 else f"; each {layers} layers"
        held = f"layers {first.layers[0]} to {last.layers[1]}{each}, {parameters:,} parameters"
        lines.append(f"{name:<15} {held}, {work} of the work")
    return lines


def is_recomputed(parallel: ParallelConfig, layer: int) -> bool:
    """Whether a layer is computed again in the backward pass, in whole or in part; counted over all stages."""
    return parallel.activation_checkpointing != "none" and layer % parallel.checkpoint_every == 0
