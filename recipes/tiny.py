"""A small Llama on the source text of Python's own standard library: a complete run in minutes, offline.

Data, tokenizer and model are created locally. Any machine will do; neither a GPU nor the hub is needed.

    llmtrain train recipes/tiny.py
"""

from llmtrain import (
    BatchConfig,
    CheckpointConfig,
    Cluster,
    DataConfig,
    EvalConfig,
    ExportConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    Source,
    TrainConfig,
    TrainedTokenizer,
    main,
)


def recipe() -> Recipe:
    """2.4 million parameters and about a million tokens."""
    return Recipe(
        name="tiny",
        model=ModelConfig(
            architecture="llama",
            config={
                "hidden_size": 192,
                "intermediate_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            },
        ),
        data=DataConfig(
            sources=[Source("stdlib")],
            tokenizer=TrainedTokenizer(vocab_size=4096),
            sequence_length=256,
            eval_fraction=0.03,
        ),
        optim=OptimConfig(lr=4e-3, schedule="cosine", warmup_steps=40, min_lr_ratio=0.1),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(max_steps=300),
        evaluation=EvalConfig(every_steps=100, max_sequences=64),
        checkpoint=CheckpointConfig(every_steps=100, keep_last=2),
        logging=LoggingConfig(every_steps=10),
        export=ExportConfig(sample_prompt="    def __init__(self"),
    )


def recipe_zero3() -> Recipe:
    """With parameters, gradients and optimizer states sharded."""
    return recipe().with_(**{"parallel.zero_stage": 3})


def recipe_bf16() -> Recipe:
    """bf16 weights with fp32 master weights, which the engine keeps with ZeRO 1 and above."""
    return recipe().with_(**{"parallel.zero_stage": 1, "parallel.precision": "bf16"})


def recipe_verify() -> Recipe:
    """Small enough to be trained dozens of times: `llmtrain verify recipes/tiny.py --nproc 4`."""
    return recipe().with_(
        **{
            "model.config.hidden_size": 64,
            "model.config.intermediate_size": 128,
            "model.config.num_hidden_layers": 4,
            "model.config.num_attention_heads": 8,
            "model.config.num_key_value_heads": 4,
            "data.tokenizer": {"vocab_size": 512},
            "data.sequence_length": 64,
            "optim.clip_grad_norm": 0.5,
            "optim.warmup_steps": 2,
            "train.max_steps": 10,
        }
    )


def recipe_moe() -> Recipe:
    """A mixture of experts with its load balancing loss: `llmtrain verify recipes/tiny.py:moe --nproc 2`."""
    return recipe_verify().with_(
        **{
            "model": {
                "architecture": "qwen3_moe",
                "config": {
                    "hidden_size": 64,
                    "moe_intermediate_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 8,
                    "num_experts": 8,
                    "num_experts_per_tok": 2,
                    "norm_topk_prob": True,
                    "output_router_logits": True,
                    "max_position_embeddings": 256,
                    "tie_word_embeddings": True,
                },
            },
            "optim.lr": 2e-3,
        }
    )


def cluster() -> Cluster:
    """One CPU worker."""
    return Cluster()


if __name__ == "__main__":
    main(recipe)
