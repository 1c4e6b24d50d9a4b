"""A Llama of 1.1 billion parameters on educational web text and code, in a ratio of seven to three.

Sizes, batch size and learning rate: TinyLlama (arXiv 2401.02385): 2M tokens per step, 4e-4 decaying to a tenth, 2000
steps of warm-up. The data are newer: FineWeb-Edu (arXiv 2406.17557) and StarCoder's (arXiv 2305.06161).

    llmtrain train recipes/llama_1b.py
    llmtrain train recipes/llama_1b.py:64gpu --hostfile hosts
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


def recipe() -> Recipe:
    """1,100,048,384 parameters on one node; 100 billion tokens.

    The fastest plan that `llmtrain plan --search` predicts: attention skips other documents, and layers and loss are
    compiled. ZeRO 2 reduces gradients during the backward pass.
    """
    return Recipe(
        name="llama_1b",
        model=ModelConfig(
            architecture="llama",
            attention="varlen",
            config={
                "vocab_size": 32000,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 22,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                "tie_word_embeddings": False,
            },
        ),
        data=DataConfig(
            sources=[
                Source("HuggingFaceFW/fineweb-edu", subset="sample-100BT", weight=0.7),
                Source("bigcode/starcoderdata", text_column="content", weight=0.3),
            ],
            tokenizer="TinyLlama/TinyLlama_v1.1",
            sequence_length=2048,
            eval_fraction=0.0005,
        ),
        optim=OptimConfig(lr=4e-4, weight_decay=0.1, schedule="cosine", warmup_steps=2000, min_lr_ratio=0.1),
        batch=BatchConfig(global_batch_size=1024, micro_batch_size=16),
        parallel=ParallelConfig(zero_stage=2, precision="bf16"),
        kernels=KernelsConfig(blocks="compiled", loss="compiled"),
        train=TrainConfig(max_steps=47_684),
        evaluation=EvalConfig(every_steps=1000, max_sequences=2048),
        checkpoint=CheckpointConfig(every_steps=1000, keep_last=3),
        export=ExportConfig(sample_prompt="The capital of France"),
    )


def recipe_64gpu() -> Recipe:
    """The same batch with one micro-batch per device, behind which ZeRO 3 hides the gathering of weights."""
    return recipe().with_(**{"parallel.zero_stage": 3})


def recipe_wsd() -> Recipe:
    """A warm-up-stable-decay schedule, whose stable phase can be extended later (arXiv 2404.06395)."""
    return recipe().with_(**{"optim.schedule": "wsd", "optim.decay_steps": 4_768, "optim.min_lr_ratio": 0.0})


def cluster() -> Cluster:
    """One node with eight devices."""
    return Cluster(devices_per_node=8, device="h100")


def cluster_64gpu() -> Cluster:
    """Eight nodes with eight devices each."""
    return Cluster(nodes=8, devices_per_node=8, device="h100")


if __name__ == "__main__":
    main(recipe)
