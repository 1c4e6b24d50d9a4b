from pathlib import Path

import pytest

from llmtrain.cluster import Cluster
from llmtrain.plan.plan import Batch, Layout, ModelFacts, Plan
from llmtrain.recipe import BatchConfig, DataConfig, ModelConfig, OptimConfig, Recipe, Source, TrainConfig
from llmtrain.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    path = tmp_path / "run"
    path.mkdir()
    return RunDir(path)


@pytest.fixture
def plan() -> Plan:
    recipe = Recipe(
        name="small",
        model=ModelConfig(architecture="llama", config={"hidden_size": 64}),
        data=DataConfig(sources=[Source("stdlib")], tokenizer="somewhere", sequence_length=128),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(max_steps=100),
    )
    facts = ModelFacts(
        model_type="llama",
        parameters=1000,
        active_parameters=1000,
        embedding_parameters=100,
        layers=2,
        hidden_size=64,
        heads=4,
        kv_heads=4,
        head_dim=16,
        vocab_size=256,
        max_positions=128,
        tied_embeddings=True,
        source="arithmetic",
    )
    return Plan(
        recipe=recipe,
        cluster=Cluster(devices_per_node=2),
        layout=Layout(dp=2, pp=1, tp=1, sp=1, ep=1, zero_stage=0),
        batch=Batch(global_batch_size=8, micro_batch_size=2, gradient_accumulation_steps=2, tokens_per_step=1024),
        model=facts,
        flops_per_token=6000.0,
    )
