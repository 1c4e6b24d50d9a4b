"""A GPT written out in plain PyTorch, and the loop that trains it, as in nanoGPT; prints a line of JSON.

python -m benchmarks.programs.gpt_loop FOLDER --steps 400

FOLDER is the output of `subject`. Queries, keys and values are one product, the activation function and attention are
one kernel each, and no module calls hooks.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs.windows import print_speed, read


class Block(nn.Module):
    """A layer: attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Takes and returns [batch, T, width]."""
        batch, length, width = hidden.shape
        parts = self.into(self.norms[0](hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(functional.gelu(self.up(self.norms[1](hidden)), approximate="tanh"))


class Gpt(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.Sequential(*(Block(config.n_embd, config.n_head) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(config.n_embd)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross-entropy of token ids [batch, T]."""
        hidden = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        logits = functional.linear(self.norm(self.blocks(hidden)), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def main() -> None:
    """Trains, and measures the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    train = read(options.folder / "train.json")
    model = Gpt(read(options.folder / "model.json"))
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=tuple(train.betas), eps=train.eps, fused=True)
    batches = torch.load(options.folder / "batches_0.pt")
    times = []
    for step in range(options.steps):
        for inputs, _, labels in batches[step]:
            loss = model(inputs, labels)
            (loss / train.accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % train.log_every == 0:
            print(step + 1, loss.item(), flush=True)
        times.append(time.perf_counter())
    print_speed(times, train)


if __name__ == "__main__":
    main()
