"""The independent reference of `llmtrain verify`, with the interface of an engine."""

from __future__ import annotations

from itertools import pairwise

import torch

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.engine import StepResult
from llmtrain.recipe import Recipe
from llmtrain.trials.verify.compare import Weights
from llmtrain.trials.verify.reference import ReferenceDocument, ReferenceLoop, Sequences
from llmtrain.trials.verify.train import drawn_weights

CPU = torch.device("cpu")


class ReferenceRun:
    """Takes whole global batches. A router's loss is a mean within the given micro-batches."""

    def __init__(
        self, recipe: Recipe, device: torch.device = CPU, together: bool = False, weights: Weights | None = None
    ) -> None:
        """weights: the initial ones; by default those that the device draws."""
        drawn = drawn_weights(recipe, device) if weights is None else weights
        self.loop = ReferenceLoop(recipe, drawn, device, together=together)
        self.named_weights = self.loop.named_weights

    def train_step(self, batch: StepBatch) -> StepResult:
        self.loop.micro_batch_size = len(batch.micro_batches[0].labels)
        step = self.loop.train_step(documents_of(batch.micro_batches))
        return StepResult(torch.tensor(step.loss), torch.tensor(step.grad_norm), step.lr)

    def eval_step(self, batch: StepBatch) -> torch.Tensor:
        return torch.tensor(self.loop.evaluate(documents_of(batch.micro_batches)))


def documents_of(micro_batches: list[MicroBatch]) -> Sequences:
    """Returns the documents of each row; a document begins where positions restart."""
    sequences = []
    for micro_batch in micro_batches:
        for tokens, positions, labels in zip(
            micro_batch.input_ids, micro_batch.position_ids, micro_batch.labels, strict=True
        ):
            bounds = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
            sequences.append([ReferenceDocument(tokens[a:b], labels[a:b]) for a, b in pairwise(bounds)])
    return sequences
