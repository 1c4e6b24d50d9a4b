"""Fine-tunes the text model of Qwen3.5-35B-A3B on conversations with LoRA, also of its 256 experts.

The published folder also has a vision tower, which stays as it is, and is part of the export. The learning rate is
QLoRA's for models of this size (arXiv 2305.14314, appendix B.2).

    llmtrain train recipes/sft_qwen3_5_moe_lora.py --nproc 8
    llmtrain export runs/sft_qwen3_5_moe_lora merged --merge
"""

from llmtrain import (
    BatchConfig,
    CheckpointConfig,
    Cluster,
    DataConfig,
    EvalConfig,
    KernelsConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
    main,
)

WEIGHTS = "Qwen/Qwen3.5-35B-A3B"
ADAPTER = LoraConfig(rank=16, alpha=32, target_parameters=("experts.gate_up_proj", "experts.down_proj"))


def recipe() -> Recipe:
    """34.7 billion frozen parameters on one node; one epoch of Tulu 3's mixture.

    The fastest plan that `llmtrain plan --search` predicts: ZeRO 3 shards the frozen parameters, too.
    """
    return Recipe(
        name="sft_qwen3_5_moe_lora",
        model=ModelConfig(pretrained=WEIGHTS, adapter=ADAPTER, attention="varlen"),
        data=DataConfig(
            sources=[Source("allenai/tulu-3-sft-mixture", format="messages")],
            tokenizer=WEIGHTS,
            sequence_length=4096,
            faulty_rows="drop",
        ),
        optim=OptimConfig(
            lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="cosine", warmup_steps=100, min_lr_ratio=0.1
        ),
        batch=BatchConfig(global_batch_size=64, micro_batch_size=2),
        parallel=ParallelConfig(zero_stage=3, precision="bf16"),
        kernels=KernelsConfig(loss="compiled"),
        train=TrainConfig(epochs=1),
        evaluation=EvalConfig(every_steps=200, max_sequences=512),
        checkpoint=CheckpointConfig(every_steps=200, keep_last=2),
    )


def recipe_1gpu() -> Recipe:
    """One device: the frozen weights are stored in 4 bits, and the optimizer's states are in host memory."""
    return recipe().with_(
        **{"model.quantize": "nf4", "parallel.zero_stage": 1, "parallel.offload_optimizer": "cpu"},
    )


def architecture() -> ModelConfig:
    """Returns the same model as an architecture, so that it can be planned without its files."""
    return ModelConfig(
        architecture="qwen3_5_moe_text",
        config={
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        },
    )


def cluster() -> Cluster:
    """One node with eight devices."""
    return Cluster(devices_per_node=8, device="h100")


def cluster_1gpu() -> Cluster:
    """One device."""
    return Cluster(device="h100")


if __name__ == "__main__":
    main(recipe)
