"""Typical bugs of pipelines, planted into the stages, their engine and their inputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from llmtrain.data import NO_TARGET
from llmtrain.engines.deepspeed import engine, passes, pipeline
from llmtrain.engines.deepspeed.pipeline import PipelineAxis, RankSpec, StagePipeline
from llmtrain.trials.verify.batches import Batches
from tests.helpers.planted_zero import clipping_per_partition


def norm_per_stage(patch):
    """Each stage reports the norm of its own gradients, and clips by it."""
    patch.setattr(DeepSpeedZeroOptimizer, "_model_parallel_all_reduce", lambda *_, **__: None)


def tied_gradient_not_summed(patch):
    patch.setattr(StagePipeline, "get_tied_weights_and_groups", lambda self: [])


def tied_gradient_counted_twice(patch):
    """The norm counts a tied gradient twice: no copy is marked as counted by another stage."""
    original = StagePipeline._index_tied_modules

    def index(self):
        comms = original(self)
        for parameter in self.stages.parameters():
            parameter.ds_pipe_replicated = False
        return comms

    patch.setattr(StagePipeline, "_index_tied_modules", index)


def stale_tied_copy(patch):
    """The last stage keeps its initial tied weight; the first one is right."""
    original, started = PipelineAxis.accumulate, {}

    def accumulate(self, *arguments):
        for weight, _ in self._pipeline.get_tied_weights_and_groups() if self.model[-1].is_last else ():
            weight.data.copy_(started.setdefault(id(self), weight.detach().clone()))
        return original(self, *arguments)

    patch.setattr(PipelineAxis, "accumulate", accumulate)


def loss_by_micro_batch(patch):
    original = PipelineAxis._loss

    def loss(self, objective, stage, inputs, arguments, batch, **others):
        num_items = self._num_items
        self._num_items = (
            (batch.labels != NO_TARGET).sum().clamp(min=1) * self._micro_batches * self.plan.data_parallel_size
        )
        try:
            return original(self, objective, stage, inputs, arguments, batch, **others)
        finally:
            self._num_items = num_items

    patch.setattr(PipelineAxis, "_loss", loss)


def loss_of_one_replica(patch):
    """The loss is scaled as if there were one replica: the mean over replicas instead of the sum."""
    original = PipelineAxis._begin

    def begin(self, batch):
        original(self, batch)
        self._num_items *= self.plan.data_parallel_size

    patch.setattr(PipelineAxis, "_begin", begin)


def replicas_read_the_same(patch):
    original = Batches.part
    patch.setattr(Batches, "part", lambda self, plan, dp_rank: original(self, plan, 0))


def labels_in_another_order(patch):
    """The last stage reads the labels of the micro-batches in reverse order."""
    original = PipelineAxis.accumulate

    def accumulate(self, batch, slices, objective):
        pairs = zip(slices, slices[::-1], strict=True)
        return original(self, batch, [replace(rows, labels=other.labels) for rows, other in pairs], objective)

    patch.setattr(PipelineAxis, "accumulate", accumulate)


def one_stage_with_another_seed(patch):
    original = pipeline.stage_builder

    def builder(recipe, *arguments, **named):
        other = original(recipe.with_(**{"train.seed": recipe.train.seed + 1}), *arguments, **named)
        own = original(recipe, *arguments, **named)
        return lambda index, *ranks: (other if index else own)(index, *ranks)

    patch.setattr(pipeline, "stage_builder", builder)


def _on_stage(patch, change):
    """Changes a stage after it is built; the division into stages was already tested on a tiny copy."""
    original = RankSpec.build

    def build(self, log=False):
        stages = original(self, log)
        for stage in stages:
            change(stage)
        return stages

    patch.setattr(RankSpec, "build", build)


def later_documents_see_each_other(patch):
    """The documents do not reach the second stage."""
    own = passes.document_masks

    def joined(batch):
        rows = torch.arange(batch.position_ids.shape[1]).expand_as(batch.position_ids).contiguous()
        return own(replace(batch, position_ids=rows) if torch.distributed.get_rank() else batch)

    patch.setattr(passes, "document_masks", joined)


def halved_gradient_between_stages(patch):
    def halve(stage):
        def before(_, arguments):
            (hidden, *others), *rest = arguments
            return ((hidden / 2 + hidden.detach() / 2, *others), *rest)

        if not stage.is_first:
            stage.register_forward_pre_hook(before)

    _on_stage(patch, halve)


def no_decay_on_the_last_stage(patch):
    original = engine.parameter_groups

    def groups(module, weight_decay):
        return original(module, 0.0 if module.stages[-1].is_last else weight_decay)

    patch.setattr(engine, "parameter_groups", groups)


STAGED = (
    norm_per_stage,
    clipping_per_partition,
    tied_gradient_not_summed,
    tied_gradient_counted_twice,
    stale_tied_copy,
    loss_by_micro_batch,
    labels_in_another_order,
    one_stage_with_another_seed,
    later_documents_see_each_other,
    halved_gradient_between_stages,
    no_decay_on_the_last_stage,
)
"""With one replica."""
REPLICATED = (replicas_read_the_same, loss_of_one_replica)
"""With more than one."""
