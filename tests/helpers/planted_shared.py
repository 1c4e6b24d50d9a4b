"""Bugs in the code that all engines share, planted in each module that imports it, before the reference runs."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from llmtrain.data import NO_TARGET, loader, samples
from llmtrain.engines import forward, optim
from llmtrain.models import build, documents, loss
from llmtrain.overrides.torch import squared_norm


def _everywhere(patch, function, bug):
    """Puts `bug` in place of a function in every module of llmtrain that has imported it."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "llmtrain"]
    places = [(module, name) for module in modules for name, value in vars(module).items() if value is function]
    assert places
    for module, name in places:
        patch.setattr(module, name, bug)


def _on_rows(patch, change):
    """Reads `change(rows)` from the packed sequences, in training and in evaluation."""
    original = samples.PackedSamples.read
    patch.setattr(samples.PackedSamples, "read", lambda self, index: change(original(self, index)))


def _rolled(values):
    return values.take([0, *range(values.shape[1] - 1)], axis=1)


def smoothed_loss(patch):
    def smoothed(logits, labels):
        rows = logits.float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(rows, labels.flatten(), reduction="sum", label_smoothing=0.01)

    _everywhere(patch, loss.target_loss_sum, smoothed)


def loss_of_padding(patch):
    """Positions without a target are counted as targets with token 0."""
    original = loss.target_loss_sum
    _everywhere(patch, original, lambda logits, labels: original(logits, labels.clamp(min=0)))


def router_loss_counted_twice(patch):
    original = forward.forward

    def twice(*arguments, **named):
        loss_sum, auxiliary = original(*arguments, **named)
        return loss_sum, None if auxiliary is None else 2 * auxiliary

    _everywhere(patch, original, twice)


def decayed_norms(patch):
    def groups(model, weight_decay):
        return [{"params": [one for one in model.parameters() if one.requires_grad], "weight_decay": weight_decay}]

    _everywhere(patch, optim.parameter_groups, groups)


def no_decay(patch):
    original = optim.parameter_groups
    _everywhere(patch, original, lambda model, weight_decay: original(model, 0.0))


def late_schedule(patch):
    original = optim.schedule

    def late(optimizer, recipe):
        return original(optimizer, recipe.with_(**{"optim.warmup_steps": recipe.optim.warmup_steps + 1}))

    _everywhere(patch, original, late)


def wrong_norm(patch):
    """The squared norm is 1% too large, also for clipping."""
    original = squared_norm
    _everywhere(patch, original, lambda *arguments: original(*arguments) * 1.01)


def no_document_mask(patch):
    """Positions restart in each document, but attention does not."""
    patch.setattr(documents, "_document_indices", lambda _, position_ids: None)


def late_document_mask(patch):
    """The first token of each document belongs to the previous document."""
    original = documents._document_indices

    def late(known, position_ids):
        found = original(known, position_ids)
        return None if found is None else found.roll(1, dims=1)

    patch.setattr(documents, "_document_indices", late)


def joined_documents(patch):
    """The loader treats each sequence as one document."""
    _on_rows(patch, lambda rows: rows._replace(position_ids=rows.position_ids * 0 + range(rows.position_ids.shape[1])))


def late_positions(patch):
    """Positions restart one token late."""
    _on_rows(patch, lambda rows: rows._replace(position_ids=_rolled(rows.position_ids)))


def labels_not_shifted(patch):
    def same(rows):
        labels = rows.labels.copy()
        labels[labels != NO_TARGET] = rows.input_ids[labels != NO_TARGET]
        return rows._replace(labels=labels)

    _on_rows(patch, same)


def labels_shifted_twice(patch):
    def shift(batch):
        last = torch.full_like(batch.labels[:, :1], NO_TARGET)
        return replace(batch, labels=torch.cat([batch.labels[:, 1:], last], dim=1))

    original = loader._tensors
    patch.setattr(loader, "_tensors", lambda *arguments: [shift(batch) for batch in original(*arguments)])


def miscounted_targets(patch):
    """Each sequence counts one target too many."""
    original = loader._counts

    def counts(views, sources, sequences, items):
        targets, examples = original(views, sources, sequences, items)
        return targets + len(sequences), examples

    patch.setattr(loader, "_counts", counts)


def lost_model_field(patch):
    """One of the recipe's fields for the model is lost."""
    original = build.model_configuration

    def configuration(recipe):
        config = {key: value for key, value in recipe.model.config.items() if key != "rms_norm_eps"}
        return original(recipe.with_(**{"model.config": config}))

    _everywhere(patch, original, configuration)


SHARED = (
    smoothed_loss,
    decayed_norms,
    joined_documents,
    loss_of_padding,
    no_decay,
    late_schedule,
    wrong_norm,
    no_document_mask,
    late_document_mask,
    late_positions,
    labels_not_shifted,
    labels_shifted_twice,
    miscounted_targets,
    lost_model_field,
)
ROUTED = (router_loss_counted_twice,)
"""For models with experts, with the router's loss."""
