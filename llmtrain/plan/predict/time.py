"""Predicts the time of a step by arithmetic: computation, memory traffic, communication, and the pipeline's bubble.

A prediction ranks plans. It is not a measurement: `docs/guides/time.md` lists the assumptions and the errors against
published runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmtrain.plan.described import model_line, split_lines
from llmtrain.plan.draft import COMPUTE_DTYPE, Draft
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict.assumptions import Assumptions, assumed_of
from llmtrain.plan.predict.links import Links
from llmtrain.plan.predict.memory import PlanMemory
from llmtrain.plan.predict.rates import AchievedRates
from llmtrain.plan.predict.traffic import CommunicationGroups, Traffic, by_kind, summed
from llmtrain.plan.predict.work import StageParameters, Work, Worker, parameters_of_ranks
from llmtrain.plan.schedules import PipelineSchedule
from llmtrain.recipe import Part


class StepTime(Part):
    """A predicted optimizer step of the slowest pipeline stage. The parts add up to `step_s`."""

    compute_s: float
    """Seconds of its forward and backward passes, recomputation included."""
    recompute_s: float
    """The part of `compute_s` that activation checkpointing costs."""
    communication_s: dict[str, float]
    """Seconds in which it only waits for others, by kind: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`,
    `p2p`, `host`."""
    bubble_s: float
    """Seconds in which it waits for the pipeline to fill and to drain."""
    update_s: float
    """Seconds of the optimizer's update."""
    step_s: float
    """Seconds of the whole step."""
    overlapped_s: float
    """Seconds of communication that computation hides; not part of `step_s`."""
    bubble: float
    """Idle share of the pipeline's time: for 1F1B, (p − 1) / (m + p − 1) with p stages and m micro-batches."""
    tokens_per_second: float
    """Tokens per second of all devices."""
    tokens_per_second_per_device: float
    """Tokens per second of one device."""
    mfu: float
    """Share of the peak, with the convention of `Plan.flops_per_token`."""


def predict(
    plan: Plan,
    assumed: Assumptions | None = None,
    traffic_of: Callable[[CommunicationGroups, StageParameters], Traffic] = CommunicationGroups.traffic,
) -> StepTime | None:
    """Predicts the time of a plan's step; returns None if the devices' datasheet is incomplete (`unknown`).

    assumed: by default the assumptions for the recipe's kernels.
    traffic_of: returns what the ranks of a stage send, if another stack than llmtrain runs the plan.
    """
    if unknown(plan):
        return None
    rates, links = _rates_and_links(plan, assumed or assumed_of(plan.recipe.kernels))
    worker = Worker(plan, rates, links.assumed)
    groups = CommunicationGroups(plan)
    stages = (_Stage(plan, stage, worker, traffic_of(groups, stage), links) for stage in set(parameters_of_ranks(plan)))
    # All stages run at the pace of the slowest slot; among equal ones the update decides.
    slowest = max(stages, key=lambda stage: (stage.slot, stage.fixed))
    return slowest.time(rates.peak)


def _rates_and_links(plan: Plan, assumed: Assumptions) -> tuple[AchievedRates, Links]:
    rates = AchievedRates.of(plan.cluster, COMPUTE_DTYPE[plan.recipe.parallel.precision], assumed)
    return rates, Links(plan.cluster.devices_per_node, rates.node, rates.network, rates.host, assumed)


ROUNDING = 1e-6
"""Relative margin of a bound: more than the rounding errors of the sums that it bounds."""


@dataclass(frozen=True)
class TimeBound:
    """A lower bound for the time of a step, which plans share that only differ in their micro-batches and in what they
    offload, or keep a second time (hpZ).

    It counts the computation, the waits within layers and the waits of a pipeline that fills and drains. With the
    number n of tokens in a micro-batch, a stage's time for these is a sum of `max(a + b·n, c)`, which is convex, and so
    is its maximum over the stages. A convex function is never below the line through its values at n and 2n for
    numbers from 2n on, nor for n itself.
    """

    first: float
    """Seconds between micro-batches of the smallest size."""
    further: float
    """Additional seconds for each further micro-batch of that size that is joined to it."""
    idle: float
    """`PipelineSchedule.least_idle`."""

    @classmethod
    def of(cls, plan: Plan) -> TimeBound:
        """Returns the bound for plans whose micro-batches are multiples of a plan's, which `unknown` does not name."""
        rates, links = _rates_and_links(plan, assumed_of(plan.recipe.kernels))
        once, twice = (_least_slot(plan, size * plan.batch.micro_batch_size, rates, links) for size in (1, 2))
        return cls(once, twice - once, PipelineSchedule.of(plan.parallel).least_idle)

    def step_s(self, times: int, micro_batches: int) -> float:
        """Returns the bound in seconds. times: the micro-batch as a multiple of the smallest one."""
        slot = self.first + (times - 1) * self.further
        return (1 - ROUNDING) * (micro_batches + self.idle) * slot


def _least_slot(plan: Plan, micro_batch: int, rates: AchievedRates, links: Links) -> float:
    """Returns the seconds of the slowest stage for a micro-batch of that many sequences, without waits for ZeRO."""
    worker = Worker(plan, rates, links.assumed, micro_batch)
    groups = CommunicationGroups(plan, micro_batch)
    return max(
        worker.micro_batch(stage).seconds + sum(by_kind(groups.within_layers(stage), links.seconds).values())
        for stage in set(parameters_of_ranks(plan))
    )


def unknown(plan: Plan | Draft) -> str | None:
    """Returns what is missing for a prediction, as a sentence, or None."""
    device, cluster, parallel = plan.cluster.spec, plan.cluster, plan.parallel
    if parallel.strategy == "data_parallel":
        return "nn.DataParallel copies weights and gradients through one process, which is not modelled"
    missing = []
    dtype = COMPUTE_DTYPE[parallel.precision]
    if dtype not in device.peak_flops:
        missing.append(f"peak_flops['{dtype}']")
    stored = (parallel.offload_optimizer, parallel.offload_param)
    offloads = stored != ("none", "none") or parallel.offload_activations
    wanted = {"memory_bandwidth": True, "node_bandwidth": cluster.devices_per_node > 1}
    wanted |= {"network_bandwidth": cluster.nodes > 1, "host_bandwidth": offloads}
    missing += [name for name, needed in wanted.items() if needed and getattr(device, name) is None]
    return f"the datasheet of {device.name} lacks {', '.join(missing)}" if missing else None


def describe(plan: Plan, memory: PlanMemory | None, time: StepTime | None) -> Iterator[str]:
    """Yields readable lines: model, layout, memory, predicted time and notes."""
    yield from (model_line(plan), *split_lines(plan), *(memory.described() if memory else ()))
    if time:
        yield describe_time(time, measured=plan.cluster.measured is not None)
    for note in plan.notes:
        yield f"note: {note['message']} [{note['rule']}]"


def describe_time(time: StepTime, measured: bool) -> str:
    """Formats the time as one line for people. measured: whether a self-test has measured the rates."""
    parts = [f"compute {time.compute_s / time.step_s:.0%}"]
    if waiting := sum(time.communication_s.values()):
        kinds = sorted(time.communication_s.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{kind.replace('_', '-')} {s / time.step_s:.0%}" for kind, s in kinds[:2])
        parts.append(f"communication {waiting / time.step_s:.0%} ({shown})")
    if time.bubble:
        parts.append(f"bubble {time.bubble:.0%}")
    parts.append(f"update {time.update_s / time.step_s:.0%}")
    rate = f"{time.tokens_per_second_per_device:,.0f} tokens/s a device, MFU {time.mfu:.0%}"
    by = " by measured rates" if measured else ""
    return f"predicted {time.step_s:.2f} s a step{by}: {rate}; {', '.join(parts)}"


class _Stage:
    """The step of a stage."""

    def __init__(self, plan: Plan, stage: StageParameters, worker: Worker, traffic: Traffic, links: Links) -> None:
        self.plan, self.work = plan, worker.micro_batch(stage)
        self.micro_batches, work = plan.batch.gradient_accumulation_steps, self.work
        self.schedule = PipelineSchedule.of(plan.parallel)
        self.per_micro_batch, self.once, self.overlapped = waits_of(
            traffic, links, work, self.micro_batches, self.schedule
        )
        self.slot = work.seconds + sum(self.per_micro_batch.values())
        """Seconds between one micro-batch and the next."""
        self.update = _update(plan, stage, worker)
        self.fixed = sum(self.once.values()) + self.update

    def time(self, peak: float) -> StepTime:
        """peak: FLOP/s of a device."""
        plan, m = self.plan, self.micro_batches
        bubble = self.schedule.bubble(m)
        bubble_s = m * self.slot * bubble / (1 - bubble)
        step = m * self.slot + bubble_s + self.fixed
        communication = summed({kind: m * seconds for kind, seconds in self.per_micro_batch.items()}, self.once)
        rate = plan.batch.tokens_per_step / step
        per_device = rate / plan.cluster.world_size
        return StepTime(
            compute_s=m * self.work.seconds,
            recompute_s=m * self.work.recompute,
            communication_s=communication,
            bubble_s=bubble_s,
            update_s=self.update,
            step_s=step,
            overlapped_s=self.overlapped,
            bubble=bubble,
            tokens_per_second=rate,
            tokens_per_second_per_device=per_device,
            mfu=per_device * plan.flops_per_token / peak,
        )


def waits_of(
    traffic: Traffic, links: Links, work: Work, micro_batches: int, schedule: PipelineSchedule
) -> tuple[dict[str, float], dict[str, float], float]:
    """Returns the seconds of waiting for each micro-batch and once per step, by kind, and those hidden in a step."""
    seconds = {name: by_kind(transfers, links.seconds) for name, transfers in traffic._asdict().items()}
    forward, backward = links.assumed.overlap * work.forward, links.assumed.overlap * (work.recompute + work.backward)
    gathered, hidden_gathered = _exposed(seconds["forward_overlapped"], forward)
    reduced, hidden_reduced = _exposed(seconds["backward_overlapped"], backward)
    exposed, hidden = _exposed(seconds["overlapped"], (forward - hidden_gathered) + (backward - hidden_reduced))
    hidden += hidden_gathered + hidden_reduced
    # ZeRO-3 gathers from other nodes in the first forward pass, if neighbours keep what they gathered.
    first, hidden_first = _exposed(seconds["step_forward_overlapped"], forward)
    # DistributedDataParallel and ZeRO-1 reduce during the backward pass of the last micro-batch.
    last, hidden_last = _exposed(seconds["step_overlapped"], backward)
    # Half of a rank's messages are received.
    between = sum(seconds["between_stages"].values())
    message = between / sum(transfer.times for transfer in traffic.between_stages)
    sent = schedule.message_waits(micro_batches, message, work.forward / schedule.chunks)
    overlapped = hidden * micro_batches + hidden_first + hidden_last + max(0.0, micro_batches * between / 2 - sent)
    each = summed(seconds["exposed"], gathered, reduced, exposed)
    return each, summed(seconds["step"], first, last, {"p2p": sent}), overlapped


def _exposed(part: dict[str, float], window: float) -> tuple[dict[str, float], float]:
    """Returns the communication that lasts longer than the window that hides it, and the hidden seconds."""
    total = sum(part.values())
    if total <= window:
        return {}, total
    rest = (total - window) / total
    return {kind: seconds * rest for kind, seconds in part.items()}, window


def _update(plan: Plan, stage: StageParameters, worker: Worker) -> float:
    """Returns the time in which every rank updates its shards of the states."""
    sharded = plan.parallel.zero_stage > 0 or plan.recipe.parallel.strategy == "fsdp2"
    parameters = stage.trained * worker.device_parameters(stage) / (plan.gradient_ranks if sharded else 1)
    size, products = parameters * worker.update_bytes(stage), worker.orthogonal(stage)
    where = plan.recipe.parallel.offload_optimizer
    if where == "none":
        return size / worker.bandwidth + products
    rate = worker.assumed.host_update_bandwidth
    return size / (rate if where == "cpu" else min(rate, worker.assumed.nvme_bandwidth)) + products
