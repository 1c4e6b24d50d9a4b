"""Steps of an engine by a loop of one's own, for comparison with its own steps."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from llmtrain.engines import StepResult
from llmtrain.plan import Plan
from tests.helpers.traces import Trace, engine_of, trace

STEPS = 2


class OwnLoop:
    """An engine whose steps are made by a loop of one's own."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def train_step(self, batch) -> StepResult:
        with self.engine.own_passes(batch) as passes:
            for micro_batch in passes:
                logits = passes.model(micro_batch).logits.float()
                passes.backward(cross_entropy(logits.flatten(0, 1), micro_batch.labels.flatten(), reduction="sum"))
        return passes.result


def traces_of_both_loops(plan: Plan) -> tuple[Trace, Trace]:
    """Returns the run of a plan by the engine's own steps and by a loop of one's own, on this rank."""
    sizes, found = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps), []
    for loop in (lambda engine: engine, OwnLoop):
        engine = engine_of(plan)
        torch.manual_seed(0)
        found.append(trace(loop(engine), range(STEPS), *sizes, engine.data_parallel_rank, plan.data_parallel_size))
        engine.close()
    return found[0], found[1]
