"""Writes docs/guides/time.md: the assumptions of the step time prediction, and its deviation from published runs.

python tools/render_time.py
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict.assumptions import DEFAULT_EFFICIENCY, EAGER, EFFICIENCY, FUSED, Assumptions
from llmtrain.plan.predict.time import StepTime, predict
from llmtrain.plan.predict.traffic import CommunicationGroups, Traffic
from llmtrain.plan.predict.work import StageParameters
from llmtrain.plan.rules import assemble
from llmtrain.recipe import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
)
from llmtrain.recipe.cluster import DEVICES, Cluster, Device
from llmtrain.recipe.parts import field_texts

MEASURED = Path(__file__).parents[1] / "benchmarks/results/bubble.json"
GPU = Path(__file__).parents[1] / "benchmarks/results/gpu.json"

FOUNDRY = "[llm-foundry](https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md)"
TITAN = "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
MEGATRON = "[Megatron-LM](https://arxiv.org/abs/2104.04473), table 1"
LLAMA3 = "[Llama 3](https://arxiv.org/abs/2407.21783), table 4"
MEGASCALE = "[MegaScale](https://arxiv.org/abs/2402.15627), table 2"

GIGA = 1e9
SLOW_H100 = Device(
    name="h100-hbm2e",
    memory_bytes=96 * 2**30,
    peak_flops={"bf16": 989e12},
    memory_bandwidth=2400 * GIGA,
    node_bandwidth=450 * GIGA,
    network_bandwidth=50 * GIGA,
)
"""The device of torchtitan's runs: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W."""


def asynchronous_replicas(groups: CommunicationGroups, held: StageParameters) -> Traffic:
    """Returns the traffic if replicas gather weights and reduce gradients during the computation of a whole step.

    Llama 3 does so (section 3.3.2), and MegaScale (section 3.2); stages of llmtrain wait at the end of a step.
    """
    traffic, micro_batches = groups.traffic(held), groups.plan.batch.gradient_accumulation_steps
    spread = [replace(one, times=one.times / micro_batches) for one in traffic.step]
    return traffic._replace(step=[], overlapped=[*traffic.overlapped, *spread])


def asynchronous(groups: CommunicationGroups, held: StageParameters) -> Traffic:
    """Returns the same if tensor parallel ranks also communicate during their products (MegaScale, section 3.2)."""
    traffic = asynchronous_replicas(groups, held)
    return traffic._replace(exposed=[], overlapped=[*traffic.overlapped, *traffic.exposed])


@dataclass(frozen=True)
class Run:
    """A published run: its setup and its speed."""

    source: str
    name: str
    model: ModelConfig
    devices: int
    device: str
    micro_batch: int
    accumulation: int
    sequence_length: int
    published: float
    """Tokens per second and device."""
    parallel: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    assumed: Assumptions = FUSED
    chunks: int = 1
    """Stages of a rank; more than 1 are interleaved."""
    traffic_of: Callable[[CommunicationGroups, StageParameters], Traffic] = CommunicationGroups.traffic
    """What its ranks send."""

    def plan(self) -> Plan:
        """Returns the run as a plan.

        Rules are not checked, since other stacks support layouts that DeepSpeed does not.
        """
        own = (SLOW_H100,) if self.device == SLOW_H100.name else ()
        nodes = max(self.devices // 8, 1)
        cluster = Cluster(nodes=nodes, devices_per_node=self.devices // nodes, device=self.device, own_devices=own)
        parallel = ParallelConfig(
            precision="bf16",
            pipeline_schedule="interleaved" if self.chunks > 1 else "1f1b",
            pipeline_chunks=self.chunks,
            **{"activation_checkpointing": "full" if self.checkpointing else "none"} | self.parallel,
        )
        replicas = self.devices // (parallel.pipeline * parallel.tensor * parallel.sequence)
        recipe = Recipe(
            name="published",
            model=self.model,
            data=DataConfig(
                sources=[Source("none")],
                tokenizer="none",
                sequence_length=self.sequence_length,
                mask_documents=False,
            ),
            optim=OptimConfig(lr=1e-4),
            batch=BatchConfig(
                global_batch_size=self.micro_batch * self.accumulation * replicas, micro_batch_size=self.micro_batch
            ),
            parallel=parallel,
            train=TrainConfig(max_steps=1),
        )
        return assemble(Draft(recipe, cluster, model_facts(recipe.model, recipe.vocab_size)))

    def predicted(self) -> StepTime:
        """Returns the predicted step time."""
        time = predict(self.plan(), self.assumed, self.traffic_of)
        assert time is not None, "all devices here are known"
        return time


def gpt(width: int, layers: int, heads: int, length: int, vocabulary: int = 50368) -> ModelConfig:
    """Returns a decoder like GPT-2; MPT's has no biases, but its count differs by only one part in a thousand."""
    sizes = {"vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length}
    return ModelConfig(architecture="gpt2", config=sizes, attention="flash_attention_2")


def llama(width: int, inner: int, layers: int, heads: int) -> ModelConfig:
    """Returns a model of the Llama 3 series: 8 key and value heads, 128,256 tokens."""
    sizes = {"vocab_size": 128256, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8}
    config = sizes | {"tie_word_embeddings": False}
    return ModelConfig(architecture="llama", config=config, attention="flash_attention_2")


MPT = {"1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56)}
MPT |= {"70b": (8192, 80, 64)}
SHARDED = {"backend": "accelerate", "accelerate": "fsdp2", "zero_stage": 3}
SELECTIVE = {"activation_checkpointing": "selective"}


def foundry(
    size: str,
    devices: int,
    device: str,
    micro: int,
    accumulation: int,
    length: int,
    published: float,
    checkpointing: bool,
) -> Run:
    """Returns a row of llm-foundry's tables: FSDP, full shard."""
    name = f"MPT {size}, T = {length}"
    model = gpt(*MPT[size], length)
    return Run(FOUNDRY, name, model, devices, device, micro, accumulation, length, published, SHARDED, checkpointing)


def megatron(
    billions: float, width: int, layers: int, heads: int, pipeline: int, devices: int, batch: int, tflops: float
) -> Run:
    """Returns a row of Megatron-LM's table, with 8 tensor parallel ranks.

    Its FLOPs count recomputation: 96·s·l·h²·(1 + s/6h + V/16lh) per sequence.
    """
    length, vocabulary = 2048, 51200
    flops = 96 * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))
    model = gpt(width, layers, heads, length, vocabulary)
    published = tflops * 1e12 / flops
    replicas = devices // 8 // pipeline
    parallel = {"zero_stage": 1, "tensor": 8, "pipeline": pipeline}
    return Run(
        MEGATRON,
        f"GPT {billions}B",
        model,
        devices,
        "a100",
        1,
        batch // replicas,
        length,
        published,
        parallel,
        checkpointing=True,
        chunks=2 if pipeline > 1 else 1,
    )


def llama3(devices: int, batch: int, tflops: float) -> Run:
    """Returns a row of Llama 3's table; FLOPs are taken as 6·N + 6·L·d·T per token."""
    length = 8192
    flops = 6 * 405.85e9 + 6 * 126 * 16384 * length
    parallel = {"zero_stage": 1, "tensor": 8, "pipeline": 16}
    model = llama(16384, 53248, 126, 128)
    return Run(
        LLAMA3,
        "Llama 3 405B",
        model,
        devices,
        "h100",
        1,
        batch,
        length,
        tflops * 1e12 / flops,
        parallel,
        chunks=7,
        traffic_of=asynchronous_replicas,
    )


def titan(devices: int, published: float, assumed: Assumptions) -> Run:
    """Returns a run of Llama 3.1 8B under FSDP, with selective checkpointing."""
    name = "Llama 3.1 8B" + (", eager" if assumed is EAGER else ", compiled")
    model = llama(4096, 14336, 32, 32)
    return Run(TITAN, name, model, devices, SLOW_H100.name, 2, 1, 8192, published, SHARDED | SELECTIVE, assumed=assumed)


RUNS = (
    foundry("1b", 8, "h100", 14, 1, 2048, 45455, False),
    foundry("3b", 64, "h100", 6, 3, 2048, 22525, False),
    foundry("7b", 8, "h100", 6, 1, 2048, 10643, False),
    foundry("7b", 8, "h100", 8, 2, 8192, 6935, True),
    foundry("7b", 8, "h100", 2, 2, 32768, 3318, True),
    foundry("13b", 8, "h100", 2, 1, 2048, 4792, False),
    foundry("30b", 32, "h100", 14, 3, 2048, 2308, True),
    foundry("70b", 32, "h100", 2, 16, 2048, 882, True),
    foundry("70b", 64, "h100", 8, 4, 2048, 1039, True),
    foundry("1b", 8, "a100", 14, 4, 2048, 20513, False),
    foundry("7b", 8, "a100", 6, 2, 2048, 4641, False),
    foundry("13b", 8, "a100", 2, 3, 2048, 2262, False),
    foundry("30b", 8, "a100", 3, 21, 2048, 916, True),
    foundry("70b", 64, "a100", 8, 4, 2048, 410, True),
    titan(8, 5762, EAGER),
    titan(8, 6667, FUSED),
    titan(128, 5605, EAGER),
    titan(128, 6514, FUSED),
    megatron(18.4, 6144, 40, 48, 1, 256, 1024, 135),
    megatron(39.1, 8192, 48, 64, 2, 512, 1536, 138),
    megatron(145.6, 12288, 80, 96, 8, 1536, 2304, 148),
    Run(
        MEGASCALE,
        "GPT 175B",
        gpt(12288, 96, 96, 2048, 64000),
        12288,
        "a100",
        1,
        32,
        2048,
        1_984_000 / 12288,
        {"zero_stage": 1, "tensor": 8, "pipeline": 8},
        chunks=6,
        traffic_of=asynchronous,
    ),
    llama3(8192, 32, 430),
    llama3(16384, 16, 400),
)

HEAD = """# Predicted step time

Generated by `python tools/render_time.py`; do not edit.

`llmtrain plan` computes the time of a step from a model of the hardware, so that plans can be ranked before they run.
It counts:

- **Matrix products**: in the forward pass, 2 FLOPs per token for each parameter that the token uses; in the backward
  pass, twice as many. The device reaches a share of its datasheet's peak. Attention scores are counted separately, and
  halved if the kernel is causal and no document mask prevents this. With full activation checkpointing, the forward
  pass counts twice; with selective checkpointing, only its memory traffic does.
- **Memory traffic** of all other kernels, of the weights and the gradient accumulation, of the logits, and of the
  update.
- **Communication** by kind and link: what DeepSpeed 0.19.8 sends with the configuration that llmtrain writes.
  Tensor parallel ranks are numbered innermost, then sequence, then data, and pipeline outermost. This determines
  which groups are within a node. A ring sends (n − 1) / n of the bytes. Across nodes, each device has its
  own network adapter.
- **Overlap**: a step does not wait for communication that is hidden behind computation. A share of the computation
  (`overlap` below) can hide it:
    - ZeRO-3 and FSDP2 gather weights during the pass that uses them.
    - Both of these, DistributedDataParallel, Horovod, ZeRO-1 (except in bf16) and ZeRO-2 reduce gradients during the
      backward pass.
    - Two messages are never hidden: the embedding, and one bucket (or FSDP2's layer). They are needed first, and their
      gradients come last.
    - ZeRO-0, and tensor, sequence and expert groups hide nothing.
    - Interleaved stages hide their messages while the pipeline is full. Other schedules wait for the messages on the
      longest path through a step.
- **The bubble** of the pipeline's [schedule](pipelines.md), at the pace of its slowest stage: for 1F1B,
  (p − 1) / (m + p − 1). Below, it is compared with the engine.

There is no prediction for `nn.DataParallel`, or for devices about which too little is known, such as CPUs: `time` is
null.

`llmtrain doctor --self-test` measures the rates of a machine in a minute ([guide](doctor.md#test-the-devices)).
Plans for that machine then use them in place of the shares of datasheets that are listed below. If its host name
changes, `LLMTRAIN_SELF_TEST=FILE` names the report. To plan for such machines from elsewhere, read the report in the
recipe file:

```python
def cluster() -> Cluster:
    return Cluster(nodes=4, devices_per_node=8, device="h100", measured=measured_on("report.json"))
```

Otherwise the figures of devices and links come from datasheets (`llmtrain/recipe/cluster.py`). If your links differ, or
your device is not in the catalogue, describe the cluster in the recipe file:

```python
def cluster() -> Cluster:
    mine = Device(
        name="h100-pcie",
        memory_bytes=int(79.1 * 2**30),  # `total_memory` of torch.cuda.get_device_properties(0)
        peak_flops={"bf16": 756e12},
        memory_bandwidth=2.0e12,
        node_bandwidth=64e9,
        network_bandwidth=25e9,
        host_bandwidth=64e9,
    )
    return Cluster(nodes=4, devices_per_node=8, device="h100-pcie", own_devices=[mine])
```

## Assumptions

The shares below are from published measurements.

{measured}

| Device | Matrix products reach | Attention reaches |
|---|---|---|
"""

ASSUMED = """
A prediction uses the kernels that the recipe selects. Layers or the loss count as fused if `kernels.blocks` or
`kernels.loss` compiles them or takes them from Liger. Most published runs use fused kernels.

| Assumption | Eager | Fused | |
|---|---|---|---|
"""

RATES = """

The rates that the self-test measured on that GPU are those of single kernels. They are higher than the assumed ones,
which stand for whole steps:

| | Datasheet | Assumed | Measured |
|---|---|---|---|"""

PUBLISHED = """
## Published runs

Each run is predicted as the most similar llmtrain plan. MegaScale and Llama 3 report that they overlap some
communication for which llmtrain waits: the weights and gradients of replicas, and in MegaScale also the sums of tensor
parallel ranks. For these runs, this communication is predicted as hidden. A positive error means that the prediction
is too fast.

| Run | Devices | Layout | Published, tokens/s a device | Predicted | Error | Source |
|---|---|---|---|---|---|---|
"""

BUBBLE = """
## The bubble

The bubble was measured with the engine on CPUs. Instead of computing, the ranks sleep {forward_s:g} s for each forward
pass and {backward_s:g} s for each backward pass of a micro-batch (`python benchmarks/bubble.py`, {hardware}, DeepSpeed
{versions[deepspeed]}):

| Schedule | Ranks | Stages each | Micro-batches | Predicted step | Measured | Error | Predicted bubble | Measured |
|---|---|---|---|---|---|---|---|---|
"""

TAIL = """
For the {number} runs without a pipeline, the mean absolute error is {mean:.0%}, the median {median:.0%} and the largest
{largest:.0%}. The predictions of the {others} pipelines, whose stages are interleaved and tensor parallel, are up to
{other:.0%} off.

MegaScale reports 6 stages per rank. Llama 3 has 8 stages per rank with one layer each, but the first and the last stage
have no layer. In llmtrain every stage needs a layer, so 7 are predicted. For Megatron-LM, 2 are assumed.

Limits of this comparison:

- The shares of the peak are round values that were chosen by looking at these runs. A first attempt with one share for
  all devices was within 9% of llm-foundry's A100 runs and 12 to 63% too fast for its H100 runs. The table therefore
  shows how well one set of assumptions fits models of 1 to 405 billion parameters on 8 to 16,384 devices. It is not
  a test on unseen runs.
- torchtitan's H100s are limited to 500 of 700 W and have slower memory. Only the slower memory is modelled.
  torchtitan's selective activation checkpointing keeps every second product. It is predicted as `selective`, which
  keeps all of them.
- Without the overlap that llmtrain does not have, the prediction is {megascale:.0%} too slow for MegaScale and
  {llama3:.0%} too slow for Llama 3 on 16,384 devices: llmtrain would not reach their speed.
- GPT's residual stream is predicted whole on each rank, but MegaScale's ranks hold slices of it. MegaScale's layers
  also compute attention and feed-forward in parallel, with half as many all-reduces, and attention has a window. This
  is not modelled. Megatron-LM does not state the micro-batch of each row; 1 is assumed.
- Llama 3 does not say which FLOPs it counts. 6·N + 6·L·d·T is assumed, without recomputation.
- Most rows test sharding as in ZeRO-3. None tests a pipeline without tensor parallelism; only the bubble below does.
- All models are dense. No published run was found that tests expert or sequence parallelism alone.
"""


def layout_of(run: Run) -> str:
    """Returns the parallel degrees, the ZeRO stage and the number of micro-batches."""
    plan = run.plan()
    parts = [
        f"dp{plan.data_parallel_size}",
        *(f"{name}{size}" for name, size in (("pp", plan.parallel.pipeline), ("tp", plan.parallel.tensor)) if size > 1),
    ]
    parts += [f"zero{plan.parallel.zero_stage}", f"{run.micro_batch} × {run.accumulation}"]
    again = {"none": "", "full": ", recomputed", "selective": ", selective"}
    return " ".join(parts) + again[plan.parallel.activation_checkpointing]


def render() -> str:
    """Returns the whole page."""
    reached = {**EFFICIENCY, "others": DEFAULT_EFFICIENCY}
    shares = "".join(f"| {name} | {one.matmul:.0%} | {one.attention:.0%} |\n" for name, one in reached.items())
    rows = "".join(_row(run) for run in RUNS)
    own = [abs(_error(run)) for run in RUNS if run.chunks == 1]
    others = [abs(_error(run)) for run in RUNS if run.chunks > 1]
    waiting = {run.source: _error(replace(run, traffic_of=CommunicationGroups.traffic)) for run in RUNS}
    tail = TAIL.format(
        megascale=-waiting[MEGASCALE],
        llama3=-waiting[LLAMA3],
        number=len(own),
        mean=statistics.mean(own),
        median=statistics.median(own),
        largest=max(own),
        others=len(others),
        other=max(others),
    )
    return (
        HEAD.replace("{measured}", _measured())
        + shares
        + ASSUMED
        + _assumptions()
        + PUBLISHED
        + rows
        + tail
        + _bubble()
    )


def _measured() -> str:
    """Returns how far the predictions are from what one GPU took."""
    page = "[on one GPU](../reference/gpu.md)"
    if not GPU.is_file():
        return f"They were not compared with steps {page}."
    result = json.loads(GPU.read_text(encoding="utf-8"))
    found = [row["found"] for row in result["rows"] if "predicted_ms" in (row.get("found") or {})]
    errors = [one["predicted_ms"] / one["step_ms"] - 1 for one in found]
    text = (
        f"The predicted time of {len(found)} plans was between {-min(errors):.0%} too short and {max(errors):.0%} too "
        f"long {page}, with a median of {statistics.median(errors):+.0%}. The shares were not changed for this, "
        "because most published runs on several devices are predicted as too fast."
    )
    rates = next((row["found"]["measured"] for row in result["rows"] if "measured" in (row.get("found") or {})), None)
    rows = RATES + "".join(_rates(rates)) if rates and rates["device"] in EFFICIENCY else ""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + rows


def _rates(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each rate of a self-test: measured, assumed, and the datasheet's."""
    device, reached = DEVICES[measured["device"]], EFFICIENCY[measured["device"]]
    for name, rate, peak, share in (
        ("Matrix products in bf16, TFLOP/s", measured["matmul"]["bf16"], device.peak_flops["bf16"], reached.matmul),
        ("Attention in bf16, TFLOP/s", measured["attention"]["bf16"], device.peak_flops["bf16"], reached.attention),
        ("Memory, GB/s", measured["memory_bandwidth"], device.memory_bandwidth, FUSED.memory),
        ("Link to the host, GB/s", measured["host_bandwidth"], device.host_bandwidth, FUSED.link),
    ):
        assert peak, f"{device.name} has no rate for: {name}"
        unit = 1e12 if "TFLOP" in name else 1e9
        cells = f"{peak / unit:,.0f} | {share:.0%}: {share * peak / unit:,.0f} | {rate / peak:.0%}: {rate / unit:,.0f}"
        yield f"\n| {name} | {cells} |"


def _bubble() -> str:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows = "".join(
        f"| {row['schedule']} | {row['ranks']} | {row['chunks']} | {row['micro_batches']} "
        f"| {row['predicted_step_s']:.2f} s | {row['measured_step_s']:.2f} s "
        f"| {row['step_error']:+.1%} | {row['predicted_bubble']:.1%} | {row['measured_bubble']:.1%} |\n"
        for row in measured["rows"]
    )
    return BUBBLE.format(**measured) + rows


def _assumptions() -> str:
    rows = []
    for name, described in field_texts(Assumptions).items():
        text = " ".join(described.split())
        rows.append(f"| `{name}` | {getattr(EAGER, name):g} | {getattr(FUSED, name):g} | {text} |\n")
    return "".join(rows)


def _error(run: Run) -> float:
    return run.predicted().tokens_per_second_per_device / run.published - 1


def _row(run: Run) -> str:
    cells = [
        run.name + (f", {run.chunks} stages a rank" if run.chunks > 1 else ""),
        f"{run.devices:,} × {run.device}",
        layout_of(run),
        f"{run.published:,.0f}",
        f"{run.predicted().tokens_per_second_per_device:,.0f}",
        f"{_error(run):+.0%}",
        run.source,
    ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs/guides/time.md").write_text(render(), encoding="utf-8")
