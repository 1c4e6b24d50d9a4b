"""Fine-tunes Llama 3.1 8B Instruct on conversations with LoRA.

The weights and their tokenizer require accepting a licence. Rank, scale, dropout, targets, learning rate and clipping:
QLoRA (arXiv 2305.14314), appendix B.2, whose frozen weights are quantized; here they are bf16.

    llmtrain train recipes/sft_llama3_8b_lora.py --nproc 8
    llmtrain export runs/sft_llama3_8b_lora merged --merge
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

WEIGHTS = "meta-llama/Llama-3.1-8B-Instruct"
ADAPTER = LoraConfig(rank=64, alpha=16, dropout=0.1)


def recipe() -> Recipe:
    """8 billion frozen parameters, 168 million trained ones, on one node; one epoch of Tulu 3's mixture.

    The fastest plan that `llmtrain plan --search` predicts: attention skips other documents, and layers and loss
    are compiled. ZeRO 3 shards the frozen parameters, too, so that larger micro-batches fit.
    """
    return Recipe(
        name="sft_llama3_8b_lora",
        model=ModelConfig(pretrained=WEIGHTS, adapter=ADAPTER, attention="varlen"),
        data=DataConfig(
            sources=[Source("allenai/tulu-3-sft-mixture", format="messages")],
            tokenizer=WEIGHTS,
            sequence_length=4096,
            faulty_rows="drop",
        ),
        optim=OptimConfig(
            lr=2e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="cosine", warmup_steps=100, clip_grad_norm=0.3
        ),
        batch=BatchConfig(global_batch_size=64, micro_batch_size=2),
        parallel=ParallelConfig(zero_stage=3, precision="bf16"),
        kernels=KernelsConfig(blocks="compiled", loss="compiled"),
        train=TrainConfig(epochs=1),
        evaluation=EvalConfig(every_steps=200, max_sequences=512),
        checkpoint=CheckpointConfig(every_steps=200, keep_last=2),
    )


def recipe_1gpu() -> Recipe:
    """One device."""
    return recipe().with_(**{"batch.micro_batch_size": 1, "parallel.zero_stage": 1})


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
