"""Records what a plan of each engine computes, bit for bit, and compares it after a change of the engines.

    python tests/engines/golden.py record FILE     before the change
    python tests/engines/golden.py check FILE      after it, on the same machine with the same libraries

Of each plan: losses, norms, rates, the evaluation, whole weights, and the checkpoint shards of each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from llmtrain.engines.state.shards import CheckpointShard
from llmtrain.recipe import Recipe
from tests.helpers.batches import MIXTRAL, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import moe_recipe
from tests.helpers.traces import engine_of, plan_of, trace

STEPS = 4
FOLDED = "qwen3_moe"
"""A family whose experts may be spread over tensor parallel ranks."""


def plans() -> dict[str, tuple[int, Recipe]]:
    """By name, the number of ranks and the recipe."""

    def degrees(zero: int = 1, micro: int = 1, **fields: Any) -> dict[str, Any]:
        parallel = {f"parallel.{name}": value for name, value in fields.items()}
        return {"parallel.zero_stage": zero, "batch.micro_batch_size": micro, **parallel}

    sgd, unclipped = {"optim.name": "sgd", "optim.lr": 0.1}, {"optim.clip_grad_norm": 0.0}
    accelerate = {"parallel.backend": "accelerate"}
    own = {
        "zero0": (2, degrees(0)),
        "zero1": (2, degrees(1) | sgd),
        "zero2": (2, degrees(2, precision="bf16")),
        "zero3": (2, degrees(3, activation_checkpointing="full")),
        "zero1 bf16": (2, degrees(1, precision="bf16")),
        "zero0 autocast_bf16": (2, degrees(0, precision="autocast_bf16")),
        "zero2 offload": (2, degrees(2, offload_optimizer="cpu")),
        "tensor zero0": (4, degrees(0, tensor=2)),
        "tensor zero3": (4, degrees(3, tensor=2)),
        "sequence zero1": (4, degrees(1, sequence=2)),
        "tensor sequence zero2": (4, degrees(2, tensor=2, sequence=2)),
        "pipeline zero0": (2, degrees(0, pipeline=2) | unclipped),
        "pipeline zero1": (4, degrees(1, pipeline=2) | sgd),
        "pipeline autocast_bf16": (2, degrees(1, pipeline=2, precision="autocast_bf16")),
        "pipeline tensor": (4, degrees(1, pipeline=2, tensor=2)),
        "pipeline sequence": (4, degrees(1, pipeline=2, sequence=2) | MIXTRAL),
        "ddp": (2, degrees(0, accelerate="ddp") | accelerate),
        "fsdp2": (2, degrees(3, accelerate="fsdp2") | accelerate),
        "accelerate deepspeed": (2, degrees(1, accelerate="deepspeed") | accelerate),
        "data_parallel": (1, degrees(0, backend="data_parallel")),
    }
    experts = {
        "expert zero0": (2, "mixtral", degrees(0)),
        "expert zero2 bf16": (4, "mixtral", degrees(2, precision="bf16")),
        "expert sequence": (4, FOLDED, degrees(1, sequence=2)),
        "expert tensor": (4, FOLDED, degrees(1, tensor=2)),
        "expert tensor bf16": (4, FOLDED, degrees(1, tensor=2, precision="bf16")),
        "expert tensor sequence": (4, FOLDED, degrees(2, tensor=2, sequence=2)),
    }
    found = {name: (ranks, tiny_recipe(**fields)) for name, (ranks, fields) in own.items()}
    return found | {name: (ranks, moe_recipe(family, **fields)) for name, (ranks, family, fields) in experts.items()}


def run(rank: int, recipe: Recipe, ranks: int) -> dict[str, Any]:
    """What one rank computes."""
    plan = plan_of(recipe, ranks)
    engine = engine_of(plan)
    batch, replicas = plan.batch, plan.data_parallel_size
    found = trace(
        engine,
        range(STEPS),
        batch.micro_batch_size,
        batch.gradient_accumulation_steps,
        engine.data_parallel_rank,
        replicas,
    )
    weights, shards = hashlib.sha256(), hashlib.sha256()
    for name, value in found.weights.items():
        weights.update(f"{name} {value.shape} {value.dtype}".encode() + value.tobytes())
    for list_of_shards in engine.checkpoint_shards():
        for shard in list_of_shards:
            shards.update(described(shard).encode())
            for kind, tensor in shard.tensors.items():
                shards.update(f"{kind} {tensor.dtype}".encode() + tensor.detach().cpu().float().numpy().tobytes())
    return {
        "losses": [loss.hex() for loss in found.losses],
        "grad_norms": [norm.hex() for norm in found.grad_norms],
        "rates": found.rates,
        "evaluation": found.evaluation.hex(),
        "weights": weights.hexdigest(),
        "pieces": shards.hexdigest(),
    }


def described(shard: CheckpointShard) -> str:
    """What is hashed of a shard besides its tensors, in a form that does not depend on the names of classes."""
    whole, replica = shard.weight_slice, (shard.replica.index, shard.replica.count)
    boxes = "".join(f"Box(first={chunk.offsets!r}, size={chunk.sizes!r}), " for chunk in whole.chunks)
    boxes = boxes.rstrip() if len(whole.chunks) == 1 else boxes.removesuffix(", ")
    region = f"Region(shape={whole.shape!r}, boxes=({boxes}), dim={whole.dim!r})"
    steps = None if shard.steps is None else shard.steps.item()
    return f"({shard.name!r}, {region}, {shard.start!r}, {steps!r}, {replica!r})"


def main(action: str, file: Path) -> int:
    """The exit code."""
    before = json.loads(file.read_text()) if action == "check" else {}
    now = {}
    for name, (ranks, recipe) in plans().items():
        now[name] = run_ranks(ranks, run, recipe, ranks)
        same = "" if action == "record" else "same" if now[name] == before.get(name) else "DIFFERENT"
        print(f"{name:24} {float.fromhex(now[name][0]['losses'][-1]):.9f} {same}", flush=True)
        for one, other in zip(now[name], before.get(name, ()), strict=False):
            if different := [key for key in one if one[key] != other[key]]:
                print("    ", ", ".join(different))
    if action == "record":
        file.write_text(json.dumps(now, indent=1))
        return 0
    return 0 if now == before else 1


if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if len(sys.argv) != 3 or sys.argv[1] not in ("record", "check"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
