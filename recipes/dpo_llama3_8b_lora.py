"""Aligns Llama 3.1 8B Instruct with preferences, by DPO with LoRA.

The weights and their tokenizer require accepting a licence. Data and β: Zephyr (arXiv 2310.16944), section 4.3, which
trains all weights at 5e-7; the learning rate of the adapter is ten times that. To continue from an adapter of
`recipes/sft_llama3_8b_lora.py`, set `model.adapter` to `LoraConfig(pretrained="runs/sft_llama3_8b_lora/export")`; it is
then the reference, too.

    llmtrain train recipes/dpo_llama3_8b_lora.py --nproc 8
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
    ObjectiveConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
    main,
)

WEIGHTS = "meta-llama/Llama-3.1-8B-Instruct"
ADAPTER = LoraConfig(rank=64, alpha=64, dropout=0.0)


def recipe() -> Recipe:
    """8 billion frozen parameters, 168 million trained ones, on one node; one epoch of UltraFeedback.

    One of the fastest plans that `llmtrain plan --search` predicts: attention skips other documents, and layers are
    compiled. No activation is computed again.
    """
    return Recipe(
        name="dpo_llama3_8b_lora",
        model=ModelConfig(pretrained=WEIGHTS, adapter=ADAPTER, attention="varlen"),
        data=DataConfig(
            sources=[Source("HuggingFaceH4/ultrafeedback_binarized", split="train_prefs", format="preference")],
            tokenizer=WEIGHTS,
            sequence_length=4096,
            faulty_rows="drop",
        ),
        objective=ObjectiveConfig(name="dpo", beta=0.1),
        optim=OptimConfig(lr=5e-6, betas=(0.9, 0.999), weight_decay=0.0, schedule="linear", warmup_steps=50),
        batch=BatchConfig(global_batch_size=32, micro_batch_size=2),
        parallel=ParallelConfig(zero_stage=2, precision="bf16"),
        kernels=KernelsConfig(blocks="compiled"),
        train=TrainConfig(epochs=1),
        evaluation=EvalConfig(every_steps=100, max_sequences=256),
        checkpoint=CheckpointConfig(every_steps=100, keep_last=2),
    )


def recipe_1gpu() -> Recipe:
    """One device."""
    return recipe().with_(**{"parallel.zero_stage": 1})


def architecture() -> ModelConfig:
    """Returns the same model as an architecture, so that it can be planned without its files."""
    return ModelConfig(
        architecture="llama",
        config={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
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
