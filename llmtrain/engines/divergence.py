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


@torch.no_grad()
def estimate_divergence(
    engine: Engine, batches: Iterable[StepBatch], beat: Callable[[], object] = lambda: None
) -> None:
    """Sets the divergence of the engine's objective, if that is KTO, from the batches of one step or evaluation.

    All ranks call it. beat: called after each pass.
    """
    if engine.objective is None or engine.objective.config.name != "kto":
        return
    total = torch.zeros(5)
    for batch in batches:
        engine.eval_step(replace(batch, micro_batches=batch.mismatched, mismatched=[]))
        sums = engine.rewards()
        assert sums is not None, "there is an objective"
        total = total.to(sums.device) + sums
        beat()
    desirable, undesirable, _, *numbers = total
    beta = engine.objective.config.beta
    engine.objective.divergence = ((desirable + undesirable) / sum(numbers).clamp(min=1) / beta).clamp(min=0).double()
