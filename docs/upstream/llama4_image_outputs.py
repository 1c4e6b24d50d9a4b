"""The forward pass of a multimodal Llama 4 fails: it reads a field that the output of its causal LM does not have."""

import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration

TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 32, "patch_size": 8, "projector_input_dim": 32, "projector_output_dim": 32},
    "vision_output_dim": 32,
}

config = Llama4Config(text_config=TEXT, vision_config=VISION, image_token_index=3)
model = Llama4ForConditionalGeneration(config)
try:
    model(input_ids=torch.tensor([[4, 5, 6]]))
except AttributeError as error:
    print(f"a text of three tokens: AttributeError: {error}")
else:
    raise SystemExit("the forward pass runs: the fault is mended")
