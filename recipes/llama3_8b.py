"""Llama 3 8B from scratch on FineWeb-Edu.

Sizes: huggingface.co/meta-llama/Meta-Llama-3-8B (its tokenizer requires accepting a licence). Learning rate and batch
size: The Llama 3 Herd of Models (arXiv 2407.21783): peak 3e-4 (table 3), 8000 steps of warm-up, cosine decay to a
hundredth, 4M tokens per step, no attention across documents (sections 3.2 and 3.4.1).

    llmtrain train recipes/llama3_8b.py --hostfile hosts
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
    """8,030,261,248 parameters on eight nodes; 1 trillion tokens.

    The fastest plan that `llmtrain plan --search` predicts: attention skips other documents, and layers and loss are
    compiled. With ZeRO 2 all activations fit, so none is computed again.
    """
    return Recipe(
        name="llama3_8b",
        model=ModelConfig(
            architecture="llama",
            attention="varlen",
            config={
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
                "tie_word_embeddings": False,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
            },
        ),
        data=DataConfig(
            sources=[Source("HuggingFaceFW/fineweb-edu")],
            tokenizer="meta-llama/Meta-Llama-3-8B",
            sequence_length=8192,
            eval_fraction=0.0001,
        ),
        optim=OptimConfig(lr=3e-4, weight_decay=0.1, schedule="cosine", warmup_steps=8000, min_lr_ratio=0.01),
        batch=BatchConfig(global_batch_size=512, micro_batch_size=1),
        parallel=ParallelConfig(zero_stage=2, precision="bf16"),
        kernels=KernelsConfig(blocks="compiled", loss="compiled"),
        train=TrainConfig(max_steps=238_419),
        evaluation=EvalConfig(every_steps=1000, max_sequences=1024),
        checkpoint=CheckpointConfig(every_steps=1000, keep_last=3),
    )


def recipe_8gpu() -> Recipe:
    """One node, with ZeRO 3: parameters are sharded too."""
    return recipe().with_(**{"parallel.zero_stage": 3})


def recipe_offload() -> Recipe:
    """One device: optimizer states are kept in host memory, and norms and activation functions are computed again."""
    return recipe().with_(
        **{"parallel.zero_stage": 1, "parallel.offload_optimizer": "cpu"},
        **{"parallel.activation_checkpointing": "selective"},
    )


def cluster() -> Cluster:
    """Eight nodes with eight devices each."""
    return Cluster(nodes=8, devices_per_node=8, device="h100")


def cluster_8gpu() -> Cluster:
    """One node with eight devices."""
    return Cluster(devices_per_node=8, device="h100")


def cluster_offload() -> Cluster:
    """One device."""
    return Cluster(device="h100")


if __name__ == "__main__":
    main(recipe)
