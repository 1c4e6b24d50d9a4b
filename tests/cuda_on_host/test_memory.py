"""The peak of a rank's allocated memory over three steps, as the device counts it, against what a plan predicts.

Tests of the state alone (`tests/plan/predict/test_memory_of_engines.py`) count live tensors between passes. Here
everything counts that torch allocates: activations, what a kernel returns, buffers of the engine, at the moment of the
peak.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import distributed as dist

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.save import CHUNK, Saver
from llmtrain.engines import build_engine
from llmtrain.engines.runtime.distributed import pretend
from llmtrain.models import build_model
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.predict import flat, memory_of
from llmtrain.plan.predict.memory import MOMENTS, StageMemory
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import step_batch, tiny_recipe, with_pairs

CLOSE = 0.03
"""Relative difference that is allowed between the peak and its prediction."""
LENGTH, VOCAB = 256, 2048
STEPS = 3
MODEL = {
    "model.config.vocab_size": VOCAB,
    "model.config.hidden_size": 128,
    "model.config.intermediate_size": 384,
    "model.config.num_hidden_layers": 4,
    "model.config.max_position_embeddings": LENGTH,
    "model.config.tie_word_embeddings": False,
    "data.sequence_length": LENGTH,
    "batch.micro_batch_size": 2,
}
"""Large enough that weights, activations and logits all count, and positions or norms do not."""
EXPERTS = {
    "model.architecture": "mixtral",
    "model.config.num_local_experts": 4,
    "model.config.intermediate_size": 128,
    "parallel.expert": 2,
}
ACCELERATE = {"parallel.backend": "accelerate"}
FSDP2 = {**ACCELERATE, "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
FULL = {"parallel.activation_checkpointing": "full"}
OFFLOAD = {"parallel.offload_activations": True}
TILES = {"parallel.tiled_mlp": True}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
INTERLEAVED = {"parallel.pipeline_schedule": "interleaved"}
ZERO_BUBBLE = {"parallel.pipeline_schedule": "zero_bubble", "optim.clip_grad_norm": 0.0}
LORA = {"model.adapter": {"rank": 8}}
CHUNKED = {"kernels.loss": "chunked", "batch.micro_batch_size": 8, "batch.global_batch_size": 32}
CAUSAL = {"data.mask_documents": False}


def zero(stage: int, precision: str = "fp32", **fields: Any) -> dict[str, Any]:
    return {"parallel.zero_stage": stage, "parallel.precision": precision, **fields}


def over(**axes: int) -> dict[str, int]:
    return {f"parallel.{name}": degree for name, degree in axes.items()}


LARGE = {"model.config.hidden_size": 512, "model.config.intermediate_size": 1536}
TWO = {
    "ZeRO-0": zero(0),
    "ZeRO-0, autocast": zero(0, "autocast_bf16"),
    "ZeRO-1": zero(1),
    "ZeRO-1, bf16": zero(1, "bf16"),
    "ZeRO-2": zero(2),
    "ZeRO-2, bf16": zero(2, "bf16"),
    "ZeRO-2, fp16": zero(2, "fp16"),
    "ZeRO-3": zero(3),
    "ZeRO-3, bf16": zero(3, "bf16"),
    "ZeRO-1, bf16, recomputed": zero(1, "bf16", **FULL),
    "ZeRO-3, recomputed": zero(3, **FULL),
    "ZeRO-1, bf16, selective": zero(1, "bf16", **SELECTIVE),
    "ZeRO-1, bf16, inputs offloaded": zero(1, "bf16", **FULL, **OFFLOAD),
    "ZeRO-3, inputs offloaded": zero(3, **FULL, **OFFLOAD),
    "ZeRO-2, tiles": zero(2, **TILES),
    "ZeRO-1, bf16, recomputed, tiles": zero(1, "bf16", **FULL, **TILES),
    "ZeRO-3, bf16, recomputed, offloaded, tiles": zero(3, "bf16", **FULL, **OFFLOAD, **TILES),
    "pipeline, inputs offloaded": zero(1, **over(pipeline=2), **FULL, **OFFLOAD),
    "ZeRO-2, bf16, selective, causal": zero(2, "bf16", **SELECTIVE, **CAUSAL),
    "ZeRO-0, autocast, recomputed": zero(0, "autocast_bf16", **FULL),
    "ZeRO-3, selective": zero(3, **SELECTIVE),
    "FSDP2, bf16, selective": {**FSDP2, "parallel.precision": "bf16", **SELECTIVE},
    "ZeRO-0, autocast, selective": zero(0, "autocast_bf16", **SELECTIVE),
    "ZeRO-1, bf16, every second layer": zero(1, "bf16", **FULL, **{"parallel.checkpoint_every": 2}),
    "ZeRO-2, bf16, causal": zero(2, "bf16", **CAUSAL),
    "ZeRO-1, bf16, offload": zero(1, "bf16", **{"parallel.offload_optimizer": "cpu"}),
    "ZeRO-2, offload": zero(2, **{"parallel.offload_optimizer": "cpu"}),
    "ZeRO-3, bf16, offload all": zero(
        3, "bf16", **{"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"}
    ),
    "ZeRO-2, bf16, 8-bit AdamW": zero(2, "bf16", **{"optim.name": "adamw_8bit"}),
    "ZeRO-3, 8-bit AdamW": zero(3, **{"optim.name": "adamw_8bit"}),
    "ZeRO-2, one micro-batch": zero(2, **{"batch.micro_batch_size": 4}),
    "DDP": ACCELERATE,
    "DDP, autocast": {**ACCELERATE, "parallel.precision": "autocast_bf16"},
    "FSDP2": FSDP2,
    "FSDP2, bf16": {**FSDP2, "parallel.precision": "bf16"},
    "pipeline": zero(1, **over(pipeline=2)),
    "pipeline, selective": zero(1, **over(pipeline=2), **SELECTIVE),
    "tensor, selective": zero(1, **over(tensor=2), **SELECTIVE),
    "pipeline, bf16": zero(1, "bf16", **over(pipeline=2)),
    "pipeline, bf16, recomputed": zero(1, "bf16", **over(pipeline=2), **FULL),
    "pipeline, bf16, large vocabulary": zero(1, "bf16", **over(pipeline=2), **{"model.config.vocab_size": 8 * VOCAB}),
    "pipeline, bf16, interleaved": zero(1, "bf16", **over(pipeline=2, pipeline_chunks=2), **INTERLEAVED),
    "pipeline, bf16, zero bubble": zero(1, "bf16", **over(pipeline=2, pipeline_chunks=2), **ZERO_BUBBLE),
    "tensor": zero(1, **over(tensor=2)),
    "tensor, bf16": zero(1, "bf16", **over(tensor=2)),
    "sequence": zero(1, **over(sequence=2)),
    "sequence, bf16": zero(2, "bf16", **over(sequence=2)),
    "sequence, causal": zero(1, **over(sequence=2), **CAUSAL),
    "sequence, selective": zero(1, **over(sequence=2), **SELECTIVE),
    "experts": zero(1, **EXPERTS),
    "LoRA": zero(2, "bf16", **LORA),
    "LoRA, selective": zero(2, "bf16", **LORA, **SELECTIVE),
    "LoRA, ZeRO-3": zero(3, "bf16", **LORA),
    "LoRA in 4 bit": zero(2, "bf16", **LORA, **{"model.quantize": "nf4"}),
    "loss in chunks": zero(2, "bf16", **CHUNKED),
    "loss in chunks, ZeRO-3": zero(3, **CHUNKED),
    "DPO": zero(2, "bf16", **{"objective.name": "dpo"}),
}
FOUR = {
    "pipeline and tensor": zero(1, **over(pipeline=2, tensor=2)),
    "pipeline and sequence": zero(1, **over(pipeline=2, sequence=2)),
    "tensor and ZeRO-3": zero(3, "bf16", **over(tensor=2)),
    "experts and tensor": zero(1, **EXPERTS, **over(tensor=2)),
}
ONE = {
    "one rank, ZeRO-1, bf16": zero(1, "bf16"),
    "one rank, ZeRO-2, bf16": zero(2, "bf16", **{"batch.micro_batch_size": 4, "batch.global_batch_size": 4}),
    "one rank, ZeRO-2, bf16, offload": zero(2, "bf16", **{"parallel.offload_optimizer": "cpu"}),
    "one rank, ZeRO-3, bf16": zero(3, "bf16"),
}
RANKS = {1: ONE, 2: TWO, 4: FOUR}
FEW = ("ZeRO-2, bf16", "pipeline")
"""Those that are always tested."""
TOO_LARGE: dict[str, str] = {}
"""Plans that need less than predicted, and why."""


def plan_of(name: str, folder: str) -> Plan:
    fields = MODEL | (ONE | TWO | FOUR)[name]
    if "model.quantize" in fields:  # the weights of a stored model
        fields = {key: value for key, value in fields.items() if not key.startswith("model.config")}
        fields |= {"model.architecture": None, "model.config": {}, "model.pretrained": folder}
    ranks = next(ranks for ranks, plans in RANKS.items() if name in plans)
    return resolve(tiny_recipe(**fields), Cluster(devices_per_node=ranks, device="gpu"))


def batch_of(plan: Plan, step: int, replica: int) -> Any:
    shape = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps
    replicas, samples = plan.data_parallel_size, plan.batch.global_batch_size
    made = step_batch(step, *shape, replica, replicas, samples, length=LENGTH, vocab=VOCAB)
    if not plan.recipe.data.has_document_mask:
        whole = torch.arange(LENGTH).expand(plan.batch.micro_batch_size, LENGTH)
        made = replace(made, micro_batches=[replace(one, position_ids=whole) for one in made.micro_batches])
    return with_pairs(made) if plan.recipe.objective.is_preference else made


def peak(rank: int, plan: Plan, most: int | None) -> int:
    """Bytes. most: of the device; by default no run comes near."""
    import _cuda_on_host as device

    if most:
        device.set_memory(rank, most)
    return peak_of_steps(plan, torch.device("cuda", rank))


def peak_of_steps(plan: Plan, device: torch.device) -> int:
    engine = build_engine(plan, render(plan), device)
    for step in range(STEPS):
        engine.train_step(batch_of(plan, step, engine.data_parallel_rank))
    return torch.cuda.max_memory_allocated()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A model to fine-tune, which is stored."""
    folder = tmp_path_factory.mktemp("base")
    build_model(tiny_recipe(**MODEL), torch.float32, torch.device("cpu")).save_pretrained(folder)
    return str(folder)


def compare(gpus, plan: Plan) -> None:
    ranks = plan.cluster.world_size
    peaks = gpus(ranks, peak, plan, None)
    memory, stages = memory_of(plan), plan.parallel.pipeline
    assert memory
    for number, stage in enumerate(memory.stages):
        assert_close(max(peaks[number * ranks // stages : (number + 1) * ranks // stages]), stage, CLOSE)


def assert_close(found: int, stage: StageMemory, tolerance: float) -> None:
    parts = max((getattr(stage, name) for name in MOMENTS), key=lambda one: one.total - one.framework)
    expected = parts.total - parts.framework
    shown = {name: size for name, size in parts.by_part().items() if size}
    assert found == pytest.approx(expected, rel=tolerance), f"{expected / found:.4f} of {found:,}: {shown}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_some_peaks_are_predicted(gpus, base, name):
    compare(gpus, plan_of(name, base))


@pytest.mark.breadth
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=TOO_LARGE[name])) if name in TOO_LARGE else name
        for name in (*ONE, *TWO, *FOUR)
        if name not in FEW
    ],
)
def test_peaks_are_predicted(gpus, base, name):
    compare(gpus, plan_of(name, base))


def _peak_of_several_buckets(rank: int, plan: Plan) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "MIN_BUCKET", 1)
        return peak(rank, plan, None)


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2", "ZeRO-2, bf16", "ZeRO-2, offload"])
def test_peaks_with_a_second_bucket_are_predicted(gpus, monkeypatch, name):
    """One is reduced while the other one is filled, and the first one when little of the model is done."""
    monkeypatch.setattr(flat, "MIN_BUCKET", 1)
    fields = MODEL | LARGE | {"model.config.num_hidden_layers": 16} | TWO[name]
    plan = resolve(tiny_recipe(**fields), Cluster(devices_per_node=2, device="gpu"))
    assert flat.overlaps_reduction(plan)
    memory = memory_of(plan)
    assert memory
    assert_close(max(gpus(2, _peak_of_several_buckets, plan, timeout=400)), memory.stages[0], CLOSE)


# ---- pinned memory


def pinned(rank: int, plan: Plan, folder: str) -> tuple[int, int]:
    """Bytes of pinned memory for offloaded states, and for a save. Torch rounds none of the large blocks up."""
    import _cuda_on_host as device

    torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")
    engine = build_engine(plan, render(plan), torch.device("cuda", rank))
    for step in range(STEPS):
        engine.train_step(batch_of(plan, step, engine.data_parallel_rank))
    offloaded = device.pinned_bytes()
    torch._C._accelerator_setAllocatorSettings("")
    Saver(Path(folder), plan, engine, "run").save(TrainerState(step=STEPS, data="data"))
    return offloaded, device.pinned_bytes() - offloaded


@pytest.mark.breadth
@pytest.mark.parametrize(
    "name", ["ZeRO-1, bf16", "ZeRO-1, bf16, offload", "ZeRO-2, offload", "ZeRO-3, bf16, offload all"]
)
def test_pinned_memory_does_not_exceed_the_prediction(gpus, tmp_path, name):
    plan = resolve(tiny_recipe(**MODEL | LARGE | TWO[name]), Cluster(devices_per_node=2, device="gpu"))
    memory = memory_of(plan)
    assert memory
    for offloaded, saved in gpus(2, pinned, plan, str(tmp_path)):
        assert offloaded <= memory.stages[0].host
        assert saved <= memory.stages[0].host_copies + CHUNK


# ---- one rank of many

NODES, DEVICE = 32, 5
BETWEEN, FIRST_STAGE = 237, 5
"""Of 256 ranks, those whose memory is counted, on a device that is not the first: one whose partition has parts of the
two largest neighbours among the weights, and one of a pipeline's first stage, which nobody sends shapes to."""
WIDE = {
    **LARGE,
    "batch.micro_batch_size": 1,
    "batch.global_batch_size": 512,
}
"""Large enough that a difference of 1% is more than norms and positions."""
OF_256 = {
    "ZeRO-0": zero(0),
    "ZeRO-1": zero(1),
    "ZeRO-1, bf16": zero(1, "bf16"),
    "ZeRO-2": zero(2),
    "ZeRO-2, bf16": zero(2, "bf16"),
    "sequence": zero(1, **over(sequence=4)),
    "sequence, bf16": zero(2, "bf16", **over(sequence=4)),
    "pipeline and tensor": zero(1, **over(pipeline=4, tensor=2)),
    "pipeline and tensor, bf16": zero(1, "bf16", **over(pipeline=4, tensor=2)),
}


def peak_alone(rank: int, plan: Plan) -> int:
    """The peak on one device of a node whose others do nothing, in a group whose collectives return at once."""
    dist.barrier()
    if rank != DEVICE:
        return 0
    dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    pretend(FIRST_STAGE if plan.parallel.pipeline > 1 else BETWEEN, plan.cluster.world_size)
    os.environ["LOCAL_RANK"] = str(DEVICE)
    dist.Work.is_completed = lambda work: True  # those of the fake group never say so, and what is sent would be kept
    return peak_of_steps(plan, torch.device("cuda", DEVICE))


@pytest.mark.breadth
@pytest.mark.parametrize("name", OF_256)
def test_one_rank_of_256_uses_the_predicted_memory(gpus, name):
    """The server of the ranks asserts that it touches no device but its own."""
    plan = resolve(tiny_recipe(**MODEL | WIDE | OF_256[name]), Cluster(nodes=NODES, devices_per_node=8, device="h100"))
    found = gpus(DEVICE + 1, peak_alone, plan, timeout=600)[DEVICE]
    memory = memory_of(plan)
    assert memory
    assert_close(found, memory.stages[0], tolerance=0.01)
