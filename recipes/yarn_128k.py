"""Extends published weights from 32k to 128k tokens of context with YaRN, on whole books.

    llmtrain train recipes/yarn_128k.py
    llmtrain train recipes/yarn_128k.py --set model.pretrained=/models/mine --set data.tokenizer=/models/mine

Positions: factor 4 on 32,768, as the model card of Qwen3 gives it for inference; training adapts the weights to it.
Number of steps: as in YaRN's paper (arXiv 2309.00071). Batch size and learning rate: ProLong (arXiv 2410.02660), as in
`llama3_8b_long`. docs/guides/long_context.md explains what to choose for other weights, and how to examine the result.
"""

from llmtrain import (
    BatchConfig,
    CheckpointConfig,
    Cluster,
    DataConfig,
    EvalConfig,
    ExportConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
    main,
)

WEIGHTS = "Qwen/Qwen3-8B-Base"
TRAINED_FOR = 32768
"""Length of the sequences of the last stage of pretraining."""


def positions(length: int) -> dict[str, object]:
    """Returns the fields of the model's configuration that extend its context to some number of tokens."""
    yarn = {"rope_type": "yarn", "factor": length / TRAINED_FOR, "original_max_position_embeddings": TRAINED_FOR}
    return {"rope_parameters": {**yarn, "rope_theta": 1000000.0}, "max_position_embeddings": length}


def recipe() -> Recipe:
    """Qwen3 8B with sequences of 128k tokens, each shared by the eight devices of a node, for 2 billion tokens.

    The fastest plan that `llmtrain plan --search` predicts.
    """
    return Recipe(
        name="yarn_128k",
        model=ModelConfig(pretrained=WEIGHTS, attention="varlen", config=positions(131072)),
        data=DataConfig(
            sources=[Source("emozilla/pg19")], tokenizer=WEIGHTS, sequence_length=131072, eval_fraction=0.005
        ),
        optim=OptimConfig(lr=1e-5, weight_decay=0.1, schedule="cosine", warmup_steps=48, min_lr_ratio=0.1),
        batch=BatchConfig(global_batch_size=32, micro_batch_size=1),
        parallel=ParallelConfig(zero_stage=2, precision="bf16", sequence=8, activation_checkpointing="selective"),
        train=TrainConfig(max_steps=477),
        evaluation=EvalConfig(every_steps=50, max_sequences=64),
        checkpoint=CheckpointConfig(every_steps=100, keep_last=3),
        export=ExportConfig(sample_prompt="Chapter I. "),
    )


def recipe_64k() -> Recipe:
    """To 64k tokens: factor 2, twice the sequences in a step, each shared by four devices."""
    return recipe().with_(
        name="yarn_64k",
        **{"model.config": positions(65536), "data.sequence_length": 65536, "batch.global_batch_size": 64},
        **{"parallel.sequence": 4},
    )


def architecture() -> ModelConfig:
    """Returns the same model as an architecture, so that it can be planned without access to the hub."""
    return ModelConfig(
        architecture="qwen3",
        config={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
            **positions(131072),
        },
    )


def cluster() -> Cluster:
    """Four nodes with eight devices each."""
    return Cluster(nodes=4, devices_per_node=8, device="h100")


if __name__ == "__main__":
    main(recipe)
