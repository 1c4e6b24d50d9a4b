import pytest

from llmtrain.recipe import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    Source,
    TrainConfig,
    TrainedTokenizer,
)


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    """The recipe that the tests change one thing of."""
    return Recipe(
        name="tiny",
        model=ModelConfig(
            architecture="llama",
            config={
                "hidden_size": 192,
                "intermediate_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            },
        ),
        data=DataConfig(sources=[Source("stdlib")], tokenizer=TrainedTokenizer(vocab_size=4096), sequence_length=256),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=16, micro_batch_size=8),
        train=TrainConfig(max_steps=10),
    )
