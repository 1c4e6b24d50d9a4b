"""A recurrence with a state that depends on its input, like that of Mamba (arXiv 2312.00752), as a plain loop."""

import torch
from nanogpt import recipe as nanogpt
from torch import nn
from torch.nn import functional

import llmtrain as lt


class Recurrence(nn.Module):
    """A state of `width` × `state` numbers, which each token lets decay and adds to. A document begins with zeros."""

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.input = nn.Linear(width, 2 * width, bias=False)
        self.select = nn.Linear(width, 2 * state + 1, bias=False)
        self.log_decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        values, gates = self.input(self.norm(x)).chunk(2, dim=-1)
        state = self.log_decay.shape[1]
        write, read, step = self.select(values).split([state, state, 1], dim=-1)
        step = functional.softplus(step)[..., None]
        kept = torch.exp(-step * self.log_decay.exp()).masked_fill(begins[..., None, None], 0.0)
        added = step * values[..., None] * write[..., None, :]
        hidden, results = torch.zeros_like(added[:, 0]), []
        for position in range(x.shape[1]):
            hidden = kept[:, position] * hidden + added[:, position]
            results.append((hidden * read[:, position, None]).sum(-1))
        mixed = torch.stack(results, dim=1) + self.skip * values
        return x + self.output(mixed * functional.silu(gates))


class RecurrentModel(nn.Module):
    """Maps tokens [batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, vocab_size: int, width: int, state: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Recurrence(width, state) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, position_ids == 0)
        return self.head(self.norm(x))


def recipe() -> lt.Recipe:
    model = lt.ModelConfig(build=RecurrentModel, config={"width": 96, "state": 8, "depth": 4})
    return nanogpt().with_(**{"name": "recurrence", "model": model})


def recipe_verify() -> lt.Recipe:
    return recipe().with_(
        **{"data.sequence_length": 32, "batch.global_batch_size": 4, "batch.micro_batch_size": 1, "train.max_steps": 10}
    )


if __name__ == "__main__":
    lt.main(recipe)
