"""Norms of gradients, and ZeRO's, which is summed over the ranks together with the loss."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import distributed as dist

from llmtrain.overrides.torch import PIECE, squared_norm
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

CPU = torch.device("cpu")
OF_A_PIECE = PIECE**0.5 * 2**-24
"""Sums of n squares in fp32 are off by about √n roundings, and a root by half as much."""


def test_a_large_tensor_is_summed_exactly():
    """Each sum of squares of 2⁻⁵ is a number of fp64; torch's own norm in fp32 is off on a CPU."""
    large = torch.full((30_000_000,), 2.0**-5)
    assert squared_norm([large], CPU).sqrt().item() == pytest.approx((len(large) / 1024) ** 0.5, rel=1e-9)


def test_the_norm_of_many_numbers_is_as_exact_as_that_of_a_piece():
    """By the rounding of a piece, and not of the whole tensor."""
    drawn = torch.randn(6_000_000, generator=torch.Generator().manual_seed(0))
    exact = drawn.double().square().sum().item()
    assert squared_norm([drawn.view(2000, 3000).t()], CPU).item() == pytest.approx(exact, rel=OF_A_PIECE)
    assert squared_norm([drawn.bfloat16()], CPU).item() == pytest.approx(
        drawn.bfloat16().double().square().sum().item(), rel=OF_A_PIECE
    )


def test_no_gradients_have_no_norm():
    assert squared_norm([], CPU) == 0


def _norms(rank: int, ranks: int, cases: list[dict[str, object]]) -> list[list[tuple[float, float, int]]]:
    return [_norms_of(ranks, fields) for fields in cases]


def _norms_of(ranks: int, fields: dict[str, object]) -> list[tuple[float, float, int]]:
    """Of each of two steps: our norm, DeepSpeed's own, and how many sums over the ranks ours took."""
    plan = plan_of(tiny_recipe(**{"batch.micro_batch_size": 2, **fields}), ranks)
    engine = engine_of(plan)
    optimizer, kind = engine.engine.optimizer, type(engine.engine.optimizer)
    take, reduce, sums, found = engine._norm_with_loss.take, dist.all_reduce, [], []

    def counted(*arguments, **options):
        sums.append(arguments)
        return reduce(*arguments, **options)

    def both(share):
        own = combine_grad_norm_groups(kind._get_norm_groups(optimizer)) if of_3 else kind.scaled_global_norm(optimizer)
        sums.clear()
        dist.all_reduce = counted
        loss = take(share)
        dist.all_reduce = reduce
        norm = optimizer._get_norm_groups()[0] if of_3 else optimizer.scaled_global_norm()
        found.append((norm.item(), own.item(), len(sums)))
        return loss

    of_3 = plan.parallel.zero_stage == 3
    engine._norm_with_loss.take = both
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    for step in range(2):
        result = engine.train_step(step_batch(step, *shape, engine.data_parallel_rank, plan.data_parallel_size))
        assert result.grad_norm.item() == found[-1][0]
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [{"parallel.zero_stage": 1}]),
        (
            2,
            [
                {"parallel.zero_stage": 1},
                {"parallel.zero_stage": 2, "parallel.precision": "bf16"},
                {"parallel.zero_stage": 3},
                {"parallel.zero_stage": 1, "parallel.sequence": 2},
            ],
        ),
    ],
    ids=["alone", "two ranks"],
)
def test_the_norm_of_zero_equals_deepspeeds_and_is_summed_once(ranks, cases):
    for found in run_ranks(ranks, _norms, ranks, cases):
        for fields, steps in zip(cases, found, strict=True):
            for ours, own, sums in steps:
                # DeepSpeed's groups are rounded to fp32.
                assert ours == pytest.approx(own, rel=OF_A_PIECE / 2 + 2**-22), fields
                assert sums == (ranks > 1), fields


ELSEWHERE = [
    {"parallel.zero_stage": 0},
    {"parallel.zero_stage": 1, "parallel.tensor": 2},
    {"parallel.zero_stage": 1, "parallel.offload_optimizer": "cpu"},
    {"parallel.zero_stage": 3, "parallel.offload_optimizer": "cpu"},
]


def _are_ours(rank: int) -> list[bool]:
    plans = [plan_of(tiny_recipe(**{"batch.micro_batch_size": 2, **fields}), 2) for fields in ELSEWHERE]
    return [engine_of(plan)._norm_with_loss is not None for plan in plans]


def test_the_norm_of_deepspeed_is_kept_elsewhere():
    assert run_ranks(2, _are_ours) == [[False] * len(ELSEWHERE)] * 2


def _first_norm(rank: int, recipe) -> tuple[float, float | None]:
    """The norm of the first step, and the scale of the loss that a checkpoint would contain."""
    engine = engine_of(plan_of(recipe, 1))
    norm = engine.train_step(step_batch(0, 1, 8, 0, 1)).grad_norm.item()
    return norm, engine.progress()["loss_scale"].get("gradscaler", {}).get("scale")


def test_the_norm_does_not_contain_the_loss_scale_which_checkpoints_do():
    """fp16 rounds to 11 bits, which changes a norm by less than a percent."""
    (plain, none), (scaled, scale) = (
        run_ranks(1, _first_norm, tiny_recipe(**{"parallel.precision": precision}))[0]
        for precision in ("fp32", "autocast_fp16")
    )
    assert none is None
    assert scale > 1
    assert scaled == pytest.approx(plain, rel=0.01)
