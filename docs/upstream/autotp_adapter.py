"""AutoTP replaces a linear layer with a PEFT adapter by the linear layer alone."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613", "WORLD_SIZE": "2"}

import deepspeed
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [{"patterns": [r".*\.q_proj\.weight$"], "partition_type": "column"}],
        },
    },
}


def adapters(model: torch.nn.Module) -> int:
    return sum("lora_" in name for name, _ in model.named_parameters())


def main(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    deepspeed.ops.__compatible_ops__ = {}  # else an operator for CPUs is compiled, which takes a minute
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj"]), model)
    before = adapters(model)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    after = adapters(engine.module)
    torch.distributed.barrier()  # or the other rank loses its connections to a rank that has ended
    if rank == 0:
        print(f"parameters of adapters: {before} before deepspeed.initialize, {after} after it")
    if after == before:
        raise SystemExit("none is lost: the fault is mended")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
