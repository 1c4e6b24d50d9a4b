"""No rank of ZeRO-3 ever holds the whole model; a worker joins the group that its launcher describes, or fails."""

from __future__ import annotations

from llmtrain.plan.ds_config import render
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import plan_of


def _largest_at_once(rank: int):
    """Elements of parameters that this rank holds at most while the model is built, and of the model."""
    import torch
    from torch import nn

    from llmtrain.engines.deepspeed import partitioned

    held = []

    def note(module: nn.Module, *_: object) -> None:
        held.append(sum(parameter.numel() for parameter in model_parameters(module)))

    def model_parameters(module: nn.Module):
        return [parameter for parameter in _everything if parameter.numel()]

    _everything: list[nn.Parameter] = []
    original = nn.Module.register_parameter

    def register(self, name, parameter):
        original(self, name, parameter)
        if parameter is not None:
            _everything.append(parameter)
            note(self)

    nn.Module.register_parameter = register
    plan = plan_of(tiny_recipe(**{"parallel.zero_stage": 3, "batch.micro_batch_size": 4}), 2)
    model = partitioned.build_partitioned(plan.recipe, torch.float32, render(plan), torch.device("cpu"))
    nn.Module.register_parameter = original
    kept = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
    whole = sum(parameter.ds_numel for parameter in model.parameters())
    left = sum(parameter.numel() for parameter in model.parameters())
    return max(held), kept, left, whole


def test_zero3_builds_partitioned():
    for most, kept, left, whole in run_ranks(2, _largest_at_once):
        assert left == 0  # nothing whole is left
        assert kept <= 0.51 * whole  # a half of each parameter, padded to be even
        assert most < whole / 2  # nor was it there on the way: a module at a time


def _buffers(rank: int):
    """Type and content of every buffer, built whole and partitioned, in bf16."""
    import torch

    from llmtrain.engines.deepspeed import partitioned
    from llmtrain.models import build_model

    found = []
    for stage in (1, 3):
        fields = {"parallel.zero_stage": stage, "parallel.precision": "bf16", "batch.micro_batch_size": 8}
        plan = plan_of(tiny_recipe(**fields), 1)
        parts = plan.recipe, torch.bfloat16
        device = torch.device("cpu")
        model = (
            build_model(*parts, device) if stage == 1 else partitioned.build_partitioned(*parts, render(plan), device)
        )
        found.append({name: (str(buffer.dtype), buffer.tolist()) for name, buffer in model.named_buffers()})
    return found


def test_partitioning_does_not_round_the_rotary_frequencies():
    whole, partitioned = run_ranks(1, _buffers)[0]
    assert "model.rotary_emb.inv_freq" in whole
    assert partitioned == whole


def _seed(rank: int):
    import torch

    from llmtrain.checkpoint.state import begin

    plan = plan_of(tiny_recipe(**{"batch.micro_batch_size": 4}), 2)
    state = begin(plan, "key")
    return state.step, state.data, torch.initial_seed()


def test_a_new_run_seeds_each_rank_differently():
    """Else dropout would drop the same on every rank, or not depend on the recipe."""
    seed = tiny_recipe().train.seed
    assert run_ranks(2, _seed) == [(0, "key", seed), (0, "key", seed + 1)]


def _joined_as_if_alone(rank: int):
    from llmtrain.engines.runtime.distributed import init_process_group
    from llmtrain.launch.discovery.rank import Rank

    # The group of this process is there already, with one member, as accelerate makes it on a CPU.
    told = Rank(
        rank=1, local_rank=1, world_size=2, local_world_size=2, master_addr="127.0.0.1", master_port=1, launcher="test"
    )
    try:
        init_process_group(told, on_cpu=True)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_a_worker_without_its_process_group_is_refused():
    kind, message = run_ranks(1, _joined_as_if_alone)[0]
    assert kind == "RecipeError"
    assert "2 workers" in message
