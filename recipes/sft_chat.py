"""Fine-tunes the model of `recipes/tiny.py` to answer questions, in less than four minutes on two cores, offline.

The questions are about Python's standard library, and its docstrings answer them. Run `recipes/tiny.py` first. With
`--nproc 2` it took 375 seconds of processor time on two busy cores of an AMD EPYC, with its data.

    llmtrain train recipes/tiny.py
    llmtrain train recipes/sft_chat.py
    llmtrain generate runs/sft_chat --chat --temperature 0

A model of this size learns the form, not the facts: an answer in a sentence, then the arguments of a function if asked.
"""

from llmtrain import (
    BatchConfig,
    CheckpointConfig,
    Cluster,
    DataConfig,
    EvalConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    Source,
    TrainConfig,
    main,
)

WEIGHTS = "runs/tiny/export"


def recipe() -> Recipe:
    """Some thousand conversations, packed; only the answers are trained on."""
    return Recipe(
        name="sft_chat",
        model=ModelConfig(pretrained=WEIGHTS),
        data=DataConfig(
            sources=[Source("stdlib_chat")],
            tokenizer=WEIGHTS,
            chat_template="plain",
            sequence_length=256,
            eval_fraction=0.03,
        ),
        optim=OptimConfig(lr=2e-3, schedule="cosine", warmup_steps=20, min_lr_ratio=0.1),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(epochs=3),
        evaluation=EvalConfig(every_steps=100, max_sequences=64),
        checkpoint=CheckpointConfig(every_steps=100, keep_last=2),
        logging=LoggingConfig(every_steps=10),
    )


def recipe_verify() -> Recipe:
    """Small, with a model and a tokenizer of its own: `llmtrain verify recipes/sft_chat.py --nproc 2`."""
    return recipe().with_(
        **{
            "model": architecture(),
            "model.config.hidden_size": 64,
            "model.config.intermediate_size": 128,
            "model.config.vocab_size": 512,
            "data.tokenizer": {"vocab_size": 512},
            "data.chat_template": "chatml",
            "optim.clip_grad_norm": 0.5,
            "optim.warmup_steps": 2,
            "train.max_steps": 10,
            "train.epochs": None,
        }
    )


def architecture() -> ModelConfig:
    """Returns the same model as an architecture, so that it can be planned before `recipes/tiny.py` has run."""
    return ModelConfig(
        architecture="llama",
        config={
            "vocab_size": 4096,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    )


def cluster() -> Cluster:
    """One CPU worker."""
    return Cluster()


if __name__ == "__main__":
    main(recipe)
