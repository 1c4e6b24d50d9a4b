"""BF16_Optimizer with AutoEP and AutoTP: gradients of the second micro-batch of a step are not corrected."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29612", "WORLD_SIZE": "2"}

import deepspeed
import torch
from transformers import MixtralConfig, MixtralForCausalLM

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*self_attn\.(q|k|v)_proj\.weight$"], "partition_type": "column"},
                {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
            ],
        },
    },
    "expert_parallel": {
        "enabled": True,
        "autoep_size": 2,
        "preset_model": "mixtral",
        "disable_triton_grouped_mm": True,
    },
}


def main(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    deepspeed.ops.__compatible_ops__ = {}  # else an operator for CPUs is compiled, which takes a minute
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, dtype=torch.bfloat16))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    experts = [one for one in engine.module.parameters() if not getattr(one, "allreduce", True)]
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(1))
    norms = []
    for _ in range(2):  # twice the same micro-batch, and no update
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
        norms.append(torch.stack([one._hp_grad.detach().double().norm() for one in experts]).norm().item())
    torch.distributed.barrier()  # or the other rank loses its connections to a rank that has ended
    if rank == 0:
        print(f"gradients of experts after two equal micro-batches: {norms[1] / norms[0]:.3f} times those after one")
    if abs(norms[1] / norms[0] - 2) < 0.05:
        raise SystemExit("it is 2: the fault is mended")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
