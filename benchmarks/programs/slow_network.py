"""One rank of `benchmarks/slow_network.py`: trains every plan for a few steps, and prints the seconds of its steps.

Layers sleep between attention and feed-forward, so that a step's computation is known, and four ranks need no four
cores. What a rank sends is the engine's own, in buckets as small as the model.

python -m benchmarks.programs.slow_network  (with the environment of torchrun)
"""

from __future__ import annotations

import json
import os
import statistics
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.plan import Plan
from llmtrain.plan.predict import flat
from llmtrain.plan.rules import resolve
from llmtrain.recipe import BatchConfig, DataConfig, ModelConfig, OptimConfig, Recipe, Source, TrainConfig
from llmtrain.recipe.cluster import Cluster

LAYERS, TOKENS, VOCAB = 4, 64, 256
FORWARD_S, BACKWARD_S = 0.1, 0.2
"""Seconds that a layer sleeps in each pass."""
BUCKET_MIB = 1
"""Of what is gathered or reduced at once: a tenth of the model. A bucket of a real run would contain all of it."""
MICRO_BATCHES = 2
STEPS, WARM_UP = 3, 2
NODES, PER_NODE = 2, 2
ZERO_3 = {"parallel.zero_stage": 3}
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"parallel.zero_stage": 1},
    "ZeRO-2": {"parallel.zero_stage": 2},
    "ZeRO-3": ZERO_3,
    "ZeRO-3, hpZ": {**ZERO_3, "parallel.hierarchical_partition": PER_NODE},
    "FSDP2": {**ZERO_3, "parallel.backend": "accelerate", "parallel.accelerate": "fsdp2"},
    "DDP": {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"},
    "pipeline": {"parallel.pipeline": NODES, "parallel.zero_stage": 1},
}
CABLE = Path("/sys/class/net/cable/statistics/tx_bytes")


def small_buckets() -> AbstractContextManager[object]:
    """Makes plans, their configurations and their predictions use buckets of `BUCKET_MIB`."""
    elements = BUCKET_MIB * 2**20 // 4
    return mock.patch.multiple(flat, MIN_BUCKET=elements, BUCKET_PER_REPLICA=0, DDP_BUCKET_MIB=BUCKET_MIB)


def plan_of(name: str) -> Plan:
    """Returns a plan on two nodes with two ranks each."""
    fields = PLANS[name]
    replicas = NODES * PER_NODE // fields.get("parallel.pipeline", 1)
    config = {
        **{"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "max_position_embeddings": TOKENS, "tie_word_embeddings": False},
    }
    recipe = Recipe(
        name="slow_network",
        model=ModelConfig(architecture="llama", config=config),
        data=DataConfig(sources=[Source("none")], tokenizer="none", sequence_length=TOKENS),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=replicas * MICRO_BATCHES, micro_batch_size=1),
        train=TrainConfig(max_steps=WARM_UP + STEPS),
    )
    return resolve(recipe.with_(**fields), Cluster(nodes=NODES, devices_per_node=PER_NODE))


class _Sleep(torch.autograd.Function):
    """The identity, which sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(BACKWARD_S)
        return gradients[0]


def _sleep(feed_forward: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_Sleep.apply(inputs[0]), *inputs[1:])


def _batch(plan: Plan, step: int, replica: int) -> StepBatch:
    draw = torch.Generator().manual_seed(1000 * step + replica)
    micro_batches = [
        MicroBatch(
            input_ids=torch.randint(VOCAB, (1, TOKENS), generator=draw),
            position_ids=torch.arange(TOKENS)[None],
            labels=torch.randint(VOCAB, (1, TOKENS), generator=draw),
        )
        for _ in range(MICRO_BATCHES)
    ]
    samples = plan.batch.global_batch_size
    return StepBatch(micro_batches, target_tokens=samples * TOKENS, samples=samples, first_sample=step * samples)


def measure(plan: Plan, steps: int) -> dict[str, float]:
    """Returns the median seconds of a step, and the bytes that this host sends over the cable in one."""
    from llmtrain.engines import build_engine
    from llmtrain.models.stages import decoder_layers
    from llmtrain.plan.ds_config import render

    engine: Any = build_engine(plan, render(plan), torch.device("cpu"))  # every one of these has a model
    models = [stage.model for stage in engine.model] if plan.parallel.pipeline > 1 else [engine.model]
    for layer in (layer for model in models for layer in decoder_layers(model)[1]):
        if next(layer.parameters(), None) is not None:  # a stage has only layers of its own
            layer.get_submodule("mlp").register_forward_pre_hook(_sleep)
    seconds = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            before = int(CABLE.read_text())
        dist.barrier()
        started = time.perf_counter()
        engine.train_step(_batch(plan, step, engine.data_parallel_rank)).loss.item()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    sent = (int(CABLE.read_text()) - before) / steps
    engine.close()
    return {"step_s": statistics.median(seconds[WARM_UP:]), "cable_bytes": sent}


def main() -> None:
    """Trains the plans of the environment's SLOW_NETWORK for its number of steps; rank 0 prints the result."""
    torch.set_num_threads(1)
    import deepspeed

    from llmtrain.overrides.deepspeed import use_no_compiled_collective

    use_no_compiled_collective()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    names, steps = json.loads(os.environ["SLOW_NETWORK"])
    with small_buckets():
        found = {name: measure(plan_of(name), steps) for name in names}
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
