"""A GPT written out in plain PyTorch, as in nanoGPT, trained by the loop of `bare.py`; prints a line of JSON.

python -m benchmarks.programs.gpt_loop FOLDER --steps 400

FOLDER is the output of `subject`. Queries, keys and values are one product, the activation function and attention are
one kernel each, and no module calls hooks.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs.bare import torch_steps
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
        """Takes and returns the hidden states, [batch, sequence, width]."""
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

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        """Returns the logits, [batch, sequence, vocabulary], as a model of `transformers` does; it has no cache."""
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        return SimpleNamespace(logits=functional.linear(self.norm(self.blocks(hidden)), self.tokens.weight))


def main() -> None:
    """Trains, and measures the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    train = read(options.folder / "train.json")
    model = Gpt(read(options.folder / "model.json"))
    batches = itertools.islice(torch.load(options.folder / "batches_0.pt"), options.steps)
    times = []
    for _ in torch_steps(model, batches, train, options.steps, train.log_every):
        times.append(time.perf_counter())
    print_speed(times, train)


if __name__ == "__main__":
    main()
