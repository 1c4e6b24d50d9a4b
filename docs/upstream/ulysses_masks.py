"""UlyssesSPAttentionHF with sdpa drops the mask, so packed documents attend to each other."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29615", "WORLD_SIZE": "2"}

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

FIRST, LENGTH = 5, 16


@torch.no_grad()
def main(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    deepspeed.ops.__compatible_ops__ = {}  # else an operator for CPUs is compiled, which takes a minute
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).eval()
    positions = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]
    second, own = torch.randint(64, (1, LENGTH - FIRST)), slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)
    batches = [torch.cat([torch.randint(64, (1, FIRST)), second], dim=1) for _ in range(2)]

    def change(part: slice) -> float:
        """How much the logits of the second document change with the tokens of the first one."""
        inputs = ({"input_ids": tokens[:, part], "position_ids": positions[:, part]} for tokens in batches)
        one, other = (model(**one, use_cache=False).logits for one in inputs)
        is_second = torch.arange(LENGTH)[part] >= FIRST
        change = (one - other)[:, is_second].abs().max()
        dist.all_reduce(change, dist.ReduceOp.MAX)
        return change.item()

    whole = change(slice(None))
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sequence_parallel_size=2, micro_batch_size=1)
    sliced = change(own)
    dist.barrier()  # or the other rank loses its connections to a rank that has ended
    if rank == 0:
        print(f"logits of the second document change by {whole:.1e} with one rank, {sliced:.1e} with Ulysses")
    assert whole == 0
    if sliced == 0:
        raise SystemExit("documents are kept apart: the fault is mended")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
