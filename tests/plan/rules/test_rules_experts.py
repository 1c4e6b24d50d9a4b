"""The rules of expert parallelism, compared with the engine's own blocks that replace those of the model.

One rank that holds all experts is enough for most: what a block computes does not depend on where the experts are.
"""

from __future__ import annotations

import pytest
import torch

from llmtrain.models import build_model
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.families import EXPERT_PRESETS
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import assemble, broken
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, step_batch
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, moe_recipe
from tests.helpers.traces import engine_of

CPU = torch.device("cpu")


def refusals(recipe) -> set[str]:
    facts = model_facts(recipe.model, recipe.vocab_size)
    return {problem.rule for problem in broken(Draft(recipe, Cluster(devices_per_node=2), facts))[0]}


def model_of(recipe, dtype=torch.float32, replaced=False):
    """The model in training mode, as `transformers` builds it or with the engine's blocks."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    model = build_model(recipe, dtype, CPU)
    if replaced:
        preset = EXPERT_PRESETS.get(model.config.model_type)
        block = {"enabled": True, "autoep_size": 1} | ({"preset_model": preset} if preset else {})
        replacer = AutoEP(model, parse_autoep_config(block))
        replacer.replace_moe_layers(replacer.ep_parser(), ep_size=1, ep_rank=0)
    return model.train()


def outputs(model, seed=0):
    tokens = torch.arange(64).view(2, 32) * 7 % 256
    torch.manual_seed(seed)
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_autoep_blocks_equal_those_of_the_model(architecture):
    recipe = moe_recipe(architecture)
    assert refusals(recipe) == set()
    theirs, ours = outputs(model_of(recipe)), outputs(model_of(recipe, replaced=True))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
    if recipe.model.config.get("output_router_logits"):
        torch.testing.assert_close(ours.aux_loss, theirs.aux_loss, rtol=1e-5, atol=0)


def test_every_family_with_a_preset_is_tried():
    from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS

    assert {kind: name for name, preset in PRESET_MODELS.items() for kind in preset.hf_model_types} == EXPERT_PRESETS
    assert CONFIGS.keys() == EXPERT_PRESETS.keys()


def test_a_family_without_a_preset_is_refused():
    config = {**CONFIGS["mixtral"], "num_experts": 4, "num_experts_per_tok": 2}
    del config["num_local_experts"]
    recipe = moe_recipe(**{"model": {"architecture": "olmoe", "config": config}})
    assert refusals(recipe) == {"layout.expert"}
    with pytest.raises(ValueError, match="ambiguous"):
        model_of(recipe, replaced=True)


def test_autoep_draws_no_router_noise():
    recipe = moe_recipe(**{"model.config.router_jitter_noise": 0.5})
    assert refusals(recipe) == {"expert.router_noise"}
    theirs, ours = model_of(recipe), model_of(recipe, replaced=True)
    assert not torch.equal(outputs(theirs, seed=1).logits, outputs(theirs, seed=2).logits)
    assert torch.equal(outputs(ours, seed=1).logits, outputs(ours, seed=2).logits)


def test_autoep_passes_probabilities_to_the_load_balance_loss():
    recipe = moe_recipe("qwen3_5_moe_text", **{"model.config.output_router_logits": True})
    assert refusals(recipe) == {"expert.router_loss"}
    theirs, ours = outputs(model_of(recipe)).aux_loss, outputs(model_of(recipe, replaced=True)).aux_loss
    assert abs(ours - theirs) > 1e-4 * theirs


@pytest.mark.parametrize("architecture", CONFIGS)
def test_routers_in_fp32_become_bf16(architecture):
    """Weights that tokens give to their experts: where the model takes them in fp32, the engine rounds them."""
    recipe = moe_recipe(architecture, **{"parallel.precision": "bf16", "parallel.zero_stage": 1})
    theirs, ours = model_of(recipe, torch.bfloat16), model_of(recipe, torch.bfloat16, replaced=True)
    path = next(name for name, module in ours.named_modules() if getattr(module, "_is_autoep_layer", False))
    tokens = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        expected = theirs.get_submodule(path).gate(tokens)[0]
        logits = ours.get_submodule(path).router.gate(tokens)
    rounds = not torch.equal(expected.float(), logits.float())
    assert rounds == ("expert.router_precision" in refusals(recipe))


def planned(recipe):
    """On two ranks, past the rules."""
    return assemble(Draft(recipe, Cluster(devices_per_node=2), model_facts(recipe.model, recipe.vocab_size)))


def _scale_after_an_overflow(rank: int, recipe) -> float:
    """Of the loss, after a step in which gradients of the second rank's experts overflowed."""
    engine = engine_of(planned(recipe))
    if rank == 1:
        expert = next(one for one in engine.model.parameters() if not getattr(one, "allreduce", True))
        expert.register_hook(lambda gradient: gradient * float("inf"))
    engine.train_step(step_batch(0, 1, GLOBAL_BATCH // 2, rank, 2))
    return engine.engine.torch_autocast_z0_gradscaler.get_scale()


def test_an_overflow_in_one_ranks_experts_lowers_only_its_own_scale():
    recipe = moe_recipe(**{"parallel.precision": "autocast_fp16", "optim.name": "sgd", "optim.lr": 0.1})
    assert refusals(recipe) == {"expert.loss_scale"}
    first, second = run_ranks(2, _scale_after_an_overflow, recipe)
    assert second < first
