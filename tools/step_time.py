"""The tables of docs/guides/time.md: assumptions of the predicted step time, and its deviation from published runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmtrain.plan.axes import CHOSEN
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import PythonRecipe
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
from tools.page import ROOT, Files, filled, paragraph, table

MEASURED = ROOT / "benchmarks/results/bubble.json"
GPU = ROOT / "benchmarks/results/gpu.json"

FOUNDRY = "[llm-foundry](https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md)"
TITAN = "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
MEGATRON = "[Megatron-LM](https://arxiv.org/abs/2104.04473), table 1"
LLAMA3 = "[Llama 3](https://arxiv.org/abs/2407.21783), table 4"
AUTOMODEL = "[NeMo AutoModel](https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.md)"
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


def experts(recipe: str, micro: int, published: float, parallel: dict[str, Any]) -> Run:
    """Returns a mixture of experts of AutoModel's table: on 8 devices, routed evenly, each rank's weights sharded.

    recipe: the one of this repository whose model it is.
    """
    file = PythonRecipe(ROOT / f"recipes/{recipe}.py")
    declared = file.module.architecture() if hasattr(file.module, "architecture") else file.recipe("").model
    model = declared.model_copy(update={"attention": "flash_attention_2"})
    name = {"qwen3_30b_a3b": "Qwen3 30B-A3B", "sft_gpt_oss_20b_lora": "gpt-oss-20b"}[recipe]
    return Run(AUTOMODEL, name, model, 8, "h100", micro, 16, 4096, published, parallel)


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
    experts("qwen3_30b_a3b", 4, 12040, {"zero_stage": 3, "expert": 8}),
    experts("sft_gpt_oss_20b_lora", 2, 13058, SHARDED),
)


def layout_of(run: Run) -> str:
    """Returns the parallel degrees, the ZeRO stage and the number of micro-batches."""
    plan = run.plan()
    parts = [
        f"dp{plan.data_parallel_size}",
        *(f"{axis.short}{plan.degree(axis)}" for axis in CHOSEN if plan.degree(axis) > 1),
    ]
    parts += [f"zero{plan.parallel.zero_stage}", f"{run.micro_batch} × {run.accumulation}"]
    again = {"none": "", "full": ", recomputed", "selective": ", selective"}
    return " ".join(parts) + again[plan.parallel.activation_checkpointing]


def files() -> Files:
    """Returns the page."""
    return filled(
        "docs/guides/time.md",
        measured=_measured(),
        shares=table(
            ("Device", "Matrix products reach", "Attention reaches"),
            (
                (name, f"{one.matmul:.0%}", f"{one.attention:.0%}")
                for name, one in {**EFFICIENCY, "others": DEFAULT_EFFICIENCY}.items()
            ),
        ),
        assumptions=table(
            ("Assumption", "Eager", "Fused", ""),
            (
                (f"`{name}`", f"{getattr(EAGER, name):g}", f"{getattr(FUSED, name):g}", " ".join(text.split()))
                for name, text in field_texts(Assumptions).items()
            ),
        ),
        runs=_published(),
        bubble=_bubble(),
    )


def _measured() -> str:
    """Returns how far the predictions are from what one GPU took."""
    page = "[on one GPU](../reference/gpu.md)"
    if not GPU.is_file():
        return f"They were not compared with steps {page}."
    result = json.loads(GPU.read_text(encoding="utf-8"))
    found = [row["found"] for row in result["rows"] if "predicted_ms" in (row.get("found") or {})]
    errors = [one["predicted_ms"] / one["step_ms"] - 1 for one in found]
    text = paragraph(
        f"The predicted time of {len(found)} plans was between {-min(errors):.0%} too short and {max(errors):.0%} too "
        f"long {page}, with a median of {statistics.median(errors):+.0%}. The shares were not changed for this, "
        "because most published runs on several devices are predicted as too fast."
    )
    rates = next((row["found"]["measured"] for row in result["rows"] if "measured" in (row.get("found") or {})), None)
    if rates and rates["device"] in EFFICIENCY:
        text += "\n" + paragraph(
            "The rates that the self-test measured on that GPU are those of single kernels. They are higher than the "
            "assumed ones, which stand for whole steps:"
        )
        text += "\n" + table(("", "Datasheet", "Assumed", "Measured"), _rates(rates))
    return text


def _rates(measured: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each rate of a self-test: the datasheet's, assumed, and measured."""
    device, reached = DEVICES[measured["device"]], EFFICIENCY[measured["device"]]
    for name, rate, peak, share in (
        ("Matrix products in bf16, TFLOP/s", measured["matmul"]["bf16"], device.peak_flops["bf16"], reached.matmul),
        ("Attention in bf16, TFLOP/s", measured["attention"]["bf16"], device.peak_flops["bf16"], reached.attention),
        ("Memory, GB/s", measured["memory_bandwidth"], device.memory_bandwidth, FUSED.memory),
        ("Link to the host, GB/s", measured["host_bandwidth"], device.host_bandwidth, FUSED.link),
    ):
        assert peak, f"{device.name} has no rate for: {name}"
        unit = 1e12 if "TFLOP" in name else 1e9
        assumed, found = f"{share:.0%}: {share * peak / unit:,.0f}", f"{rate / peak:.0%}: {rate / unit:,.0f}"
        yield name, f"{peak / unit:,.0f}", assumed, found


def _published() -> str:
    """Returns the published runs beside their predictions, and a summary of the errors."""
    columns = ("Run", "Devices", "Layout", "Published, tokens/s a device", "Predicted", "Error", "Source")
    rows = (
        (
            run.name + (f", {run.chunks} stages a rank" if run.chunks > 1 else ""),
            f"{run.devices:,} × {run.device}",
            layout_of(run),
            f"{run.published:,.0f}",
            f"{run.predicted().tokens_per_second_per_device:,.0f}",
            f"{_error(run):+.0%}",
            run.source,
        )
        for run in RUNS
    )
    own = [abs(_error(run)) for run in RUNS if run.chunks == 1]
    others = [abs(_error(run)) for run in RUNS if run.chunks > 1]
    waiting = {run.source: -_error(replace(run, traffic_of=CommunicationGroups.traffic)) for run in RUNS}
    summary = paragraph(
        f"For the {len(own)} runs without a pipeline, the mean absolute error is {statistics.mean(own):.0%}, the "
        f"median {statistics.median(own):.0%} and the largest {max(own):.0%}. The predictions of the {len(others)} "
        f"pipelines, whose stages are interleaved and tensor parallel, are up to {max(others):.0%} off. Without the "
        f"overlap that llmtrain does not have, the prediction is {waiting[MEGASCALE]:.0%} too slow for MegaScale and "
        f"{waiting[LLAMA3]:.0%} too slow for Llama 3 on 16,384 devices: llmtrain would not reach their speed."
    )
    return f"{table(columns, rows)}\n{summary}"


def _error(run: Run) -> float:
    return run.predicted().tokens_per_second_per_device / run.published - 1


def _bubble() -> str:
    """Returns the bubbles that were measured with the engine, beside their predictions."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    forms = {
        **dict.fromkeys(("schedule", "ranks", "chunks", "micro_batches"), ""),
        **dict.fromkeys(("predicted_step_s", "measured_step_s"), ".2f"),
        **{"step_error": "+.1%", "predicted_bubble": ".1%", "measured_bubble": ".1%"},
    }
    columns = ("Schedule", "Ranks", "Stages each", "Micro-batches", "Predicted step, s", "Measured step, s", "Error")
    rows = ([format(row[name], form) for name, form in forms.items()] for row in measured["rows"])
    text = paragraph(
        "The bubble was measured with the engine on CPUs. Instead of computing, the ranks sleep "
        f"{measured['forward_s']:g} s for each forward pass and {measured['backward_s']:g} s for each backward pass of "
        f"a micro-batch (`python benchmarks/bubble.py`, {measured['hardware']}, DeepSpeed "
        f"{measured['versions']['deepspeed']}):"
    )
    return f"{text}\n{table((*columns, 'Predicted bubble', 'Measured bubble'), rows)}"
