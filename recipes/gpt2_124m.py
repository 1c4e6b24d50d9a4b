"""GPT-2 (124M) on 10 billion tokens of FineWeb, as reproduced by llm.c.

Sizes: huggingface.co/openai-community/gpt2. Batch size, learning rate and sequence length: github.com/karpathy/llm.c,
discussion 481 (0.5M tokens per step, 6e-4, 700 steps of warm-up, decay to 0, no dropout; 90 minutes on 8 A100).

    llmtrain train recipes/gpt2_124m.py
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
    """124,439,808 parameters on one node.

    The fastest plan that `llmtrain plan --search` predicts: layers and loss are compiled, and ZeRO 2 reduces gradients
    during the backward pass.
    """
    return Recipe(
        name="gpt2_124m",
        model=ModelConfig(
            architecture="gpt2",
            config={
                "vocab_size": 50257,
                "n_positions": 1024,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
        data=DataConfig(
            sources=[Source("HuggingFaceFW/fineweb", subset="sample-10BT")],
            tokenizer="openai-community/gpt2",
            sequence_length=1024,
            # GPT-2 was trained on one stream of text in which attention crosses documents.
            packing="concat",
            mask_documents=False,
            eval_fraction=0.001,
        ),
        optim=OptimConfig(lr=6e-4, weight_decay=0.1, schedule="cosine", warmup_steps=700),
        batch=BatchConfig(global_batch_size=512, micro_batch_size=64),
        parallel=ParallelConfig(zero_stage=2, precision="bf16"),
        kernels=KernelsConfig(blocks="compiled", loss="compiled"),
        train=TrainConfig(max_steps=18_865),
        evaluation=EvalConfig(every_steps=250, max_sequences=10_240),
        checkpoint=CheckpointConfig(every_steps=2_000, keep_last=3),
        export=ExportConfig(sample_prompt="The meaning of life is"),
    )


def recipe_350m() -> Recipe:
    """GPT-2 medium, 354,823,168 parameters; llm.c trains it at half the learning rate on 30 billion tokens."""
    sizes = {"model.config.n_embd": 1024, "model.config.n_layer": 24, "model.config.n_head": 16}
    return recipe().with_(
        name="gpt2_350m",
        **sizes,
        **{"data.sources.0.subset": "sample-100BT", "optim.lr": 3e-4, "train.max_steps": 60_000},
        **{"batch.micro_batch_size": 32},
    )


def recipe_1gpu() -> Recipe:
    """The same run, step by step, on one device."""
    return recipe().with_(**{"batch.micro_batch_size": 128})


def cluster() -> Cluster:
    """One node with eight devices."""
    return Cluster(devices_per_node=8, device="a100")


def cluster_1gpu() -> Cluster:
    """One device."""
    return Cluster(device="a100")


if __name__ == "__main__":
    main(recipe)
