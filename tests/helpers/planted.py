"""Typical bugs of parallel strategies, planted into the real engine. Each is `bug(patch)`, `patch` a
`pytest.MonkeyPatch`."""

from __future__ import annotations

from dataclasses import replace

import torch
from deepspeed.runtime.engine import DeepSpeedEngine as _Engine
from torch import distributed as dist
from torch import nn

from llmtrain.data import NO_TARGET, BatchLoader
from llmtrain.engines.deepspeed import engine
from llmtrain.engines.deepspeed.engine import DeepSpeedEngine
from llmtrain.trials.verify import train


def skipped_all_reduce(patch):
    patch.setattr(_Engine, "allreduce_gradients", lambda *_, **__: None)


def _on_batch(patch, change):
    """Trains on `change(plan, batch)`."""
    original = DeepSpeedEngine.train_step
    patch.setattr(
        DeepSpeedEngine, "train_step", lambda self, batch, *others: original(self, change(self.plan, batch), *others)
    )


def _on_micro_batch(patch, change):
    """Calls the model on `change(micro_batch)`."""
    original = engine.forward
    patch.setattr(
        engine, "forward", lambda model, config, rows, *others: original(model, config, change(rows), *others)
    )


def _on_ds_config(patch, change):
    original = train.render
    patch.setattr(train, "render", lambda plan: change(original(plan)))


def loss_by_micro_batch(patch):
    """Each micro-batch has the same weight, however many targets it has."""
    original, seen = engine.forward, {}

    def note(plan, batch):
        passes = plan.data_parallel_size * plan.batch.gradient_accumulation_steps
        seen["mean"] = batch.target_tokens / passes
        return batch

    def forward(model, config, rows, *others):
        loss_sum, auxiliary = original(model, config, rows, *others)
        return loss_sum * (seen["mean"] / (rows.labels != NO_TARGET).sum() if model.module.training else 1), auxiliary

    _on_batch(patch, note)
    patch.setattr(engine, "forward", forward)


def labels_shifted_twice(patch):
    def shift(rows):
        last = torch.full_like(rows.labels[:, :1], NO_TARGET)
        return replace(rows, labels=torch.cat([rows.labels[:, 1:], last], dim=1))

    _on_micro_batch(patch, shift)


def documents_see_each_other(patch):
    def join(rows):
        return replace(rows, position_ids=torch.arange(rows.input_ids.shape[1]).expand_as(rows.position_ids))

    _on_micro_batch(patch, join)


def one_rank_with_another_seed(patch):
    original = BatchLoader.of.__func__

    def of(cls, plan, prepared, dp_rank):
        recipe = plan.recipe.with_(**{"train.seed": plan.recipe.train.seed + dp_rank})
        return original(cls, plan.model_copy(update={"recipe": recipe}), prepared, dp_rank)

    patch.setattr(BatchLoader, "of", classmethod(of))


def every_rank_reads_the_same(patch):
    original = BatchLoader.of.__func__
    patch.setattr(BatchLoader, "of", classmethod(lambda cls, plan, prepared, dp_rank: original(cls, plan, prepared, 0)))


def other_initial_weights(patch):
    original = engine.build_model

    def build(recipe, *arguments, **more):
        return original(recipe.with_(**{"train.seed": recipe.train.seed + 1}), *arguments, **more)

    patch.setattr(engine, "build_model", build)


def dropped_weight_decay(patch):
    original = engine.parameter_groups
    patch.setattr(engine, "parameter_groups", lambda model, weight_decay: original(model, 0.0))


def decayed_norms(patch):
    patch.setattr(
        engine,
        "parameter_groups",
        lambda model, weight_decay: [{"params": list(model.parameters()), "weight_decay": weight_decay}],
    )


def ignored_clipping(patch):
    _on_ds_config(patch, lambda config: {**config, "gradient_clipping": 0.0})


def clipping_per_rank(patch):
    """Each rank clips its own part to the whole limit: if the parts are alike, the norm is √2 times too large."""
    _on_ds_config(patch, lambda config: {**config, "gradient_clipping": config["gradient_clipping"] * 2**0.5})


def adam_for_adamw(patch):
    def couple(config):
        optimizer = config["optimizer"]
        if optimizer["type"] == "AdamW":
            optimizer["type"], optimizer["params"]["adam_w_mode"] = "Adam", False
        return config

    _on_ds_config(patch, couple)


def wrong_schedule(patch):
    original = engine.schedule

    def scheduled(optimizer, recipe):
        return original(optimizer, recipe.with_(**{"train.max_steps": recipe.train.max_steps * 2}))

    patch.setattr(engine, "schedule", scheduled)


def stale_tied_copy(patch):
    """The head keeps the initial embedding."""
    original = DeepSpeedEngine._build

    def build(self, ds_config):
        model = original(self, ds_config)
        copy = model.lm_head.weight.detach().clone()
        model.lm_head.__class__ = type("Stale", (nn.Linear,), {})
        del model.lm_head.weight
        model.lm_head.register_buffer("weight", copy)
        return model

    patch.setattr(DeepSpeedEngine, "_build", build)


def forgotten_micro_batch(patch):
    def forget(plan, batch):
        *kept, last = batch.micro_batches
        return replace(batch, micro_batches=[*kept, replace(last, labels=torch.full_like(last.labels, NO_TARGET))])

    _on_batch(patch, forget)


def biased_evaluation(patch):
    original = DeepSpeedEngine.eval_step
    patch.setattr(DeepSpeedEngine, "eval_step", lambda self, batch: original(self, batch) * 1.0001)


def evaluation_of_one_rank(patch):
    original = DeepSpeedEngine._sum_over_replicas

    def lonely(self, value):
        return original(self, value) if self.model.training else value * dist.get_world_size()

    patch.setattr(DeepSpeedEngine, "_sum_over_replicas", lonely)


BUGS = (
    skipped_all_reduce,
    loss_by_micro_batch,
    labels_shifted_twice,
    documents_see_each_other,
    one_rank_with_another_seed,
    every_rank_reads_the_same,
    other_initial_weights,
    dropped_weight_decay,
    decayed_norms,
    ignored_clipping,
    clipping_per_rank,
    adam_for_adamw,
    wrong_schedule,
    stale_tied_copy,
    forgotten_micro_batch,
    biased_evaluation,
    evaluation_of_one_rank,
)

COARSE = (
    loss_by_micro_batch,
    labels_shifted_twice,
    every_rank_reads_the_same,
    other_initial_weights,
    dropped_weight_decay,
    ignored_clipping,
    wrong_schedule,
    forgotten_micro_batch,
)
"""Those that are larger than bf16's rounding after a few steps."""
