"""Finds how a family can be cut into stages, and verifies on a tiny copy that the stages give the model's logits.

Nothing about a family is taken for granted: if the chain of stages does not give the logits of the uncut model, the
family is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.models.stages import Cut, Stage, build_stage, cannot_cut, decoder_layers
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import (
    COPY_ERRORS,
    CPU,
    MODEL_ERRORS,
    TOLERANCE,
    build_tiny_model,
    packed_input,
    relative_deviation,
)
from llmtrain.plan.stages import StageBounds


def check_cut(config: PreTrainedConfig, bounds: Sequence[StageBounds], attention: str = "eager") -> Cut:
    """Returns the way to cut the model of `config`, after comparing a tiny chain of stages with a tiny whole model.

    Runs on the CPU, in fp32, without dropout and with packed documents. The random state is preserved. Raises
    FamilyError with the reason if the logits differ or the family does not run in stages.
    """
    if getattr(config, "layerdrop", 0):
        raise cannot_cut(config, f"layerdrop = {config.layerdrop} skips layers at random; set it to 0")
    try:
        tiny = shrink_configuration(config)
    except COPY_ERRORS as error:
        raise cannot_cut(config, f"no tiny copy can be made to compare with ({error})") from error
    with torch.random.fork_rng(devices=[]):
        return find_cut(tiny, bounds, attention if attention in ("eager", "sdpa") else "eager")


def find_cut(config: PreTrainedConfig, bounds: Sequence[StageBounds], attention: str = "eager") -> Cut:
    """Does the same as `check_cut` on the model of `config` itself."""
    try:
        whole = build_tiny_model(config, attention)
        inputs = packed_input(config)
        tuple_length, expected = _observe(whole, inputs)
    except MODEL_ERRORS as error:
        raise cannot_cut(config, f"its tiny copy does not run ({type(error).__name__}: {error})") from error
    everything = frozenset(name for name, _ in whole.named_parameters())
    reason = ""
    for sends_tokens in (False, True):
        cut = Cut(tuple(bounds), (everything,) * len(bounds), tuple_length, sends_tokens, len(expected) == 2)
        try:
            cut = replace(cut, outside=_used_outside(build_chain(whole, cut, attention), inputs))
            with torch.no_grad():
                result = run_chain(build_chain(whole, cut, attention), inputs)[-1]
        except MODEL_ERRORS as error:
            # Whatever makes the family's forward fail without some of its layers is the reason to reject the family.
            reason = reason or f"its forward pass fails on a part of the layers ({type(error).__name__}: {error})"
            continue
        deviation = max(
            relative_deviation(output, expected_output)
            for output, expected_output in zip(result, expected, strict=True)
        )
        if deviation <= TOLERANCE:
            return cut
        reason = reason or f"the logits of two parts deviate from the whole model's by {deviation:.0e}"
    raise cannot_cut(config, reason)


def build_chain(whole: PreTrainedModel, cut: Cut, attention: str) -> list[Stage]:
    """Builds all stages on the CPU with the weights of `whole`."""
    weights = dict(whole.named_parameters())
    stages = []
    for index in range(len(cut.bounds)):
        stage = build_stage(whole.config, index, cut, attention, torch.float32, CPU).train(whole.training)
        with torch.no_grad():
            for path, name in stage.hf_names.items():
                stage.get_parameter(path).copy_(weights[name])
        stages.append(stage)
    return stages


def run_chain(stages: Sequence[Stage], inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Returns the output of each stage as a tuple."""
    results: list[tuple[Tensor, ...]] = []
    for stage in stages:
        output = stage(results[-1] if results else inputs)
        results.append(output if isinstance(output, tuple) else (output,))
    return results


def _observe(model: PreTrainedModel, inputs: tuple[Tensor, ...]) -> tuple[int | None, tuple[Tensor, ...]]:
    """Runs the model and returns what a layer and the model return.

    The first result is the length of the tuple that a layer returns (None for a bare tensor), the second holds the
    model's logits and, if there is one, its auxiliary loss.
    """
    lengths: list[int | None] = []

    def note(module: nn.Module, args: object, output: object) -> None:
        lengths.append(len(output) if isinstance(output, tuple | list) else None)

    handles = [layer.register_forward_hook(note) for layer in decoder_layers(model)[1]]
    with torch.no_grad():
        output = model(input_ids=inputs[0], position_ids=inputs[1], use_cache=False)
    for handle in handles:
        handle.remove()
    if len(lengths) != len(handles):
        raise cannot_cut(model.config, f"{len(handles)} layers are called {len(lengths)} times")
    auxiliary = getattr(output, "aux_loss", None)
    return lengths[0], (output.logits,) if auxiliary is None else (output.logits, auxiliary)


def _used_outside(stages: Sequence[Stage], inputs: tuple[Tensor, ...]) -> tuple[frozenset[str], ...]:
    """Returns, for each stage, the names of the parameters outside the decoder layers that its result depends on.

    Frozen parameters are included. Parameters that no stage depends on are assigned to the first stage, so that they
    are saved and exported.
    """
    used: list[set[str]] = []
    everything: set[str] = set()
    received: tuple[Tensor, ...] = inputs
    for stage in stages:
        prefix = f"model.{decoder_layers(stage.model)[0]}."
        names = {name: parameter for name, parameter in stage.named_parameters() if not name.startswith(prefix)}
        for parameter in names.values():
            parameter.requires_grad_(True)  # nothing else uses these stages
        output = stage(tuple(value.detach() for value in received))
        received = output if isinstance(output, tuple) else (output,)
        total = torch.stack([value.sum() for value in received if value.is_floating_point()]).sum()
        gradients = torch.autograd.grad(total, list(names.values()), allow_unused=True)
        whole_names = stage.hf_names
        used.append(
            {whole_names[name] for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        )
        everything.update(whole_names[name] for name in names)
    used[0] |= everything - set().union(*used)
    return tuple(frozenset(names) for names in used)
