"""Hugging Face's Trainer as its users write it: `torchrun ... hf_trainer.py FOLDER --steps 60 [--zero 1] [--bf16]`.

FOLDER is the output of `subject`: the same sequences in the same batches. All settings other than those of the model,
the batches and the optimizer are the Trainer's defaults. With --zero it runs DeepSpeed, configured by "auto". Rank 0
prints one line of JSON.
"""

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from benchmarks.programs.windows import print_speed, read

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
KERNELS = {*PRODUCTS, ATTENTION, f"{ATTENTION}_backward"}
"""Torch's kernels that compute nearly all of a step's floating point operations."""


def kernel_ms(model: Any, micro_batch: Any, accumulation: int) -> float:
    """Returns the least time that `KERNELS` take in the passes of a step, in milliseconds, on a CPU.

    It is the least of ten, since other programs on the machine only add to it.
    """
    from torch.profiler import ProfilerActivity, profile

    taken = []
    for _ in range(10):
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            model(input_ids=micro_batch, labels=micro_batch).loss.backward()
        taken.append(sum(one.self_cpu_time_total for one in trace.key_averages() if one.key in KERNELS))
    return accumulation * min(taken) / 1000


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--zero", type=int, help="stage of DeepSpeed's ZeRO; without it there is no DeepSpeed")
    parser.add_argument("--bf16", action="store_true", help="mixed precision instead of fp32")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ["DS_ACCELERATOR"] = "cpu"
    if options.zero is not None:
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # otherwise the first start compiles for a minute
        with socket.socket() as free:  # two of these scripts run at the same time
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **place}.items():
            os.environ.setdefault(name, value)

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    values = json.loads((options.folder / "model.json").read_text())
    train = read(options.folder / "train.json")
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config)
    rows = []
    for other in range(world):
        for step in torch.load(options.folder / f"batches_{other}.pt"):
            for inputs, _, _ in step:
                rows += [{"input_ids": row, "labels": row} for row in inputs]
    zero = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": options.zero},
        "zero_allow_untested_optimizer": True,
    }
    arguments = TrainingArguments(
        output_dir=str(options.folder / "trainer"),
        # With it, the Trainer would use DistributedDataParallel instead of DeepSpeed.
        use_cpu=options.zero is None,
        bf16=options.bf16,
        max_steps=options.steps,
        per_device_train_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=train.accumulation,
        learning_rate=train.lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        max_grad_norm=train.clip_grad_norm,
        lr_scheduler_type="cosine",
        warmup_steps=train.warmup_steps,
        logging_steps=train.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_backend="gloo" if world > 1 or options.zero is not None else None,
        deepspeed=zero if options.zero is not None else None,
    )
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.time())

    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    if rank == 0:
        peak = 1024 * getrusage(RUSAGE_SELF).ru_maxrss / 2**30
        more = {}
        if world == 1 and options.zero is None and not options.bf16:
            micro_batch = torch.stack([row["input_ids"] for row in rows[: train.micro_batch_size]])
            more = {"kernel_ms": kernel_ms(model, micro_batch, train.accumulation)}
        print_speed(times, train, world, peak, **more)
    sys.stdout.flush()
    if world > 1:
        torch.distributed.barrier()  # a rank whose peer has gone may be aborted before it prints
    os._exit(0)  # gloo's threads may abort a rank that exits in the usual way, also after `destroy_process_group`


if __name__ == "__main__":
    main()
