"""Fine-tunes the text model of Gemma 4 31B on conversations: all its weights on one node, or LoRA on one device.

The published folder also has a vision tower, which stays as it is, and is part of the export. Learning rate, batch,
schedule and epochs are those of Tulu 3's SFT of 8B (arXiv 2411.15124), which took 2e-6 for 70B.

    llmtrain train recipes/sft_gemma4.py --nproc 8
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

WEIGHTS = "google/gemma-4-31B-it"


def recipe() -> Recipe:
    """30.7 billion parameters on one node; two epochs of Tulu 3's mixture.

    Of the fastest plans that `llmtrain plan --search` predicts, the one with the smallest traffic to host memory.
    """
    return Recipe(
        name="sft_gemma4",
        model=ModelConfig(pretrained=WEIGHTS),
        data=DataConfig(
            sources=[Source("allenai/tulu-3-sft-mixture", format="messages")],
            tokenizer=WEIGHTS,
            sequence_length=4096,
            faulty_rows="drop",
        ),
        optim=OptimConfig(lr=5e-6, betas=(0.9, 0.999), weight_decay=0.0, schedule="linear", warmup_steps=400),
        batch=BatchConfig(global_batch_size=128, micro_batch_size=1),
        parallel=ParallelConfig(
            zero_stage=3, precision="bf16", activation_checkpointing="selective", offload_optimizer="cpu"
        ),
        kernels=KernelsConfig(loss="compiled"),
        train=TrainConfig(epochs=2),
        evaluation=EvalConfig(every_steps=500, max_sequences=512),
        checkpoint=CheckpointConfig(every_steps=500, keep_last=2),
    )


def recipe_1gpu() -> Recipe:
    """One device: an adapter, on frozen weights in 4 bits."""
    return recipe().with_(
        **{"model.adapter": LoraConfig(rank=16, alpha=32), "model.quantize": "nf4", "optim.lr": 1e-4},
        **{"batch.micro_batch_size": 4, "parallel.zero_stage": 1, "parallel.offload_optimizer": "none"},
        **{"parallel.activation_checkpointing": "full"},
    )


def architecture() -> ModelConfig:
    """Returns the same model as an architecture, so that it can be planned without its files."""
    return ModelConfig(
        architecture="gemma4_text",
        config={
            "vocab_size": 262144,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
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
