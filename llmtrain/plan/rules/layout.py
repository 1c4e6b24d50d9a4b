"""Rules for the batch and the degrees of parallelism: divisibility."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import CHOSEN, EXPERT, TENSOR, Axis, model_parallel_size, ring_degree
from llmtrain.plan.draft import COMPUTE_DTYPE, Draft, divisors
from llmtrain.plan.facts.families import EXPERT_FAMILIES, MIXING_PARTS
from llmtrain.plan.rules.model import lower_precision
from llmtrain.plan.rules.rule import Fault, Rule, assignment, rule


def divisors_near(number: int, value: int) -> list[int]:
    """Returns the largest divisor of `number` up to `value` and the smallest one from `value` on."""
    value = min(max(value, 1), number)
    found = divisors(number)
    return sorted({max(d for d in found if d <= value), min(d for d in found if d >= value)})


@rule("layout.world", "arithmetic")
def world(draft: Draft) -> Iterator[Fault]:
    """Refuses degrees whose product does not divide the number of devices: pipeline × tensor × sequence ranks share one
    replica."""
    if draft.data_parallel_size:
        return
    parallel, cluster, product = draft.parallel, draft.cluster, model_parallel_size(draft.parallel)
    degrees = {axis.name: axis.degree(parallel) for axis in CHOSEN if axis.has_ranks}
    equation = f"{' × '.join(degrees)} = {' × '.join(str(degree) for degree in degrees.values())} = {product}"
    message = f"{equation} does not divide {cluster.nodes} × {cluster.devices_per_node} = {cluster.world_size} devices"
    # Suggest changing the largest degree and keeping the others.
    name = max(degrees, key=lambda name: degrees[name])
    rest = product // degrees[name]
    fix = f"use a multiple of {product} devices"
    if cluster.world_size % rest == 0:
        best = divisors_near(cluster.world_size // rest, degrees[name])[0]
        fix += f", or {assignment(**{f'parallel__{name}': best})}"
    yield Fault(f"parallel.{name}", message, fix)


def _divides(axis: Axis) -> Rule:
    """Returns the rule that an axis' degree must divide each size which the axis splits."""

    def check(draft: Draft) -> Iterator[Fault]:
        degree = axis.degree(draft.parallel)
        for what, number in axis.limits(draft.recipe, draft.facts, draft.data_parallel_size or 0):
            if number % degree:
                message = f"{degree} does not divide {what}"
                yield Fault(axis.field, message, f"use {_or(divisors_near(number, degree))}")

    text = f"Refuses degrees that do not divide what they split. {axis.reason}"
    return Rule(f"layout.{axis.name}_divides", text, "arithmetic", check, axis)


DIVISIBILITY = tuple(_divides(axis) for axis in CHOSEN if axis.reason)


@rule("layout.sequence_ring", "run")
def sequence_ring(draft: Draft) -> Iterator[Fault]:
    """Refuses rings that do not divide the sequence parallel ranks, or sequences into two equal blocks for each group
    of ranks, and models whose parts need contiguous slices. Each rank of a ring holds an early and a late block, so
    that causal attention takes all of them equally long. Blocks are combined by their log-sum-exp, which of the
    attention implementations `varlen` computes."""
    recipe, facts, degree = draft.recipe, draft.facts, draft.parallel.sequence
    ring, length = ring_degree(draft.parallel, facts), recipe.data.sequence_length
    if degree % ring:
        message = f"{ring} does not divide parallel.sequence = {degree}"
        yield Fault("parallel.sequence_ring", message, f"use {_or(divisors_near(degree, ring))}")
    if ring == 1 or degree % ring:
        return
    field, fix = "parallel.sequence_ring", assignment(parallel__sequence_ring=1)
    needed = f"a ring of {ring}"
    if facts is not None and facts.heads % draft.parallel.tensor == 0:
        heads = facts.heads // draft.parallel.tensor
        if heads % degree:
            field, fix = (
                "parallel.sequence",
                f"use {_or([one for one in divisors_near(heads, degree) if one <= degree])}",
            )
            needed = f"{degree} ranks divide {heads} heads only with {needed}, which"
    if length % (2 * ring):
        message = f"{needed} cuts sequences into {2 * ring} equal blocks, and {length} tokens are not divisible by that"
        longer = -(-length // (2 * ring)) * 2 * ring
        yield Fault(field, message, f"{fix}, or {assignment(data__sequence_length=longer)}")
    if facts is not None and facts.text_type in MIXING_PARTS:
        message = f"{needed} needs attention in every layer: recurrences of '{facts.text_type}' need contiguous slices"
        yield Fault(field, message, fix)
    if recipe.model.attention_kernel != "varlen":
        message = f"{needed} needs model.attention 'varlen', not '{recipe.model.attention_kernel}'"
        varlen = assignment(model__attention="varlen")
        if COMPUTE_DTYPE[draft.parallel.precision] == "fp32" and not draft.cluster.spec.on_cpu:
            varlen += f" {lower_precision(draft)}"
        yield Fault(field, message, f"{fix}, or {varlen}")


@rule("layout.expert", "arithmetic", axis=EXPERT)
def expert(draft: Draft) -> Iterator[Fault]:
    """Refuses expert parallelism of dense models, and of families whose tiny copy fails or deviates
    (`docs/reference/families_expert.md`). Experts can be distributed if `transformers` computes them by a function that
    can be chosen (`transformers/integrations/moe.py:ExpertsInterface`)."""
    degree, facts = draft.parallel.expert, draft.facts
    if facts is None:
        return
    if not facts.experts:
        message = f"must be 1, not {degree}: '{facts.model_type}' has no experts"
        yield Fault("parallel.expert", message, assignment(parallel__expert=1))
    elif facts.trials is None and facts.model_type not in EXPERT_FAMILIES:
        message = f"must be 1, not {degree}: the experts of '{facts.model_type}' cannot be distributed"
        yield Fault("parallel.expert", message, assignment(parallel__expert=1))


@rule("layout.tensor_node", "arithmetic", axis=TENSOR, refuses=False)
def tensor_node(draft: Draft) -> Iterator[Fault]:
    """Gives a note for tensor parallel groups that span nodes. A tensor parallel group communicates in every layer."""
    parallel, cluster = draft.parallel, draft.cluster
    if cluster.devices_per_node % parallel.tensor and cluster.nodes > 1:
        node, network, links = cluster.spec.node_bandwidth, cluster.spec.network_bandwidth, "the network"
        if node and network:
            times = f"{node / network:.0f} times that"
            links = f"{network / 1e9:g} GB/s between nodes, but {node / 1e9:g} GB/s within a node ({times})"
        spanned = f"groups of {parallel.tensor} devices span nodes of {cluster.devices_per_node} devices"
        message = f"{spanned}: every layer waits for {links}"
        fix = assignment(parallel__tensor=divisors_near(cluster.devices_per_node, parallel.tensor)[0])
        yield Fault("parallel.tensor", message, fix)


@rule("batch.divides", "arithmetic")
def divides(draft: Draft) -> Iterator[Fault]:
    """Refuses batch sizes that leave a remainder, and suggests the nearest sizes that leave none. Every replica runs
    the same number of equal micro-batches; a rounded accumulation trains another batch size."""
    batch, dp = draft.recipe.batch, draft.data_parallel_size
    total, micro = batch.global_batch_size, batch.micro_batch_size
    if dp is None or draft.accumulation is not None:
        return
    per_pass = micro * dp
    below = total // per_pass * per_pass
    totals = [size for size in (below, below + per_pass) if size]
    message = (
        f"global_batch_size = micro_batch_size × accumulation × data parallel size has no integer solution: "
        f"{total} = {micro} × {total / per_pass:g} × {dp}; nearest global batch sizes: {_or(totals)}"
    )
    fixes = [assignment(batch__global_batch_size=min(totals, key=lambda size: abs(size - total)))]
    micros = [] if total % dp else divisors_near(total // dp, micro)
    if micros:
        message += f"; or at {total}, micro batch sizes: {_or(micros)}"
        fixes.append(assignment(batch__micro_batch_size=min(micros, key=lambda size: abs(size - micro))))
    yield Fault("batch.global_batch_size", message, ", or ".join(fixes))


def _or(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
