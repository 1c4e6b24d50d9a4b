"""A pipeline's tied layer: its parameters that are not tied are left out of the norm, and of gradient clipping."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29619", "WORLD_SIZE": "2"}

import deepspeed
import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import distributed as dist
from torch import nn

CONFIG = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
}


def main(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    deepspeed.ops.__compatible_ops__ = {}  # else an operator for CPUs is compiled, which takes a minute
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    tied = [TiedLayerSpec("tied", nn.Linear, 8, 8, tied_weight_attr="weight") for _ in range(2)]
    layers = [tied[0], nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), tied[1]]
    loss = lambda output, labels: output.sum()  # noqa: E731
    module = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=CONFIG)
    sample = torch.ones(1, 8, dtype=torch.bfloat16)
    gradients = {}
    engine.optimizer.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: one._hp_grad.detach().double() for name, one in module.named_parameters()})
    )
    engine.optimizer.clip_grad = 0.0  # as computed, to compare
    engine.train_batch(iter([(sample, sample)]))
    # The tied weight counts once, and each stage's bias is its own.
    is_tied = {name: "tied" in name and name.endswith("weight") for name in gradients}
    squares = sum(one.square().sum() for name, one in gradients.items() if rank == 0 or not is_tied[name])
    dist.all_reduce(squares)
    expected, found = squares.sqrt().item(), float(engine.get_global_grad_norm())
    dist.barrier()  # or the other rank loses its connections to a rank that has ended
    if rank == 0:
        print(f"norm of all gradients {expected:.4f}, get_global_grad_norm() {found:.4f}")
    if abs(found / expected - 1) < 1e-4:
        raise SystemExit("the norms are equal: the fault is mended")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
