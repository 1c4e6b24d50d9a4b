"""A Llama of 3.2 billion parameters on FineWeb-Edu: the largest that one device of 80 GB trains without offload.

Sizes: huggingface.co/meta-llama/Llama-3.2-3B (its tokenizer requires accepting a licence). Learning rate: that of The
Llama 3 Herd of Models (arXiv 2407.21783) for 8B, 3e-4 decaying to a hundredth, with fewer steps of warm-up.

    llmtrain train recipes/llama_3b.py
    llmtrain train recipes/llama_3b.py:1gpu
"""

from llmtrain import (
    BatchConfig,
    CheckpointConfig,
    Cluster,
    DataConfig,
    EvalConfig,
    KernelsConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
    main,
)


def recipe() -> Recipe:
    """3,212,749,824 parameters on one node; 64 billion tokens.

    The fastest plan that `llmtrain plan --search` predicts: attention skips other documents, and layers and loss are
    compiled. With ZeRO 2, larger micro-batches fit.
    """
    return Recipe(
        name="llama_3b",
        model=ModelConfig(
            architecture="llama",
            attention="varlen",
            config={
                "vocab_size": 128256,
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "num_hidden_layers": 28,
                "num_attention_heads": 24,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
                "tie_word_embeddings": True,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
            },
        ),
        data=DataConfig(
            sources=[Source("HuggingFaceFW/fineweb-edu", subset="sample-100BT")],
            tokenizer="meta-llama/Llama-3.2-3B",
            sequence_length=4096,
            eval_fraction=0.0005,
        ),
        optim=OptimConfig(lr=3e-4, weight_decay=0.1, schedule="cosine", warmup_steps=2000, min_lr_ratio=0.01),
        batch=BatchConfig(global_batch_size=512, micro_batch_size=4),
        parallel=ParallelConfig(zero_stage=2, precision="bf16"),
        kernels=KernelsConfig(blocks="compiled", loss="compiled"),
        train=TrainConfig(max_steps=30_518),
        evaluation=EvalConfig(every_steps=1000, max_sequences=1024),
        checkpoint=CheckpointConfig(every_steps=1000, keep_last=3),
    )


def recipe_1gpu() -> Recipe:
    """On one device nothing is sharded, so norms and activation functions are computed again to save memory."""
    return recipe().with_(**{"batch.micro_batch_size": 2, "parallel.activation_checkpointing": "selective"})


def cluster() -> Cluster:
    """One node with eight devices."""
    return Cluster(devices_per_node=8, device="h100")


def cluster_1gpu() -> Cluster:
    """One device."""
    return Cluster(devices_per_node=1, device="h100")


if __name__ == "__main__":
    main(recipe)
