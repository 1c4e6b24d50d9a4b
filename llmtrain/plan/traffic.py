"""What the ranks of a plan send each other, in seconds: each micro-batch, and each step.

By what the engines do under the configurations that this package writes, DeepSpeed 0.19.8: ZeRO-1 reduces
gradients once a step, ZeRO-2 after each micro-batch, both by all-reduces (`use_multi_rank_bucket_allreduce`)
that nothing overlaps; only ZeRO-3 overlaps. Pipelines send and wait. A test counts the bytes on the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain.plan.flops import head_parameters
from llmtrain.plan.links import Group, Groups, Links
from llmtrain.plan.plan import Plan
from llmtrain.plan.work import Held, Worker

REUSE_DISTANCE = 1_000_000_000
"""Elements that may be used between two uses of a parameter which ZeRO-3 keeps gathered meanwhile."""
ROW_PRODUCTS = 2
"""Products of a layer whose results tensor parallel ranks sum forward: those that end attention and feed-forward."""
COLUMN_PRODUCTS = 5
"""Products of a layer whose inputs' gradients they sum backward, each for itself: query, key, value, gate and up. A
family that joins some of them sends less."""

Seconds = defaultdict[str, float]
"""Kind of collective → seconds."""


def summed(*parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each kind in all parts together; kinds that take none are left out."""
    total = Seconds(float)
    for part in parts:
        for kind, seconds in part.items():
            total[kind] += seconds
    return {kind: seconds for kind, seconds in sorted(total.items()) if seconds}


@dataclass(frozen=True)
class Traffic:
    """Seconds of one stage's ranks."""

    waited: dict[str, float]
    """Each micro-batch, with nothing else to do."""
    hidden: dict[str, float]
    """Each micro-batch, beside the computation as far as that lasts."""
    step: dict[str, float]
    """Once a step, with nothing else to do."""
    step_hidden: dict[str, float]
    """Once a step, beside the last backward pass as far as that lasts."""


class Network:
    """The groups of a plan on the links of its cluster."""

    def __init__(self, plan: Plan, worker: Worker, links: Links, host_bandwidth: float | None) -> None:
        self.plan, self.worker, self.links = plan, worker, links
        self.groups = Groups.of(plan.layout)
        self.host = host_bandwidth
        self.hidden_states = worker.tokens * plan.model.hidden_size * worker.compute_bytes
        """Bytes of a micro-batch between layers, on one device."""

    def traffic(self, held: Held) -> Traffic:
        """All that the ranks of a stage send."""
        waited = self._within_layers(held)
        hidden, step, step_hidden = Seconds(float), Seconds(float), Seconds(float)
        # Activations and their gradients, with one neighbour at the ends of the pipeline, with two between.
        messages = 2 if self.plan.layout.pp == 2 else 4
        waited["p2p"] = messages * self.links.send(self.hidden_states, self.groups.pipeline)
        self._tied(step)
        strategy = self.plan.recipe.parallel.strategy
        if strategy == "deepspeed":
            self._zero(held, waited, hidden, step)
        elif strategy == "fsdp2":
            self._fully_sharded(held, hidden, gathers=2 if self.plan.layout.zero_stage == 3 else 1)
        else:
            step_hidden["all_reduce"] += self._reduced(held)
        return Traffic(*(summed(part) for part in (waited, hidden, step, step_hidden)))

    def _within_layers(self, held: Held) -> Seconds:
        """Tensor, sequence and expert groups, which wait in every layer; once more where activations are recomputed."""
        layout, facts, worker, links = self.plan.layout, self.plan.model, self.worker, self.links
        passes = held.layers * (3 if worker.checkpointing else 2)
        found = Seconds(float)
        if layout.tp > 1:
            sums = held.layers * (ROW_PRODUCTS * (2 if worker.checkpointing else 1) + COLUMN_PRODUCTS)
            found["all_reduce"] = sums * links.all_reduce(self.hidden_states, self.groups.tensor)
            if held.head and not facts.tied_embeddings:
                logits = worker.tokens * facts.vocab_size * worker.compute_bytes
                found["all_gather"] = links.gather(logits, self.groups.tensor)
                found["all_reduce"] += links.all_reduce(self.hidden_states, self.groups.tensor)
        if layout.sp > 1:
            # Key and value heads are copied until they divide, at most to the number of query heads.
            keys = max(facts.kv_heads, min(layout.sp * layout.tp, facts.heads))
            width = facts.head_dim / layout.tp * worker.tokens * worker.compute_bytes
            queries = links.all_to_all(facts.heads * width, self.groups.sequence)
            found["all_to_all"] += passes * 2 * (queries + links.all_to_all(keys * width, self.groups.sequence))
        if layout.ep > 1:
            sent = self.hidden_states * max(facts.experts_per_token, 1)
            found["all_to_all"] += 2 * passes * links.all_to_all(sent, self.groups.expert)
        return found

    def _tied(self, step: Seconds) -> None:
        """The copies of a tied table on the first and the last stage add up their gradients."""
        if self.plan.layout.pp > 1 and self.plan.model.tied_embeddings:
            size = head_parameters(self.plan.model) / self.plan.layout.tp * self.worker.gradient_bytes
            pipe = self.groups.pipeline
            ends = Group(2, pipe.stride * (pipe.size - 1))
            step["all_reduce"] += self.links.all_reduce(size, ends)

    def _zero(self, held: Held, waited: Seconds, hidden: Seconds, step: Seconds) -> None:
        """DeepSpeed's stages, with what is offloaded."""
        stage, parallel = self.plan.layout.zero_stage, self.plan.recipe.parallel
        if stage == 3:
            # What is used again soon enough, the last layers', is not gathered for the backward pass.
            own = self.worker.own(held)
            again = max(0.0, own - REUSE_DISTANCE / 2) / own
            self._fully_sharded(held, hidden, gathers=1 + again)
        else:
            (waited if stage == 2 else step)["all_reduce"] += self._reduced(held)
            if stage:
                step["all_gather"] += self._gathered(held)
        shard = self.worker.own(held) / self.groups.replicas.size
        if parallel.offload_optimizer != "none" and self.host:
            # Gradients go down as soon as they are reduced, updated weights come up.
            (waited if stage >= 2 else step)["host"] += shard * self.worker.gradient_bytes / self.host
            step["host"] += shard * self.worker.weight_bytes / self.host
        if parallel.offload_param != "none" and self.host:
            rate = self.host if parallel.offload_param == "cpu" else self.worker.assumed.nvme_bandwidth
            hidden["host"] += 2 * shard * self.worker.weight_bytes / rate

    def _fully_sharded(self, held: Held, hidden: Seconds, gathers: float) -> None:
        """Weights gathered layer by layer, once or twice for a pass forward and one backward; gradients scattered."""
        hidden["all_gather"] += gathers * self._gathered(held)
        hidden["reduce_scatter"] += self._reduced(held) / 2

    def _gathered(self, held: Held) -> float:
        """An all-gather of a device's weights."""
        return self._among_replicas(held, self.worker.weight_bytes)

    def _reduced(self, held: Held) -> float:
        """An all-reduce of a device's gradients, in the type that they are accumulated in."""
        return 2 * self._among_replicas(held, self.worker.gradient_bytes)

    def _among_replicas(self, held: Held, size: int) -> float:
        dense, experts = self.worker.shares(held)
        seconds = self.links.gather(dense * size, self.groups.replicas)
        return seconds + (self.links.gather(experts * size, self.groups.expert_replicas) if experts else 0.0)
