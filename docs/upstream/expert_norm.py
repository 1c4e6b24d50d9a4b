"""ZeRO-1 with AutoEP and AutoTP on the same ranks: the gradient norm omits the experts of all ranks but the first."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": "2"}

import deepspeed
import torch
from torch import distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
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
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, initializer_range=0.2))
    trained = list(model.model.layers.parameters())
    for parameter in set(model.parameters()) - set(trained):  # whose gradients would be most of the norm
        parameter.requires_grad = False
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=CONFIG)
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(1))
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)

    squares = torch.zeros((), dtype=torch.float64)
    for parameter in engine.module.model.layers.parameters():
        is_expert = not getattr(parameter, "allreduce", True)
        is_slice = getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)
        if is_expert or is_slice or rank == 0:  # all else is the same on both ranks
            squares += deepspeed.utils.safe_get_full_grad(parameter).double().square().sum()
    dist.all_reduce(squares)
    engine.step()
    expected, found = squares.sqrt().item(), float(engine.get_global_grad_norm())
    dist.barrier()  # or the other rank loses its connections to a rank that has ended
    if rank == 0:
        print(f"norm of all gradients {expected:.6f}, get_global_grad_norm() {found:.6f}")
    if abs(found / expected - 1) < 1e-5:
        raise SystemExit("the norms are equal: the fault is mended")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
