"""The rules of expert parallelism, compared with the engine."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from llmtrain.errors import FamilyError
from llmtrain.models.experts import ExpertGroups, forward
from llmtrain.models.tiny.expert_check import check_experts
from llmtrain.models.tiny.tensor_check import ThreadCommunicator
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import assemble, broken
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, step_batch
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, GPT_OSS, moe_recipe
from tests.helpers.traces import engine_of

FAMILIES = {**CONFIGS, "gpt_oss": GPT_OSS["config"]}


def refusals(recipe, devices: int = 2) -> set[str]:
    facts = model_facts(recipe.model, recipe.vocab_size)
    return {problem.rule for problem in broken(Draft(recipe, Cluster(devices_per_node=devices), facts))[0]}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_tiny_copy_with_distributed_experts_equals_the_model(architecture, tensor):
    assert refusals(moe_recipe(architecture, **{"parallel.tensor": tensor})) == set()
    check_experts(AutoConfig.for_model(architecture, **FAMILIES[architecture]), tensor)


def test_a_family_whose_experts_are_computed_elsewhere_is_refused():
    with pytest.raises(FamilyError, match="no function for them"):
        check_experts(AutoConfig.for_model("llama4_text", num_hidden_layers=4))


@pytest.mark.parametrize("fault", ["received", "sent", "tensor"])
def test_a_fault_in_the_exchange_is_found(monkeypatch, fault):
    """Rows that come back in another order; to the wrong rank; and a part of the tokens that no rank sends."""
    exchange = ThreadCommunicator.all_to_all

    def wrong(self, rows, sent, received):
        arrived = exchange(self, rows, sent, received)
        if rows.ndim == 1 or fault == "tensor":
            return arrived
        return arrived.flip(0) if fault == "received" else arrived * (1 + 0.01 * self.rank)

    monkeypatch.setattr(ThreadCommunicator, "all_to_all", wrong)
    if fault == "tensor":
        monkeypatch.setattr("llmtrain.models.experts.gather_rows", lambda part, rows, group: part.repeat(group.size, 1))
    with pytest.raises(FamilyError, match="deviate"):
        check_experts(AutoConfig.for_model("mixtral", **CONFIGS["mixtral"]), 2)


def test_a_rank_whose_experts_no_token_chooses_has_gradients_of_zero():
    """torch's grouped products have no backward pass without rows."""
    barrier, places = threading.Barrier(2, timeout=60), [None, None]
    gradients = [None, None]

    def run(rank: int) -> None:
        module = MixtralExperts(AutoConfig.for_model("mixtral", **CONFIGS["mixtral"]))
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
            parameter.data = parameter.data.chunk(2)[rank].clone()
        module.expert_groups = ExpertGroups(ThreadCommunicator(rank, places, barrier), ThreadCommunicator.alone())
        hidden = torch.randn(6, 32, requires_grad=True)
        chosen = torch.tensor([[0, 1]] * 6)  # the first rank has both
        forward(module, hidden, chosen, torch.full((6, 2), 0.5)).sum().backward()
        gradients[rank] = [parameter.grad for parameter in module.parameters()]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(gradient.any() for gradient in gradients[0])
    assert all(gradient is not None and not gradient.any() for gradient in gradients[1])


def test_stages_without_experts_are_refused():
    """The first two of three layers are dense."""
    fields = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
    assert refusals(moe_recipe("deepseek_v3", **fields), 4) == {"expert.stages"}
    assert refusals(moe_recipe("mixtral", **fields), 4) == set()


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
