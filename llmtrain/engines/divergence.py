"""KTO's estimate of how far the model has moved from the reference, a constant of each batch (arXiv 2402.01306).

It is the mean log-ratio of mismatched completions, those of other prompts, over the whole global batch, and at least 0.
The loss of each completion depends on it. Therefore it is computed before the update, in passes without gradients
over the mismatched completions alone, which every engine runs as evaluations. It is the same number under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from llmtrain.data import StepBatch
from llmtrain.engines.engine import Engine
from llmtrain.models import Objective


@torch.no_grad()
def estimate_divergence(
    engine: Engine, batches: Iterable[StepBatch], beat: Callable[[], object] = lambda: None
) -> None:
    """Sets the divergence of the engine's objective from the batches of one step or evaluation.

    Called by all ranks if the objective needs it (`Objective.needs_divergence`). beat: called after each pass.
    """
    objective = engine.objective
    assert isinstance(objective, Objective)
    total = torch.zeros(5)  # as `Engine.metric_sums`
    for batch in batches:
        engine.eval_step(replace(batch, micro_batches=batch.mismatched, mismatched=[]))
        sums = engine.metric_sums()
        assert sums is not None
        total = total.to(sums.device) + sums
        beat()
    desirable_rewards, undesirable_rewards, _, *counts = total
    mean = (desirable_rewards + undesirable_rewards) / sum(counts).clamp(min=1)
    objective.divergence = (mean / objective.config.beta).clamp(min=0).double()
