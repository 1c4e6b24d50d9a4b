"""Fine-tunes gpt-oss-20b on conversations with LoRA, also of its experts.

The published weights of the experts are MXFP4, which are read as bf16. Rank, scale, learning rate and schedule are
those of OpenAI's cookbook (developers.openai.com/cookbook/articles/gpt-oss/fine-tune-transfomers), which adapts the
experts of three layers; here all are adapted.

    llmtrain train recipes/sft_gpt_oss_20b_lora.py --nproc 8
    llmtrain export runs/sft_gpt_oss_20b_lora merged --merge
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

WEIGHTS = "openai/gpt-oss-20b"
ADAPTER = LoraConfig(rank=8, alpha=16, target_parameters=("experts.gate_up_proj", "experts.down_proj"))


def recipe() -> Recipe:
    """20.9 billion frozen parameters on one node; one epoch of Tulu 3's mixture.

    Of the fastest plans that `llmtrain plan --search` predicts, the simplest.
    """
    return Recipe(
        name="sft_gpt_oss_20b_lora",
        model=ModelConfig(pretrained=WEIGHTS, adapter=ADAPTER, attention="varlen"),
        data=DataConfig(
            sources=[Source("allenai/tulu-3-sft-mixture", format="messages")],
            tokenizer=WEIGHTS,
            sequence_length=4096,
            faulty_rows="drop",
        ),
        optim=OptimConfig(
            lr=2e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="cosine", warmup_steps=100, min_lr_ratio=0.1
        ),
        batch=BatchConfig(global_batch_size=64, micro_batch_size=2),
        parallel=ParallelConfig(zero_stage=1, precision="bf16"),
        kernels=KernelsConfig(loss="compiled"),
        train=TrainConfig(epochs=1),
        evaluation=EvalConfig(every_steps=200, max_sequences=512),
        checkpoint=CheckpointConfig(every_steps=200, keep_last=2),
    )


def recipe_1gpu() -> Recipe:
    """One device: the frozen weights are stored in 4 bits."""
    return recipe().with_(**{"model.quantize": "nf4"})


def architecture() -> ModelConfig:
    """Returns the same model as an architecture, so that it can be planned without its files."""
    return ModelConfig(
        architecture="gpt_oss",
        config={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
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
