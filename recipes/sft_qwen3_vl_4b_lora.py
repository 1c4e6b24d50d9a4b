"""Fine-tunes Qwen3-VL 4B Instruct on conversations with images, with LoRA.

The tower that reads images stays as it is. Rows have a list of `messages`, whose contents are parts of text and images,
and a column of `images`. Needs Pillow: `pip install 'llmtrain[images]'`.

    llmtrain train recipes/sft_qwen3_vl_4b_lora.py --nproc 8
"""

from llmtrain import (
    BatchConfig,
    CheckpointConfig,
    Cluster,
    DataConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
    main,
)

WEIGHTS = "Qwen/Qwen3-VL-4B-Instruct"
ADAPTER = LoraConfig(rank=64, alpha=64)


def recipe() -> Recipe:
    """Adapters of the text model's linear layers, on one node; one epoch of LLaVA's conversations about images."""
    return Recipe(
        name="sft_qwen3_vl_4b_lora",
        model=ModelConfig(pretrained=WEIGHTS, images=True, adapter=ADAPTER),
        data=DataConfig(
            sources=[Source("HuggingFaceH4/llava-instruct-mix-vsft", format="messages")],
            tokenizer=WEIGHTS,
            sequence_length=4096,
            faulty_rows="drop",
        ),
        optim=OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="cosine", warmup_steps=100),
        batch=BatchConfig(global_batch_size=64, micro_batch_size=1),
        parallel=ParallelConfig(zero_stage=1, precision="bf16"),
        train=TrainConfig(epochs=1),
        evaluation=EvalConfig(every_steps=200, max_sequences=512),
        checkpoint=CheckpointConfig(every_steps=200, keep_last=2),
    )


def recipe_1gpu() -> Recipe:
    """One device."""
    return recipe().with_(**{"data.sequence_length": 2048})


def architecture() -> ModelConfig:
    """Returns the text model as an architecture, so that a plan without the tower can be made without its files."""
    return ModelConfig(
        architecture="qwen3",
        config={
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
        adapter=ADAPTER,
    )


def cluster() -> Cluster:
    """One node with eight devices."""
    return Cluster(devices_per_node=8, device="h100")


def cluster_1gpu() -> Cluster:
    """One device."""
    return Cluster(device="h100")


if __name__ == "__main__":
    main(recipe)
