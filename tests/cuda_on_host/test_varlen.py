"""Attention by document boundaries on the emulated device, in the graph of a compiled layer and outside of it.

The host has no kernel for it. A stand-in, by explicit masks, is called as torch calls the kernel of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend

from llmtrain.engines import build_engine, forward
from llmtrain.models import compiled
from llmtrain.plan.ds_config import render
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import step_batch, tiny_recipe

pytestmark = pytest.mark.breadth

STEPS = 3
BF16 = {"parallel.precision": "bf16", "parallel.zero_stage": 1, "model.attention": "varlen"}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
COMPILED = {"kernels.blocks": "compiled"}
CASES = {
    "sequence, windows": {"parallel.sequence": 2, "model.architecture": "mistral", "model.config.sliding_window": 5},
    "pipeline": {"parallel.pipeline": 2},
    "FSDP2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}
Given = list[tuple[Tensor, int]]
"""The bounds and the length of the longest document of each call."""


def _scores(query: Tensor, key: Tensor, bounds: tuple[Tensor, Tensor], is_causal: bool, named: Any) -> Tensor:
    """Returns [heads, queries, keys] in fp32, without waiting for the device."""
    left, right, scale = named["window_size_left"], 0 if is_causal else named["window_size_right"], named["scale"]
    documents, from_ends = [], []
    for states, each in zip((query, key), bounds, strict=True):
        places = torch.arange(states.shape[0], device=query.device)
        document = torch.bucketize(places, each, right=True)
        documents.append(document)
        from_ends.append(each[document] - places)
    distance = from_ends[1] - from_ends[0][:, None]
    allowed = documents[0][:, None] == documents[1]
    if left >= 0:
        allowed &= distance <= left
    if right >= 0:
        allowed &= distance >= -right
    scores = torch.einsum("qhd,khd->hqk", query.float(), _for_each_head(key, query)) * scale
    return torch.where(allowed, scores, float("-inf"))


def _for_each_head(states: Tensor, query: Tensor) -> Tensor:
    return states.float().repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _like(states: Tensor, values: Tensor) -> Tensor:
    """Returns values in the type and the layout of states, as the kernel does."""
    return torch.empty_like(states).copy_(values)


def _install(given: Given) -> torch.library.Library:
    """Registers the stand-in; as long as the library lives."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        longest: int,
        longest_key: int,
        dropout: float,
        is_causal: bool,
        *others: Any,
        **named: Any,
    ) -> tuple[Tensor, ...]:
        given.extend([(bounds, longest), (key_bounds, longest_key)])
        scores = _scores(query, key, (bounds, key_bounds), is_causal, named)
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _for_each_head(value, query))
        nothing = torch.zeros(2, device=query.device)
        return _like(query, output), scores.logsumexp(-1), nothing, nothing, nothing

    def differentiate(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sums: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        longest: int,
        longest_key: int,
        dropout: float,
        is_causal: bool,
        *others: Any,
        **named: Any,
    ) -> tuple[Tensor, ...]:
        given.extend([(bounds, longest), (key_bounds, longest_key)])
        scores = _scores(query, key, (bounds, key_bounds), is_causal, named)
        weights = (scores - log_sums[..., None]).exp()
        gradient = gradient.float()
        of_weights = torch.einsum("qhd,khd->hqk", gradient, _for_each_head(value, query))
        of_scores = weights * (of_weights - (gradient * output.float()).sum(-1).T[..., None]) * named["scale"]
        found = (
            torch.einsum("hqk,khd->qhd", of_scores, _for_each_head(key, query)),
            torch.einsum("hqk,qhd->khd", of_scores, query.float()),
            torch.einsum("hqk,qhd->khd", weights, gradient),
        )
        return tuple(
            _like(states, one.unflatten(1, (states.shape[1], -1)).sum(2))
            for one, states in zip(found, (query, key, value), strict=True)
        )

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", attend, "CUDA")
    library.impl("_flash_attention_backward", differentiate, "CUDA")
    return library


def _train(rank: int, recipes: list[Recipe], ranks: int) -> list[tuple[list[float], int, int]]:
    """Returns losses, the number of calls of the kernel, and the number of waits in the last step, of each recipe."""
    from _cuda_on_host import waits

    given: Given = []
    library = _install(given)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # The graphs run uncompiled, because no GPU is there to run compiled kernels.
        patch.setattr(compiled, "_inductor", lookup_backend("aot_eager"))
        patch.setattr(forward, "check_compiler", lambda fields, on_cpu: None)
        for recipe in recipes:
            plan = resolve(recipe, Cluster(devices_per_node=ranks, device="h100"))
            accumulation, replicas = plan.batch.gradient_accumulation_steps, plan.data_parallel_size
            engine = build_engine(plan, render(plan), torch.device("cuda", rank))
            given.clear()
            losses = []
            for step in range(STEPS):
                batch = step_batch(step, 1, accumulation, engine.data_parallel_rank, replicas)
                before = sum(waits().values())
                loss = engine.train_step(batch).loss
                of_step = sum(waits().values()) - before
                losses.append(loss.item())
            for bounds, longest in given:
                assert bounds.diff().max().item() == longest
            found.append((losses, len(given), of_step))
    del library
    return found


@pytest.mark.parametrize("name", CASES)
def test_varlen_in_a_graph_gets_the_same_arguments_without_waiting(gpus, name):
    """A selective checkpoint does not call the kernel again."""
    eager = tiny_recipe(**BF16 | CASES[name])
    recipes = [eager, eager.with_(**COMPILED), eager.with_(**COMPILED | SELECTIVE)]
    for plain, *others in gpus(2, _train, recipes, 2, timeout=300):
        for losses, calls, waited in others:
            assert losses == plain[0]
            assert calls == plain[1] > 0
            assert waited <= plain[2]


def test_a_ring_calls_the_kernel_as_its_blocks_attend(gpus):
    """With windows, and heads whose size the kernel fills up. In bf16, the loss is known to a unit in the last place
    of the outputs, relative to their size."""
    fields = BF16 | CASES["sequence, windows"] | {"model.config.head_dim": 12}
    recipes = [tiny_recipe(**fields | each) for each in ({}, {"parallel.sequence_ring": 2})]
    for (exchanged, *_), (passed_on, *_) in gpus(2, _train, recipes, 2, timeout=300):
        assert passed_on == pytest.approx(exchanged, rel=2**-8)
