"""Bugs in freezing weights and adding adapters, planted into the real engines."""

from __future__ import annotations

import pytest
import torch

from llmtrain.models import adapter, nf4
from llmtrain.models.tensor import sequence_parallel, split


def _after(patch, name, change):
    """Calls `change(result, arguments)` after a function of `llmtrain.models.adapter`."""
    original = getattr(adapter, name)

    def run(*arguments):
        result = original(*arguments)
        change(result, arguments)
        return result

    patch.setattr(adapter, name, run)


def adapter_scaled_twice(patch):
    def scale(result, arguments):
        for _, module in adapter.adapters(arguments[0]):
            module.scaling = {name: value**2 for name, value in module.scaling.items()}

    _after(patch, "_inject_adapter", scale)


def base_not_frozen(patch):
    _after(patch, "apply_adapter", lambda result, arguments: arguments[0].requires_grad_(True))


def scaling_by_rank_ignored(patch):
    _after(patch, "adapter_configuration", lambda config, _: setattr(config, "use_rslora", False))


def adapter_of_another_seed(patch):
    original = adapter._draw_lora_a
    patch.setattr(adapter, "_draw_lora_a", lambda like, seed: original(like, seed + 1))


def module_not_saved(patch):
    """Modules that should be trained fully stay frozen."""

    def freeze(result, arguments):
        for name, one in arguments[0].named_parameters():
            one.requires_grad_(one.requires_grad and adapter.is_adapter(name))

    _after(patch, "apply_adapter", freeze)


def base_not_in_4_bit(patch):
    def fill(model, names, read, device, dtype):
        for name, whole in names.items():
            model.get_parameter(name).data.copy_(read(whole))

    patch.setattr(nf4, "pack_weights", fill)


def scales_in_4_bit_without_their_mean(patch):
    original = nf4.quantize

    def quantize(weight):
        packed, scales, ranges = original(weight)
        return packed, scales, torch.cat([ranges[:-1], ranges[-1:] * 0])

    patch.setattr(nf4, "quantize", quantize)


def neighbours_in_4_bit_swapped(patch):
    original = nf4.quantize

    def quantize(weight):
        packed, *others = original(weight)
        return packed << 4 | packed >> 4, *others

    patch.setattr(nf4, "quantize", quantize)


def adapter_of_one_stage_frozen(patch):
    def freeze(result, arguments):
        stage = arguments[0]
        if stage.index:
            stage.model.requires_grad_(False)
            stage.add_idle_parameters()

    _after(patch, "apply_adapter_to_stage", freeze)


def gradient_of_a_not_summed(patch):
    """Each tensor parallel rank keeps the part of A's gradient that its own rows of B give."""
    original = split.TensorParallel._split_adapter

    def adapt(self, name, base, inner, outer, config):
        forward = outer.forward
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(
                sequence_parallel.SequenceParallelBlock, "prepare_whole_parameter", lambda block, parameter: None
            )
            original(self, name, base, inner, outer, config)
        outer.forward = forward

    patch.setattr(split.TensorParallel, "_split_adapter", adapt)


FLAT = [adapter_scaled_twice, base_not_frozen, scaling_by_rank_ignored, adapter_of_another_seed, module_not_saved]
STAGED = [adapter_of_one_stage_frozen, adapter_scaled_twice]
SLICED = [gradient_of_a_not_summed]
PACKED = (base_not_in_4_bit, scales_in_4_bit_without_their_mean, neighbours_in_4_bit_swapped)
