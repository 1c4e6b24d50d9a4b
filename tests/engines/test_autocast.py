"""Under autocast, every engine multiplies in the lower type, in training and in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
CASES = {
    "ZeRO-1": {"parallel.zero_stage": 1},
    "ZeRO-3": {"parallel.zero_stage": 3},
    "DDP": {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"},
    "FSDP2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1},
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 1},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2},
    "zero bubble": {
        **{"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2},
        **{"parallel.pipeline_schedule": "zero_bubble", "parallel.pipeline_chunks": 2},
        "model.config.num_hidden_layers": 4,
    },
}


class Products(TorchDispatchMode):
    """Records the types in which matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if getattr(func, "overloadpacket", None) in PRODUCTS:
            self.types |= {str(one.dtype) for one in args if isinstance(one, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def _types(rank: int, fields: list[dict]) -> list[list[str]]:
    found = []
    for one in fields:
        plan = plan_of(tiny_recipe(**one, **{"parallel.precision": "autocast_bf16"}), 2)
        engine = engine_of(plan)
        sizes = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps
        batch = step_batch(0, *sizes, engine.data_parallel_rank, plan.data_parallel_size)
        for step in (engine.train_step, engine.eval_step):
            with Products() as products:
                step(batch)
            found.append(sorted(products.types))
    return found


@pytest.mark.parametrize("cases", [["ZeRO-1", "pipeline"], pytest.param([*CASES][1:], marks=pytest.mark.slow)], ids=len)
def test_matrices_are_multiplied_in_bf16(cases):
    for rank, types in enumerate(run_ranks(2, _types, [CASES[name] for name in cases])):
        assert types == [["torch.bfloat16"]] * 2 * len(cases), (rank, cases)
