"""Compares the memory of plans on one GPU with the prediction, and writes results/memory.json.

python benchmarks/memory.py           # on a machine with a GPU of 80 GB or more, a quarter of an hour
python benchmarks/memory.py --list    # lists what would be measured

Every configuration runs in its own process, so that no memory of another one remains. The process builds the engine and
takes three steps. Its `torch.cuda.max_memory_allocated` is compared with the plan's peak without the framework's share,
because torch does not allocate the latter. Afterwards, run `python tools/render_memory.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import short_facts
from llmtrain.cluster import Cluster
from llmtrain.data import MicroBatch, StepBatch
from llmtrain.plan import Plan
from llmtrain.predict import memory_of
from llmtrain.recipe import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Precision,
    Recipe,
    Source,
    TrainConfig,
)
from llmtrain.rules import resolve

RESULT = Path(__file__).parent / "results" / "memory.json"
STEPS = 3
SHARE, CLOSE, UNDER = 0.95, 0.03, 0.01
"""The aim: in at least `SHARE` of the configurations, the prediction is off by at most the fraction `CLOSE`, and no
prediction is too low by more than `UNDER`."""

Model = tuple[str, dict[str, Any]]
"""Architecture and configuration."""
_WIDTHS: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
}
BILLION: Model = ("llama", _WIDTHS | {"num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 8192})
_SMALL: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
SMALL = _SMALL | {"num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096}
GPT2: Model = (
    "gpt2",
    {"vocab_size": 50257, "n_positions": 1024, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
)
EXPERTS = SMALL | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 6}


def case(
    model: Model = BILLION,
    stage: int = 2,
    precision: Precision = "bf16",
    length: int = 2048,
    micro: int = 4,
    **fields: Any,
) -> Recipe:
    """Returns a recipe. fields: `accumulation` (number of micro-batches), and fields of `ParallelConfig`."""
    accumulation, attention = fields.pop("accumulation", 1), fields.pop("attention", "sdpa")
    documents = fields.pop("documents", True)
    return Recipe(
        name="memory",
        model=ModelConfig(architecture=model[0], config=model[1], attention=attention),
        data=DataConfig(
            sources=(Source("stdlib"),), tokenizer="none", sequence_length=length, mask_documents=documents
        ),
        optim=OptimConfig(lr=1e-4, weight_decay=0.1),
        batch=BatchConfig(global_batch_size=micro * accumulation, micro_batch_size=micro),
        parallel=ParallelConfig(precision=precision, **{"zero_stage": stage, **fields}),
        train=TrainConfig(max_steps=STEPS),
    )


ACCELERATE: dict[str, Any] = {"backend": "accelerate"}
CASES = {
    **{f"1b zero{stage} bf16": case(stage=stage) for stage in (1, 2, 3)},
    **{f"1b zero{stage} bf16, 4 micro-batches": case(stage=stage, accumulation=4) for stage in (1, 2, 3)},
    **{f"1b zero{stage} fp32": case(stage=stage, precision="fp32", micro=2) for stage in (0, 1, 2, 3)},
    **{f"1b zero{stage} autocast": case(stage=stage, precision="autocast_bf16", micro=2) for stage in (0, 2, 3)},
    **{f"1b zero2 bf16, micro-batch {micro}": case(micro=micro) for micro in (1, 2, 8)},
    "1b zero2 bf16, recomputed, micro-batch 16": case(micro=16, activation_checkpointing="full"),
    "1b zero3 bf16, recomputed, 4 micro-batches": case(stage=3, activation_checkpointing="full", accumulation=4),
    "1b zero2 autocast, recomputed": case(precision="autocast_bf16", activation_checkpointing="full"),
    "1b zero2 bf16, 512 tokens": case(length=512, micro=16),
    "1b zero2 bf16, 8192 tokens": case(length=8192, micro=1),
    "1b zero2 bf16, eager, 1024 tokens": case(length=1024, attention="eager"),
    "1b zero2 bf16, causal": case(documents=False),
    "1b zero2 bf16, flash": case(documents=False, attention="flash_attention_2"),
    "1b zero1 bf16, offload": case(stage=1, offload_optimizer="cpu"),
    "1b zero2 bf16, offload": case(offload_optimizer="cpu"),
    "1b zero3 bf16, offload all": case(stage=3, offload_optimizer="cpu", offload_param="cpu"),
    "1b zero2 fp16": case(precision="fp16"),
    "1b ddp autocast": case(stage=0, precision="autocast_bf16", micro=2, accelerate="ddp", **ACCELERATE),
    "1b fsdp2 bf16": case(stage=3, accelerate="fsdp2", **ACCELERATE),
    "gpt2 zero1 bf16": case(GPT2, stage=1, length=1024, micro=16),
    "llama zero0 fp32, small": case(("llama", SMALL), stage=0, precision="fp32", length=1024, micro=16),
    "qwen3 zero3 bf16, small": case(("qwen3", SMALL | {"head_dim": 64}), stage=3, length=1024, micro=16),
    "gemma zero2 bf16, small": case(("gemma", SMALL | {"head_dim": 64}), length=1024, micro=16),
    "mixtral zero1 bf16, small": case(("mixtral", EXPERTS), stage=1, length=1024, micro=8),
}
"""Name → recipe. Each is trained on one device."""


def plan_of(recipe: Recipe) -> Plan:
    """Returns the plan for a GPU of unknown memory size, so that no plan is rejected."""
    return resolve(recipe, Cluster(device="gpu"))


def predicted_bytes(plan: Plan) -> int:
    """Returns the plan's peak in bytes without the framework's share."""
    memory = memory_of(plan)
    assert memory is not None, "each case is a chain of layers"
    return memory.allocated


def step_batch(plan: Plan, vocabulary: int) -> StepBatch:
    """Returns random tokens, with two documents per sequence if documents are kept apart."""
    size = (plan.batch.micro_batch_size, plan.recipe.data.sequence_length)
    documents = 2 if plan.recipe.data.mask_documents else 1
    positions = torch.arange(size[1] // documents).repeat(documents).expand(size)
    micro_batches = []
    for _ in range(plan.batch.gradient_accumulation_steps):
        tokens = torch.randint(0, vocabulary, size)
        micro_batches.append(MicroBatch(input_ids=tokens, position_ids=positions, labels=tokens))
    samples = plan.batch.global_batch_size
    return StepBatch(micro_batches, target_tokens=samples * size[1], samples=samples, first_sample=0)


def train(plan: Plan, device: torch.device) -> None:
    """Builds the engine and takes the steps."""
    from llmtrain.ds_config import render
    from llmtrain.engines import build_engine

    engine = build_engine(plan, render(plan), device)
    for _ in range(STEPS):
        engine.train_step(step_batch(plan, plan.model.vocab_size))


def measure(name: str) -> None:
    """Measures one configuration, and prints its memory in the last line."""
    from llmtrain.launch.local import reserved_port
    from llmtrain.launch.place.rank import Rank
    from llmtrain.runtime.distributed import init_process_group

    with reserved_port() as port:
        device = init_process_group(Rank(0, 0, 1, 1, "127.0.0.1", port, "benchmark"), on_cpu=False)
    train(plan_of(CASES[name]), device)
    print(json.dumps(torch.cuda.max_memory_allocated(device)))


def row_of(name: str, measured: int | None, failure: str = "") -> dict[str, Any]:
    """Returns prediction and measurement side by side, or the reason why the configuration did not run."""
    predicted = predicted_bytes(plan_of(CASES[name]))
    row: dict[str, Any] = {"name": name, "predicted_bytes": predicted, "measured_bytes": measured}
    if measured is None:
        return row | {"failure": failure}
    return row | {"error": round(predicted / measured - 1, 4)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the share of close predictions, and the largest underestimate and overestimate."""
    errors = [row["error"] for row in rows if "error" in row]
    within = round(sum(abs(error) <= CLOSE for error in errors) / len(errors), 4) if errors else None
    return {
        "measured": len(errors),
        "within": within,
        "lowest_error": min(errors, default=None),
        "highest_error": max(errors, default=None),
        "aim_met": within is not None and within >= SHARE and min(errors) >= -UNDER,
    }


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result together with a description of the machine."""
    packages = ("torch", "deepspeed", "transformers", "accelerate")
    return {
        **short_facts("python benchmarks/memory.py", torch.cuda.get_device_name(), *packages),
        "steps": STEPS,
        **summary(rows),
        "rows": rows,
    }


def run(name: str) -> dict[str, Any]:
    """Measures a configuration in a separate process and returns its row."""
    command = [sys.executable, __file__, "--case", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    return row_of(name, None, lines[-1]) if done.returncode else row_of(name, int(lines[-1]))


def main() -> None:
    """Measures all configurations, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the configurations and what is predicted")
    parser.add_argument("--case", choices=CASES, help="measure one, and print its bytes")
    arguments = parser.parse_args()
    if arguments.case:
        measure(arguments.case)
    elif arguments.list:
        for name, recipe in CASES.items():
            print(f"{predicted_bytes(plan_of(recipe)) / 2**30:6.1f} GiB  {name}")
    elif not torch.cuda.is_available():
        sys.exit("this measures a GPU, and there is none here")
    else:
        rows = []
        for name in CASES:
            rows.append(run(name))
            print(json.dumps(rows[-1]), flush=True)
        RESULT.write_text(json.dumps(document(rows), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
