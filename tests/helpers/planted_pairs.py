"""Typical bugs of preference training, planted into the real engine. Each is `bug(patch)`, as in `planted`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import distributed as dist

from llmtrain.engines.deepspeed import engine
from llmtrain.engines.deepspeed.engine import DeepSpeedEngine
from llmtrain.models import objective
from llmtrain.models.objective import Objective


def _on_pairs(patch, change, only_training=True):
    """Compares `change(pairs)`; the references are computed as they should be unless the change is for all passes."""
    original = engine.forward

    def forward(call, model, rows, *others):
        if model.training or not only_training:
            rows = replace(rows, completions=change(rows.completions))
        return original(call, model, rows, *others)

    patch.setattr(engine, "forward", forward)


def _on_losses(patch, change):
    """Computes the losses of pairs from `change(config, log_probs, lengths, references)`."""
    original = objective.pair_losses
    patch.setattr(objective, "pair_losses", lambda *arguments: original(*change(*arguments)))


def swapped_on_one_rank(patch):
    def swap(pairs):
        if dist.get_rank() < dist.get_world_size() - 1:
            return pairs
        other = torch.arange(pairs.lengths.shape[1]) ^ 1
        changed = {"lengths": pairs.lengths[:, other], "references": pairs.references[:, other]}
        return replace(pairs, segment_ids=pairs.segment_ids ^ 1, **changed)

    _on_pairs(patch, swap)


def reference_not_frozen(patch):
    _on_losses(patch, lambda config, log_probs, lengths, _: (config, log_probs, lengths, log_probs.detach()))


def reference_of_another_pair(patch):
    def roll(config, log_probs, lengths, references):
        return config, log_probs, lengths, references.roll(1, dims=0)

    _on_losses(patch, roll)


def pairs_by_micro_batch(patch):
    """Each micro-batch has the same weight, however many pairs it has."""
    original, train, seen = engine.forward, DeepSpeedEngine.train_step, {}

    def train_step(self, batch, *others):
        seen["mean"] = batch.examples / (self.plan.data_parallel_size * self.plan.batch.gradient_accumulation_steps)
        return train(self, batch, *others)

    def forward(call, model, rows, *others):
        loss_sum, auxiliary = original(call, model, rows, *others)
        own = (rows.completions.lengths > 0).sum() / 2
        return loss_sum * (seen["mean"] / own if model.training else 1), auxiliary

    patch.setattr(DeepSpeedEngine, "train_step", train_step)
    patch.setattr(engine, "forward", forward)


def segments_shifted(patch):
    """The last token of each completion is counted for the next conversation, for the references as well. Shifted the
    other way nothing would change, because each conversation begins with a prompt, whose tokens have no target; nor if
    the template wrote something after the last end token."""
    _on_pairs(patch, lambda pairs: replace(pairs, segment_ids=pairs.segment_ids.roll(-1, dims=1)), only_training=False)


def label_smoothing_ignored(patch):
    def ignore(config, *others):
        return config.model_copy(update={"label_smoothing": 0.0}), *others

    _on_losses(patch, ignore)


def sft_ignored(patch):
    _on_losses(patch, lambda config, *others: (config.model_copy(update={"sft_weight": 0.0}), *others))


def mean_over_tokens(patch):
    """A loss that is defined with sums uses means over tokens, as IPO does."""

    def mean(config, log_probs, lengths, references):
        counts = lengths.clamp(min=1)
        return config, log_probs / counts, torch.ones_like(lengths), references / counts

    _on_losses(patch, mean)


def slices_not_summed(patch):
    """Each rank compares only its own slices."""
    patch.setattr(objective._SummedOverSlices, "apply", staticmethod(lambda log_probs, group: log_probs))


def slices_summed_without_gradient_of_others(patch):
    """The gradient is that of this rank's share, as if the other ranks did not use the sum."""

    def backward(ctx, gradient):
        return gradient, None

    patch.setattr(objective._SummedOverSlices, "backward", staticmethod(backward))


def every_slice_counts_the_whole_loss(patch):
    original = Objective.__call__

    def whole(self, losses, pairs):
        return original(self, losses, pairs) * dist.get_world_size(self._slices)

    patch.setattr(Objective, "__call__", whole)


def label_swapped_on_one_rank(patch):
    def swap(labelled):
        last = dist.get_rank() == dist.get_world_size() - 1
        return replace(labelled, desirable=~labelled.desirable) if last else labelled

    _on_pairs(patch, swap)


def divergence_per_micro_batch(patch):
    """As in TRL: over all ranks, but only one micro-batch."""
    estimate, original, found = engine.estimate_divergence, engine.forward, []

    def each(own, batches):
        for batch in batches:
            for rows, mismatched in zip(batch.micro_batches, batch.mismatched, strict=True):
                estimate(own, [replace(batch, micro_batches=[rows], mismatched=[mismatched])])
                found.append(own.objective.divergence)

    def forward(call, model, rows, device, own, *others):
        if model.training:
            own.divergence = found.pop(0)
        return original(call, model, rows, device, own, *others)

    patch.setattr(engine, "estimate_divergence", each)
    patch.setattr(engine, "forward", forward)


def divergence_with_gradient(patch):
    """Its value is right, but the loss is also reduced by making the mismatched completions likelier."""
    losses, original, train = objective.kto_losses, engine.forward, DeepSpeedEngine.train_step
    seen = {"ratio": 0.0}

    def train_step(self, batch, *others):
        seen["mismatched"], seen["count"] = iter(batch.mismatched), batch.examples
        return train(self, batch, *others)

    def forward(call, model, rows, device, own, *others):
        if model.training:
            seen["ratio"] = None
            original(call, model, next(seen["mismatched"]), device, own)
        found = original(call, model, rows, device, own, *others)
        seen["ratio"] = 0.0
        return found

    def kto_losses(config, ratios, desirable, divergence):
        if seen["ratio"] is None:
            mean = ratios.sum() / seen["count"]
            seen["ratio"] = mean - mean.detach()
        elif divergence > 0:
            divergence = divergence + seen["ratio"]
        return losses(config, ratios, desirable, divergence)

    patch.setattr(DeepSpeedEngine, "train_step", train_step)
    patch.setattr(engine, "forward", forward)
    patch.setattr(objective, "kto_losses", kto_losses)


def divergence_of_own_rank(patch):
    patch.setattr(DeepSpeedEngine, "metric_sums", lambda self: self.objective.metric_sums(self.device))


def divergence_of_own_completions(patch):
    original = engine.estimate_divergence

    def own(self, batches):
        original(self, [replace(one, mismatched=one.micro_batches) for one in batches])

    patch.setattr(engine, "estimate_divergence", own)


def divergence_after_the_update(patch):
    """The divergence of the previous step, with its weights."""
    original, train = engine.estimate_divergence, DeepSpeedEngine.train_step

    def train_step(self, batch, *others):
        found = train(self, batch, *others)
        original(self, [batch])
        return found

    patch.setattr(engine, "estimate_divergence", lambda self, batches: None)
    patch.setattr(DeepSpeedEngine, "train_step", train_step)


def weights_swapped(patch):
    original = objective.kto_losses

    def swapped(config, *others):
        weights = {"desirable_weight": config.undesirable_weight, "undesirable_weight": config.desirable_weight}
        return original(config.model_copy(update=weights), *others)

    patch.setattr(objective, "kto_losses", swapped)


COMPARED = (
    swapped_on_one_rank,
    reference_not_frozen,
    reference_of_another_pair,
    pairs_by_micro_batch,
    segments_shifted,
    label_smoothing_ignored,
    sft_ignored,
    mean_over_tokens,
)
SLICED = (slices_not_summed, slices_summed_without_gradient_of_others, every_slice_counts_the_whole_loss)
"""For ranks that share sequences."""
LABELLED = (
    label_swapped_on_one_rank,
    divergence_per_micro_batch,
    divergence_with_gradient,
    divergence_of_own_rank,
    divergence_of_own_completions,
    divergence_after_the_update,
    weights_swapped,
)
