"""Frozen weights in 4 bit: every strategy matches a plain loop that holds the dequantized values."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.errors import RecipeError
from llmtrain.models import build_model, nf4
from llmtrain.models.adapter import weight_name
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.facts.weights import packed_bytes
from llmtrain.plan.rules import assemble
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from llmtrain.trials.verify import reference_adapters
from llmtrain.trials.verify.reference import ReferenceLoop
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, GPT_OSS
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace

CPU = torch.device("cpu")
STEPS = 3
SLOW, BREADTH = pytest.mark.slow, pytest.mark.breadth
LORA = {"rank": 4, "alpha": 16.0}
ACCELERATE = {"parallel.backend": "accelerate"}
PIPELINE = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
FULL = {"parallel.activation_checkpointing": "full"}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, PIPELINE),
    "zero1": (2, {"parallel.zero_stage": 1}),
    "zero0": (2, {"parallel.zero_stage": 0}),
    "zero2": (2, {"parallel.zero_stage": 2}),
    "zero2 offload": (2, {"parallel.zero_stage": 2, "parallel.offload_optimizer": "cpu"}),
    "zero1 checkpointing": (2, {"parallel.zero_stage": 1, **FULL}),
    "ddp": (2, ACCELERATE),
    "ddp checkpointing": (2, {**ACCELERATE, **FULL}),
    "accelerate zero2": (2, {**ACCELERATE, "parallel.accelerate": "deepspeed", "parallel.zero_stage": 2}),
    "sequence": (2, {"parallel.sequence": 2, "parallel.zero_stage": 2}),
    "compiled": (2, {"parallel.zero_stage": 1, "kernels.blocks": "compiled"}),
    "pipeline checkpointing": (2, {**PIPELINE, **FULL}),
    "pipeline sequence": (4, {**PIPELINE, "parallel.sequence": 2}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    untied = {"model.config.tie_word_embeddings": False, "train.seed": 3}
    build_model(tiny_recipe(**untied), torch.float32, CPU).save_pretrained(folder)
    return folder


def recipe_on(base: Path, **fields: Any) -> Recipe:
    model = {"model.architecture": None, "model.config": {}, "model.pretrained": str(base)}
    own = {"model.adapter": LORA, "model.quantize": "nf4", "optim.name": "sgd", "optim.lr": 0.3}
    return tiny_recipe(**{**model, **own, **fields})


def run_recipes(rank: int, recipes: list[Recipe], ranks: int) -> list[Trace]:
    found = []
    for recipe in recipes:
        plan = plan_of(recipe, ranks)
        engine = engine_of(plan)
        shape = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps
        found.append(trace(engine, range(STEPS), *shape, engine.data_parallel_rank, plan.data_parallel_size))
    return found


@pytest.fixture(scope="module")
def rounded(base, tmp_path_factory) -> Path:
    """A base with the values that the reference gives it, which shares no code with the engines."""
    folder = tmp_path_factory.mktemp("rounded")
    loop = ReferenceLoop(recipe_on(base), {}, CPU)
    held = {name: weight for name, weight in loop.named_weights() if ".lora_" not in name}
    model = build_model(recipe_on(base, **{"model.quantize": "none", "model.adapter": None}), torch.float32, CPU)
    model.load_state_dict(held)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, ["pipeline"], id="some"),
        pytest.param(2, ["zero1", "zero2", "ddp"], marks=SLOW, id="flat"),
        *(
            pytest.param(
                ranks, [name for name, one in STRATEGIES.items() if one[0] == ranks], marks=BREADTH, id=f"{ranks}"
            )
            for ranks in (2, 4)
        ),
    ],
)
def test_every_strategy_trains_on_the_same_quantized_values(base, rounded, ranks, names):
    recipes = [recipe_on(base, **STRATEGIES[name][1]) for name in names]
    plain = recipe_on(rounded, **{"model.quantize": "none"})
    expected = plain_run(plain, STEPS)
    full = plain_run(recipe_on(base, **{"model.quantize": "none"}), STEPS)
    assert not np.allclose(full.losses, expected.losses, rtol=1e-4)
    for runs in run_ranks(ranks, run_recipes, recipes, ranks):
        for name, run in zip(names, runs, strict=True):
            assert_same(run, expected, name)


def test_the_values_are_those_of_the_levels_and_of_both_scales():
    """The levels are quantiles of a normal distribution (section 3 of the paper); the rest is the reference's."""
    quantile = NormalDist().inv_cdf
    end = 0.9677083
    below = [quantile(end + (0.5 - end) * step / 8) for step in range(8)]
    above = [-quantile(end + (0.5 - end) * step / 7) for step in range(7)]
    levels = sorted([*(one / max(below) for one in [*below, *above]), 0.0])
    np.testing.assert_allclose(nf4.LEVELS, levels, rtol=0, atol=2e-7)
    for shape in ((64, 96), (33, 31), (300, 256)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        held = nf4.quantize(weight)
        assert sum(one.nbytes for one in held) == packed_bytes(weight.numel())
        values = nf4.round_trip(weight)
        torch.testing.assert_close(values, reference_adapters.in_nf4(weight), rtol=1e-6, atol=0)
        assert values.unique().numel() <= 16 * -(-weight.numel() // 64)
    assert not nf4.round_trip(torch.zeros(4, 64)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_4_bit_layer_equals_a_layer_with_the_dequantized_values(dtype):
    generator = torch.Generator().manual_seed(2)
    weight, bias = (torch.randn(shape, generator=generator) for shape in ((33, 31), (33,)))
    layer = nf4.Nf4Linear(weight, torch.nn.Parameter(bias), torch.float32, nf4.make_tables(CPU)).to(dtype)
    inputs = torch.randn((2, 5, 31), generator=generator).to(dtype).requires_grad_()
    same = inputs.detach().clone().requires_grad_()
    expected = torch.nn.functional.linear(same, nf4.round_trip(weight).to(dtype), layer.bias)
    found = layer(inputs)
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(inputs.grad, same.grad)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.nn.functional.linear(same, nf4.round_trip(weight), layer.bias)
        assert torch.equal(layer(inputs), cast)


@pytest.mark.parametrize("model", [{"architecture": "mixtral", "config": CONFIGS["mixtral"]}, GPT_OSS])
def test_experts_in_4_bit_equal_experts_with_the_dequantized_values(model, tmp_path):
    build_model(tiny_recipe(model=model), torch.float32, CPU).save_pretrained(tmp_path)
    adapter = {"rank": 3, "targets": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    fields = {"model.adapter": adapter, "model.attention": model.get("attention", "sdpa")}
    recipe = recipe_on(tmp_path, **fields)
    packed = build_model(recipe, torch.float32, CPU)
    plain = build_model(recipe_on(tmp_path, **fields, **{"model.quantize": "none"}), torch.float32, CPU)
    held = dict(ReferenceLoop(recipe, {}, CPU).named_weights())
    for name, weight in plain.named_parameters():
        if ".lora_" not in name:
            weight.data.copy_(held[weight_name(name)])
    gradients, logits = [], []
    for one in (packed, plain):
        for name, weight in one.named_parameters():
            if "lora_B" in name:
                weight.data.copy_(torch.linspace(-0.2, 0.2, weight.numel()).view_as(weight))
        logits.append(one(input_ids=torch.arange(32).view(2, 16)).logits)
        logits[-1].square().sum().backward()
        gradients.append({name: weight.grad for name, weight in one.named_parameters() if weight.requires_grad})
    torch.testing.assert_close(*logits)
    torch.testing.assert_close(*gradients)
    parts = [part for part in packed.modules() if isinstance(part, nf4.Nf4Linear | nf4.Nf4Stack)]
    tables = parts[0].get_buffer("tables").nbytes
    weights = model_facts(recipe.model, recipe.vocab_size).weights
    counted = [one for _, one in weights.in_layers() if one.packed]
    assert sum(".experts." in one.name for one in counted) == 4
    assert sum(one.matrices * packed_bytes(one.elements // one.matrices) for one in counted) == sum(
        buffer.nbytes for part in parts for buffer in part.buffers()
    ) - tables * len(parts)


def _packed_bytes(rank: int, recipe: Recipe) -> int:
    plan = assemble(Draft(recipe, Cluster(devices_per_node=2), model_facts(recipe.model, recipe.vocab_size)))
    model = engine_of(plan).model
    return sum(one.nbytes for part in model.modules() if isinstance(part, nf4.Nf4Linear) for one in part.buffers())


REFUSED: dict[str, dict[str, Any]] = {
    "zero3": {"parallel.zero_stage": 3},
    "tensor": {"parallel.tensor": 2},
    "pipeline tensor": {**PIPELINE, "parallel.tensor": 2},
    "fsdp2": {**ACCELERATE, "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_that_would_split_packed_weights_are_refused(base, name):
    with pytest.raises(RecipeError) as refusal:
        plan_of(recipe_on(base, **REFUSED[name]), 4)
    assert "adapter.nf4" in {problem.rule for problem in refusal.value.problems}


@pytest.mark.parametrize("name", [pytest.param("zero3", marks=BREADTH), pytest.param("fsdp2", marks=BREADTH)])
def test_every_rank_would_hold_all_packed_weights(base, name):
    whole = run_ranks(1, _packed_bytes, recipe_on(base, **{"parallel.backend": "data_parallel"}))
    assert whole[0] > 0
    assert run_ranks(2, _packed_bytes, recipe_on(base, **REFUSED[name])) == whole * 2


@pytest.mark.parametrize(
    "fields",
    [{"model.adapter": None}, {"model.pretrained": None, "model.architecture": "llama"}],
)
def test_only_frozen_pretrained_weights_are_packed(base, fields):
    with pytest.raises(RecipeError, match="needs `pretrained` weights and an `adapter`"):
        recipe_on(base, **fields)
