"""OPT, BLOOM and gpt-oss create masks without `position_ids`: packed documents attend to each other."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

FIRST, SECOND = 5, 7
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
CONFIGS = {
    "llama": {**SIZES, "intermediate_size": 48},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 1},
}


@torch.no_grad()
def change(model_type: str) -> float:
    """How much the logits of the second document change with the tokens of the first one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=64, pad_token_id=0, **CONFIGS[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
    second, logits = torch.randint(1, 64, (1, SECOND)), []
    for _ in range(2):
        tokens = torch.cat([torch.randint(1, 64, (1, FIRST)), second], dim=1)
        logits.append(model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, FIRST:])
    return (logits[1] - logits[0]).abs().max().item()


changes = {model_type: change(model_type) for model_type in CONFIGS}
for model_type, value in changes.items():
    print(f"{model_type}: logits of the second document change by {value:.1e} with the first document")
assert changes.pop("llama") == 0
if not all(changes.values()):
    raise SystemExit("documents are kept apart: the fault is mended")
