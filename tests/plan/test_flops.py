"""The counted floating point operations equal those that torch counts."""

from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.flops import flops_per_token, matmul_parameters
from llmtrain.recipe import ModelConfig

CONFIG = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def counted(config: dict, length: int) -> int:
    """FLOPs of forward and backward per token, as torch counts them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM._from_config(LlamaConfig(**config), attn_implementation="eager")
    tokens = torch.zeros(2, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return counter.get_total_flops() / tokens.numel()


def test_counted_flops_equal_those_of_torch():
    for tied in (True, False):
        config = {**CONFIG, "tie_word_embeddings": tied}
        facts = model_facts(ModelConfig(architecture="llama", config=config), None)
        for length in (16, 64):
            # Norms are in N and the rotary table is in torch's count: a small difference each.
            assert abs(flops_per_token(facts, length) / counted(config, length) - 1) < 0.015


def test_embedding_lookups_cost_no_flops():
    tied = model_facts(ModelConfig(architecture="llama", config={**CONFIG, "tie_word_embeddings": True}), None)
    untied = model_facts(ModelConfig(architecture="llama", config=CONFIG), None)
    assert matmul_parameters(tied) == matmul_parameters(untied) == untied.parameters - 96 * 32
    gpt2 = model_facts(ModelConfig(architecture="gpt2", config={"vocab_size": 50257}), None)
    assert matmul_parameters(gpt2) == 124_439_808 - 1024 * 768


def test_only_active_experts_count():
    config = {"vocab_size": 64, "num_experts_per_tok": 2}
    few = model_facts(ModelConfig(architecture="mixtral", config={**config, "num_local_experts": 4}), None)
    many = model_facts(ModelConfig(architecture="mixtral", config={**config, "num_local_experts": 8}), None)
    # Twice the experts cost only the router's rows for them.
    assert matmul_parameters(many) - matmul_parameters(few) == 4 * 4096 * 32
