"""A mixture of experts whose router has a loss of its own (arXiv 2101.03961)."""

import torch
from nanogpt import Block
from nanogpt import recipe as nanogpt
from torch import nn
from torch.nn import functional

import llmtrain as lt


class Experts(nn.Module):
    """Each token goes to `chosen` of the feed-forward layers."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.norm = nn.LayerNorm(width, bias=False)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self.norm(x).flatten(0, 1)
        shares = self.router(flat).float().softmax(dim=-1)
        weights, indices = shares.topk(self.chosen, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        result = torch.zeros_like(flat)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, places = (indices == expert).nonzero(as_tuple=True)
            hidden = functional.gelu(flat[rows] @ up) @ down
            result = result.index_add(0, rows, hidden * weights[rows, places, None])
        used = functional.one_hot(indices, shares.shape[-1]).sum(1).float().mean(0)
        balance = shares.shape[-1] / self.chosen * (used * shares.mean(0)).sum()
        return x + result.view_as(x), balance


class Layer(nn.Module):
    """Attention and a feed-forward layer, and then experts."""

    def __init__(self, n_embd: int, n_head: int, experts: int) -> None:
        super().__init__()
        self.block = Block(n_embd, n_head)
        self.experts = Experts(n_embd, experts, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.experts(self.block(x))


class MixtureOfExperts(nn.Module):
    """Maps tokens [batch, sequence] to logits [batch, sequence, vocabulary] and the loss of the routers."""

    def __init__(self, vocab_size: int, n_layer: int, n_head: int, n_embd: int, block_size: int, experts: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.layers = nn.ModuleList(Layer(n_embd, n_head, experts) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd, bias=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        x, losses = self.wte(tokens) + self.wpe(position_ids), []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return self.lm_head(self.ln_f(x)), 0.01 * torch.stack(losses).mean()


def recipe() -> lt.Recipe:
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 128, "experts": 8}
    model = lt.ModelConfig(build=MixtureOfExperts, config=sizes)
    packing = {"data.packing": "concat", "data.mask_documents": False}
    return nanogpt().with_(**{"name": "experts", "model": model, **packing})


def recipe_verify() -> lt.Recipe:
    return recipe().with_(
        **{"data.sequence_length": 32, "batch.global_batch_size": 4, "batch.micro_batch_size": 1, "train.max_steps": 10}
    )


if __name__ == "__main__":
    lt.main(recipe)
