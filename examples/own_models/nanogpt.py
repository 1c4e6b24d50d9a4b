"""nanoGPT's model (https://github.com/karpathy/nanoGPT), trained under every strategy: `llmtrain train nanogpt.py`."""

import math

import torch
from torch import nn
from torch.nn import functional

import llmtrain as lt


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.ln_1 = nn.LayerNorm(n_embd, bias=False)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.ln_2 = nn.LayerNorm(n_embd, bias=False)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_out = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.c_out(functional.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Maps tokens [batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, vocab_size: int, n_layer: int, n_head: int, n_embd: int, block_size: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd, bias=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                is_output = name.endswith(("c_proj.weight", "c_out.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * n_layer) if is_output else 0.02)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(position_ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def recipe() -> lt.Recipe:
    return lt.Recipe(
        name="nanogpt",
        model=lt.ModelConfig(build=GPT, config={"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128}),
        data=lt.DataConfig(
            sources=[lt.Source("stdlib")],
            tokenizer=lt.TrainedTokenizer(vocab_size=2048),
            sequence_length=128,
            packing="best_fit",
        ),
        optim=lt.OptimConfig(lr=2e-3, warmup_steps=20),
        batch=lt.BatchConfig(global_batch_size=16, micro_batch_size=4),
        train=lt.TrainConfig(max_steps=200),
        evaluation=lt.EvalConfig(every_steps=100, max_sequences=64),
    )


def recipe_verify() -> lt.Recipe:
    """Small enough to train every plan in two minutes: `llmtrain verify nanogpt.py --nproc 2`."""
    return recipe().with_(
        **{"data.sequence_length": 32, "batch.global_batch_size": 4, "batch.micro_batch_size": 1, "train.max_steps": 10}
    )


if __name__ == "__main__":
    lt.main(recipe)
