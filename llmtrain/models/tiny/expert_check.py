"""Verifies on a tiny copy that a family with distributed experts computes the same logits and gradients."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.models.expert_parallel import ExpertParallel, expert_parameters, not_distributed
from llmtrain.models.experts import ExpertGroups
from llmtrain.models.tensor.split import DeclaredSplit, Part, TensorParallel, plan_split
from llmtrain.models.tiny.compare import SUM_TOLERANCE, Outcome, deviation
from llmtrain.models.tiny.model import MODEL_ERRORS, build_tiny_model
from llmtrain.models.tiny.tensor_check import (
    RANKS,
    ThreadCommunicator,
    outcome_of,
    run_in_threads,
    whole_part,
    with_tiny_copy,
)


def check_experts(config: PreTrainedConfig, tensor: int = 1, attention: str = "eager") -> DeclaredSplit:
    """Returns how `tensor` ranks split everything but the experts, after comparing a tiny copy with distributed experts
    with a whole one.

    Runs on the CPU, in fp32, without dropout. The random state is preserved. Raises FamilyError with the reason if
    logits or gradients differ, or if the experts are not computed by a function that can be chosen.
    """
    model, tiny, attention = with_tiny_copy(config, attention, not_distributed)
    with torch.random.fork_rng(devices=[]):
        return split_beside_experts(model, tensor, compare_experts(tiny, tensor > 1, attention))


def split_beside_experts(model: PreTrainedModel, degree: int, whole: Part = "") -> DeclaredSplit:
    """Returns how tensor parallel ranks split a model whose experts are distributed. Raises FamilyError.

    whole: the part of each layer that is left unsplit.
    """
    if degree == 1:
        return DeclaredSplit({}, {})
    split, experts = plan_split(model, degree, whole), expert_parameters(model)
    modules = {name.rpartition(".")[0] for name in experts}
    return replace(
        split,
        styles={name: style for name, style in split.styles.items() if name not in modules | experts},
        shards={name: shard for name, shard in split.shards.items() if name not in experts},
    )


def compare_experts(config: PreTrainedConfig, with_tensor: bool = False, attention: str = "eager") -> Part:
    """Distributes the experts of the model of `config` itself over two ranks. Raises FamilyError if results differ.

    Returns the part of each layer that these ranks leave unsplit. with_tensor: whether they split the other part.
    Otherwise both compute the same tokens, so the gradients of experts are twice those of the whole model.
    """
    try:
        whole = build_tiny_model(config, attention)
        expected = outcome_of(whole)
    except MODEL_ERRORS as error:
        raise not_distributed(config, f"a tiny copy does not run ({type(error).__name__}: {error})") from error
    names = expert_parameters(whole)
    if not names:
        raise not_distributed(config, "transformers has no function for them that could be replaced")
    unsplit = whole_part(config, attention) if with_tensor else ""
    split = split_beside_experts(whole, RANKS if with_tensor else 1, unsplit)

    def distributed(group: ThreadCommunicator) -> PreTrainedModel:
        model = copy.deepcopy(whole)
        alone = ThreadCommunicator.alone()
        experts = ExpertParallel(names, ExpertGroups(group, group if with_tensor else alone))
        tensor = TensorParallel(split, group)
        for name, parameter in model.named_parameters():
            experts.shard(name, parameter)
            tensor.shard(name, parameter)
        own_names = {name: name for name, _ in model.named_parameters()}
        experts.install(model, own_names)
        tensor.install(model, own_names)
        return model

    try:
        outcomes = run_in_threads(distributed)
    except MODEL_ERRORS as error:
        reason = f"its forward pass fails with distributed experts ({type(error).__name__}: {error})"
        raise not_distributed(config, reason) from error
    for rank, outcome in enumerate(outcomes):
        parts = {}
        for name, gradient in expected.gradients.items():
            if gradient is not None and name in names:
                gradient = gradient.chunk(RANKS)[rank] * (1 if with_tensor else RANKS)
            elif gradient is not None and name in split.shards:
                gradient = split.shards[name].part(gradient, rank, RANKS)
            parts[name] = gradient
        difference = deviation(outcome, Outcome(expected.output, parts))
        if difference.output > SUM_TOLERANCE:
            raise not_distributed(config, f"its logits deviate from the whole model's by {difference.output:.0e}")
        if difference.gradient > SUM_TOLERANCE:
            reason = f"its gradients deviate from the whole model's by {difference.gradient:.0e} {difference.parameter}"
            raise not_distributed(config, reason)
    return unsplit
