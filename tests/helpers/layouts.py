"""Plans of one model on up to four ranks, and checkpoints written under them."""

from __future__ import annotations

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.save import Saver
from tests.helpers.batches import GLOBAL_BATCH, tiny_recipe
from tests.helpers.traces import engine_of, plan_of, trace

STOP = 4
LAYOUTS = {
    f"dp{world // (pp * tp)}-pp{pp}-tp{tp}-zero{stage}": (world, {"pipeline": pp, "tensor": tp, "zero_stage": stage})
    for world in (1, 2, 4)
    for pp in (1, 2)
    for tp in (1, 2)
    for stage in range(4)
    if world % (pp * tp) == 0 and (pp == 1 or stage == 1)
}
"""Data parallel 1, 2, 4 × pipeline 1, 2 × tensor 1, 2 × ZeRO 0 to 3, where legal on four ranks."""
BACKENDS = {
    "dp2-ddp": (2, {"backend": "accelerate", "accelerate": "ddp"}),
    "dp2-fsdp2": (2, {"backend": "accelerate", "accelerate": "fsdp2", "zero_stage": 3}),
    "dp2-accelerate-zero2": (2, {"backend": "accelerate", "accelerate": "deepspeed", "zero_stage": 2}),
    "dp4-zero3-hpz2": (4, {"zero_stage": 3, "hierarchical_partition": 2}),
    "dp2-sp2-zero2": (4, {"sequence": 2, "zero_stage": 2}),
    "dp1-zero2-offload": (1, {"zero_stage": 2, "offload_optimizer": "cpu"}),
    "dp2-zero3-offload": (2, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
}
EXPERTS = {f"dp2-ep2-zero{stage}": (2, {"expert": 2, "zero_stage": stage}) for stage in range(4)}


def plan_under(fields: dict, ranks: int, **others):
    shared = ranks // (fields.get("pipeline", 1) * fields.get("tensor", 1) * fields.get("sequence", 1))
    micro = others.pop("micro", GLOBAL_BATCH // (2 * shared))
    named = {f"parallel.{name}": value for name, value in fields.items()}
    return plan_of(tiny_recipe(**{"batch.micro_batch_size": micro}, **named, **others), ranks)


def take_steps(engine, plan, steps: range):
    return trace(
        engine,
        steps,
        plan.batch.micro_batch_size,
        plan.batch.gradient_accumulation_steps,
        engine.data_parallel_rank,
        plan.data_parallel_size,
    )


def save_each(rank: int, sources: dict, others: dict, folder) -> None:
    for name, (ranks, fields) in sources.items():
        plan = plan_under(fields, ranks, **others)
        engine = engine_of(plan)
        take_steps(engine, plan, range(STOP))
        Saver(folder / name, plan, engine).save(TrainerState(step=STOP, samples=STOP * GLOBAL_BATCH, data="key"))
