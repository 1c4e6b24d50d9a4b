"""Models of a user's own for tests: one whose matrices can be split, and faulty ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (f(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (each * cos + torch.cat((-each.chunk(2, -1)[1], each.chunk(2, -1)[0]), -1) * sin for each in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Layer(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm(x), cos, sin)
        return x + self.down(functional.silu(self.up(x)))


class Decoder(nn.Module):
    """Rotary positions from a buffer that is not saved, shared keys, and a head without a module of its own."""

    def __init__(self, vocab_size, width=32, heads=4, kv_heads=2, depth=2):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        half = width // heads // 2
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(half) / half), persistent=False)

    def embed(self, tokens):
        return self.table(tokens)

    def forward(self, tokens, position_ids=None):
        return functional.linear(self.hidden(tokens, position_ids), self.table.weight)

    def hidden(self, tokens, position_ids):
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)[:, None]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        return self.norm(x)


SPLIT = {
    **{f"layers.*.attention.{name}": "colwise" for name in "qkv"},
    "layers.*.attention.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


class ReturnsHidden(Decoder):
    """Its head is applied by whoever calls it."""

    def __init__(self, vocab_size, **sizes):
        super().__init__(vocab_size, **sizes)
        self.score = nn.Linear(self.table.embedding_dim, vocab_size, bias=False)

    def forward(self, tokens, position_ids=None):
        return self.hidden(tokens, position_ids)


class ScalesLogits(nn.Module):
    def __init__(self, vocab_size, width=32):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return 2 * self.head(self.table(tokens))


class LastLogits(Decoder):
    def forward(self, tokens, position_ids=None):
        return super().forward(tokens, position_ids)[:, -1:]


class Raises(Decoder):
    def embed(self, tokens):
        raise ZeroDivisionError("a fault of the user")


class NoEmbedding(Decoder):
    def embed(self, tokens):
        return self.table.weight[tokens]


class MixesRows(Decoder):
    def embed(self, tokens):
        x = self.table(tokens)
        return x - x.mean(0)


class LooksAhead(Decoder):
    def embed(self, tokens):
        return self.table(tokens) + self.table(tokens).mean(1, keepdim=True)


class KeepsState(Decoder):
    calls = 0

    def embed(self, tokens):
        self.calls += 1
        return self.table(tokens) * (1 + self.calls / 100)


class MixesDocuments(Decoder):
    """A mean over all earlier tokens, of whichever document."""

    def embed(self, tokens):
        x = self.table(tokens)
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


class OwnMask(Decoder):
    """Attention with a causal mask of its own."""

    def embed(self, tokens):
        x = self.table(tokens)
        q = x[:, None]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return x + functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0]


class CountsPositions(Decoder):
    def forward(self, tokens, position_ids=None):
        return super().forward(tokens)


class Skips(Decoder):
    """The last layer reads what the first one has read, past the layers between them."""

    def forward(self, tokens, position_ids=None):
        position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)[:, None]
        first = x = self.embed(tokens)
        for layer in self.layers[:-1]:
            x = layer(x, angles.cos(), angles.sin())
        x = self.layers[-1](x + first, angles.cos(), angles.sin())
        return functional.linear(self.norm(x), self.table.weight)


class ReadsFirstLayer(Decoder):
    """After the layers, a weight of the first one is read again, which another stage has."""

    def forward(self, tokens, position_ids=None):
        again = self.layers[0].attention.q.weight.sum()
        return super().forward(tokens, position_ids) * again


class Drops(Decoder):
    def embed(self, tokens):
        return functional.dropout(self.table(tokens), 0.2, self.training)


class Auxiliary(Decoder):
    def forward(self, tokens, position_ids=None):
        logits = super().forward(tokens, position_ids)
        return {"logits": logits, "aux_loss": 0.1 * logits.float().square().mean()}


class TiedByData(Decoder):
    """Its head has the numbers of the embedding, but is a parameter of its own."""

    def __init__(self, vocab_size, width=32, **others):
        super().__init__(vocab_size, width, **others)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight.data = self.table.weight.data

    def forward(self, tokens, position_ids=None):
        return super().forward(tokens, position_ids) + self.head(self.table(tokens))


class TiedLayers(Decoder):
    """Two layers share a weight, which no call shows."""

    def __init__(self, vocab_size, **others):
        super().__init__(vocab_size, **others)
        self.layers[-1].up.weight = self.layers[0].up.weight


def not_a_module(vocab_size):
    return 7


def needs_more(vocab_size, something):
    return Decoder(vocab_size)
