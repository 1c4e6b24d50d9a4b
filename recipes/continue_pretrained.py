"""Continues training of published weights, from the hub or a local folder, on further text.

    llmtrain train recipes/continue_pretrained.py
    llmtrain train recipes/continue_pretrained.py --set model.pretrained=/models/mine --set data.tokenizer=/models/mine

Learning rate: it warms up again to a fraction of the original peak and then decays again (arXiv 2403.08763).
"""

from llmtrain import (
    BatchConfig,
    CheckpointConfig,
    Cluster,
    DataConfig,
    EvalConfig,
    ExportConfig,
    KernelsConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
    main,
)

WEIGHTS = "Qwen/Qwen3-0.6B-Base"


def recipe() -> Recipe:
    """Qwen3 0.6B on 5 billion tokens of mathematical text from the web (arXiv 2310.06786).

    The fastest plan that `llmtrain plan --search` predicts: attention skips other documents, and layers and loss
    are compiled. ZeRO 2 reduces gradients during the backward pass.
    """
    return Recipe(
        name="continue_pretrained",
        model=ModelConfig(pretrained=WEIGHTS, attention="varlen"),
        data=DataConfig(
            sources=[Source("open-web-math/open-web-math")],
            tokenizer=WEIGHTS,
            sequence_length=4096,
            eval_fraction=0.001,
        ),
        optim=OptimConfig(lr=3e-5, weight_decay=0.1, schedule="cosine", warmup_steps=200, min_lr_ratio=0.1),
        batch=BatchConfig(global_batch_size=256, micro_batch_size=8),
        parallel=ParallelConfig(zero_stage=2, precision="bf16"),
        kernels=KernelsConfig(blocks="compiled", loss="compiled"),
        train=TrainConfig(max_steps=4_768),
        evaluation=EvalConfig(every_steps=250, max_sequences=512),
        checkpoint=CheckpointConfig(every_steps=500, keep_last=3),
        export=ExportConfig(sample_prompt="Theorem. "),
    )


def recipe_1gpu() -> Recipe:
    """The same run on one device."""
    return recipe().with_(**{"parallel.zero_stage": 1})


def architecture() -> ModelConfig:
    """Returns the same model as an architecture, so that it can be planned without access to the hub."""
    return ModelConfig(
        architecture="qwen3",
        config={
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
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
