"""A folder of pretrained weights whose model has its own code, as in some hub repositories."""

from __future__ import annotations

import json
from pathlib import Path

CONFIGURATION = """
from transformers import PreTrainedConfig


class OwnConfig(PreTrainedConfig):
    model_type = "own_of_the_tests"

    def __init__(self, vocab_size=256, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                 max_position_embeddings=64, tie_word_embeddings=True, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
"""

MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig


class OwnLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden, allowed):
        batch, length, width = hidden.shape
        q, k, v = self.qkv(self.norm(hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList([OwnLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, position_ids=None, use_cache=None):
        hidden = self.embed(input_ids) + self.positions(position_ids)
        documents = (position_ids == 0).cumsum(-1)
        same = documents[:, :, None] == documents[:, None, :]
        causal = torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
        for layer in self.layers:
            hidden = layer(hidden, (same & causal)[:, None])
        return CausalLMOutput(logits=self.lm_head(self.norm(hidden)))
"""

SPARSE = {
    "own_of_the_tests": "own_with_experts",
    "self.up = nn.Linear(width, 2 * width)": (
        "self.gate = nn.Linear(width, 256)\n"
        "        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(256)])"
    ),
    "        self.down = nn.Linear(2 * width, width)\n": "",
    "self.down(nn.functional.gelu(self.up(hidden)))": (
        "self.mixed(hidden)\n\n"
        "    def mixed(self, hidden):\n"
        "        weight, chosen = self.gate(hidden).softmax(-1).max(-1)\n"
        "        out = torch.zeros_like(hidden)\n"
        "        for number in chosen.unique().tolist():\n"
        "            met = chosen == number\n"
        "            out[met] = self.experts[number](hidden[met]) * weight[met][:, None]\n"
        "        return out"
    ),
}
"""A model with its own code. Each token runs one of 256 modules, so that some modules run for no token."""


def write_folder(folder: Path, replaced: dict[str, str] | None = None, **config: object) -> Path:
    """Writes code, configuration and weights. replaced: parts of the code → their replacements."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    files = {
        "config.json": json.dumps({"model_type": "own_of_the_tests", "auto_map": code, **config}),
        "configuration_own.py": CONFIGURATION,
        "modeling_own.py": MODEL,
    }
    for old in replaced or {}:
        assert any(old in text for text in files.values()), old
    for name, text in files.items():
        for old, new in (replaced or {}).items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(loaded, trust_remote_code=True).save_pretrained(folder)
    return folder
