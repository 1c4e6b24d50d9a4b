"""Adapters, and weights that a recipe freezes by name, match plain PyTorch and PEFT under every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.engines.optim import schedule
from llmtrain.errors import RecipeError
from llmtrain.models import build_model
from llmtrain.models.adapter import select_trained, weight_name
from llmtrain.models.adapter_files import file_name, stored_modules, to_file
from llmtrain.models.build import training_configuration
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.recipe import Recipe
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, WRAPPER, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import INDEXED, moe_recipe
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace, worst

STEPS = 4
SLOW = pytest.mark.slow
ACCELERATE = {"parallel.backend": "accelerate"}
OFFLOAD = {"parallel.offload_optimizer": "cpu"}
FULL = {"parallel.activation_checkpointing": "full"}
PIPELINE = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
TENSOR = {"parallel.tensor": 2}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero{stage}": (2, {"parallel.zero_stage": stage}) for stage in range(4)},
    "zero2 offload": (2, {"parallel.zero_stage": 2, **OFFLOAD}),
    "zero3 offload": (2, {"parallel.zero_stage": 3, **OFFLOAD, "parallel.offload_param": "cpu"}),
    "zero1 checkpointing": (2, {"parallel.zero_stage": 1, **FULL}),
    "ddp": (2, {**ACCELERATE, "parallel.accelerate": "ddp"}),
    "ddp checkpointing": (2, {**ACCELERATE, "parallel.accelerate": "ddp", **FULL}),
    "fsdp2": (2, {**ACCELERATE, "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}),
    "fsdp2 zero2": (2, {**ACCELERATE, "parallel.accelerate": "fsdp2", "parallel.zero_stage": 2}),
    "accelerate zero2": (2, {**ACCELERATE, "parallel.accelerate": "deepspeed", "parallel.zero_stage": 2}),
    "data_parallel": (1, {"parallel.backend": "data_parallel"}),
    "pipeline": (2, PIPELINE),
    "pipeline zero0": (2, {**PIPELINE, "parallel.zero_stage": 0, "optim.clip_grad_norm": 0.0}),
    "pipeline checkpointing": (2, {**PIPELINE, **FULL}),
    "pipeline tensor": (4, {**PIPELINE, **TENSOR}),
    **{f"tensor zero{stage}": (2, {**TENSOR, "parallel.zero_stage": stage}) for stage in range(4)},
    "sequence": (2, {"parallel.sequence": 2, "parallel.zero_stage": 2}),
    "pipeline sequence": (4, {**PIPELINE, "parallel.sequence": 2}),
}
UNTIED = {"model.config.tie_word_embeddings": False}
LORA = {"model.adapter": {"rank": 4, "alpha": 16.0}}
FUSED = {
    **{"model.architecture": "mixtral", "model.config.num_local_experts": 4},
    "model.adapter": {
        "rank": 4,
        "alpha": 16.0,
        "targets": ["q_proj"],
        "target_parameters": ["gate_up_proj", "down_proj"],
    },
}
EXPERTS = {"target_parameters": ["experts.*_proj", "mlp.gate.weight"]}
TRAINED: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "scaled by rank": {"model.adapter": {"rank": 4, "alpha": 16.0, "rslora": True, "targets": ["q_proj", "o_proj"]}},
    "head": {"model.adapter": {"rank": 4, "targets": ["mlp.*"], "modules_to_save": ["lm_head"]}, **UNTIED},
    "adapters and tied table": {"model.adapter": {"rank": 4, "targets": ["mlp.*"], "modules_to_save": ["lm_head"]}},
    "experts": {**MIXTRAL, "model.adapter": {"rank": 3, "alpha": 16.0, "targets": ["v_proj"], **EXPERTS}},
    "last layer": {"model.adapter": {"rank": 4, "targets": ["model.layers.1.*_proj"]}},
    "first layer": {"model.adapter": {"rank": 4, "targets": ["model.layers.0.*_proj"]}},
    "norms": {"model.trainable": ["*norm.weight"]},
    "tied table": {"model.trainable": ["lm_head.weight", "model.layers.1.*"]},
    "end": {"model.trainable": ["lm_head.weight"], **UNTIED},
}


def recipe_of(trained: str, strategy: str, **fields: Any) -> Recipe:
    # SGD shows a scaled gradient, which Adam divides away.
    sgd = {"optim.name": "sgd", "optim.lr": 0.3}
    return tiny_recipe(**{**sgd, **TRAINED[trained], **STRATEGIES[strategy][1], **fields})


def run_recipes(rank: int, recipes: list[Recipe], ranks: int) -> list[Trace]:
    found = []
    for recipe in recipes:
        plan = plan_of(recipe, ranks)
        engine = engine_of(plan)
        batch, replicas = plan.batch, plan.data_parallel_size
        shape = batch.micro_batch_size, batch.gradient_accumulation_steps
        found.append(trace(engine, range(STEPS), *shape, engine.data_parallel_rank, replicas))
    return found


def check(ranks: int, cases: list[tuple[str, str]], **fields: Any) -> None:
    recipes = [recipe_of(*case, **fields) for case in cases]
    for runs in run_ranks(ranks, run_recipes, recipes, ranks):
        for case, recipe, run in zip(cases, recipes, runs, strict=True):
            optim = {"optim.clip_grad_norm": recipe.optim.clip_grad_norm}
            expected = plain_run(recipe_of(case[0], "data_parallel", **optim, **fields), STEPS)
            assert_same(run, expected, case)


def cases_of(ranks: int, trained: str) -> list[tuple[str, str]]:
    return [(trained, name) for name, (number, _) in STRATEGIES.items() if number == ranks]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, [("lora", "zero3"), ("adapters and tied table", "pipeline")], id="some"),
        pytest.param(2, [("lora", name) for name in ("zero1", "fsdp2", "ddp", "tensor zero1")], marks=SLOW, id="flat"),
        pytest.param(4, [("lora", "pipeline tensor")], marks=SLOW, id="slices"),
        *(
            pytest.param(ranks, cases_of(ranks, trained), marks=pytest.mark.breadth, id=f"{ranks} {trained}")
            for ranks in (2, 4)
            for trained in TRAINED
        ),
    ],
)
def test_every_strategy_trains_the_same_parameters_as_peft(ranks, cases):
    check(ranks, cases)


@pytest.mark.breadth
def test_gradients_of_slices_are_summed_although_others_are_delayed():
    split = {"parallel.pipeline_schedule": "zero_bubble", "parallel.pipeline_chunks": 2}
    check(4, [("lora", "pipeline tensor")], **split, **{"model.config.num_hidden_layers": 4})


def as_in_file(weights: Mapping[str, torch.Tensor], recipe: Recipe) -> dict[str, torch.Tensor]:
    """The adapters among the weights, as PEFT's files have them."""
    trained = select_trained(recipe, training_configuration(recipe))
    stored = stored_modules(trained.parameters)
    return {file_name(name, stored): to_file(name, one) for name, one in weights.items() if ".lora_" in name}


def _by_hand(recipe: Recipe, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and adapters of a loop that knows nothing but torch and PEFT."""
    drawn = {
        weight_name(name): weight
        for name, weight in build_model(recipe, torch.float32, torch.device("cpu")).state_dict().items()
    }
    config = AutoConfig.for_model(recipe.model.architecture, **recipe.model.config)
    base = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.model.attention_kernel)
    base.load_state_dict({name: weight for name, weight in drawn.items() if ".lora_" not in name})
    adapter = recipe.model.adapter
    targets = adapter.targets if adapter.targets == "all-linear" else [*adapter.targets]
    parameters = [*adapter.target_parameters] or None
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, target_parameters=parameters)
    model = peft.get_peft_model(base, lora)
    peft.set_peft_model_state_dict(model, as_in_file(drawn, recipe))
    optim = recipe.optim
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    rates = schedule(optimizer, recipe)
    losses = []
    for step in range(steps):
        batch = step_batch(step, 1, GLOBAL_BATCH)
        optimizer.zero_grad()
        losses.append(0.0)
        for one in batch.micro_batches:
            logits = model(input_ids=one.input_ids, position_ids=one.position_ids, use_cache=False).logits
            loss = cross_entropy(logits[0], one.labels[0], reduction="sum") / batch.target_tokens
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, optim.clip_grad_norm)
        optimizer.step()
        rates.step()
    return losses, peft.get_peft_model_state_dict(model)


LOADS_EXPERTS = Version(peft.__version__) >= Version("0.20")
"""PEFT 0.19 calls the converters of weights of `transformers` 5.21 with arguments that they no longer have."""
OF_EXPERTS = pytest.mark.skipif(not LOADS_EXPERTS, reason="PEFT 0.19 cannot load adapters of mixtures of experts")


@pytest.mark.parametrize(
    "fields", [pytest.param(LORA, id="layers"), pytest.param(FUSED, id="experts", marks=OF_EXPERTS)]
)
def test_a_run_matches_a_plain_loop_with_peft(fields):
    recipe = tiny_recipe(**fields, **{"parallel.backend": "data_parallel"})
    losses, weights = _by_hand(recipe, STEPS)
    run = run_ranks(1, run_recipes, [recipe], 1)[0][0]
    assert worst(run.losses, losses) < 1e-6
    trained = as_in_file({name: torch.from_numpy(weight) for name, weight in run.weights.items()}, recipe)
    assert weights
    assert trained.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-6, msg=name)
        assert torch.any(weight)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such module": ({"model.adapter": {"rank": 4, "targets": ["query"]}}, "adapter.targets"),
    "no linear layer": ({"model.adapter": {"rank": 4, "targets": ["self_attn"]}}, "adapter.linear"),
    "the head": ({"model.adapter": {"rank": 4, "targets": ["lm_head"]}}, "adapter.head"),
    "no such parameter of its own": (
        {"model.adapter": {"rank": 4, "target_parameters": ["experts.w1"]}},
        "adapter.targets",
    ),
    "a layer's parameter": (
        {"model.adapter": {"rank": 4, "target_parameters": ["q_proj.weight"]}},
        "adapter.parameters",
    ),
    "a vector": ({"model.adapter": {"rank": 4, "target_parameters": ["norm.weight"]}}, "adapter.parameters"),
    "no such module to save": ({"model.adapter": {"rank": 4, "modules_to_save": ["score"]}}, "adapter.modules"),
    "no such parameter": ({"model.trainable": ["lm_head.bias"]}, "model.trainable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_untrainable_adapters_are_refused(name):
    fields, rule = REFUSED[name]
    with pytest.raises(RecipeError) as refusal:
        build_model(tiny_recipe(**fields), torch.float32, torch.device("cpu"))
    assert [problem.rule for problem in refusal.value.problems] == [rule]


def test_an_adapter_that_no_loss_depends_on_is_refused():
    """DeepSeek V3.2's indexer chooses tokens, which has no gradient."""
    model = {"architecture": "deepseek_v32", "config": INDEXED, "adapter": {"rank": 4, "targets": ["indexer.*"]}}
    with pytest.raises(RecipeError, match=r"does not depend on an adapter of .*indexer"):
        build_model(tiny_recipe(model=model), torch.float32, torch.device("cpu"))


def test_layers_that_peft_treats_as_experts_are_refused():
    """Dense layers of Qwen3 MoE have the names that its experts had in older files."""
    recipe = moe_recipe("qwen3_moe", **{"model.adapter": {"rank": 4}, "parallel.expert": 1})
    with pytest.raises(RecipeError, match=r"PEFT adapts other modules than requested.*experts"):
        build_model(recipe, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alpha": 4.0}, "set `rank`"),
        ({"pretrained": "folder", "rank": 4}, "leave out rank"),
        ({"rank": 4, "revision": "main"}, "revision"),
    ],
)
def test_contradictions_are_refused(given, message):
    with pytest.raises(RecipeError, match=message):
        tiny_recipe(**{"model.adapter": given})
    with pytest.raises(RecipeError, match="modules_to_save"):
        tiny_recipe(**LORA, **{"model.trainable": ["*"]})


def test_adapters_leave_out_what_texts_do_not_reach():
    """The vision tower of Gemma 3 has layers with the names of the decoder's."""
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        model = {"architecture": "gemma3", "config": WRAPPER, "adapter": {"rank": 4, "targets": targets}}
        recipe = tiny_recipe(model=model)
        built = build_model(recipe, torch.float32, torch.device("cpu"))
        trained = {name: one.numel() for name, one in built.named_parameters() if one.requires_grad}
        assert trained
        assert not [name for name in trained if "vision" in name or "projector" in name]
        assert model_facts(recipe.model, recipe.vocab_size).trained_parameters == sum(trained.values())
