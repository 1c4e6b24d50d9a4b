"""A small plan, for tests that read a plan but do not train."""

from llmtrain.plan import Plan
from llmtrain.plan.rules import resolve
from llmtrain.recipe import BatchConfig, DataConfig, ModelConfig, OptimConfig, Recipe, Source, TrainConfig
from llmtrain.recipe.cluster import Cluster

MODEL = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 128, "vocab_size": 256},
}


def small_plan(**fields: object) -> Plan:
    """Returns a plan for two ranks whose run is never started. fields: of its recipe."""
    recipe = Recipe(
        name="small",
        model=ModelConfig(architecture="llama", config=MODEL),
        data=DataConfig(sources=[Source("stdlib")], tokenizer="somewhere", sequence_length=128),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(max_steps=100),
    )
    plan = resolve(recipe.with_(**fields), Cluster(devices_per_node=2))
    return plan.model_copy(update={"flops_per_token": 6000.0})
