import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain.cluster import Cluster
from llmtrain.plan import Plan, resolve
from llmtrain.recipe import BatchConfig, DataConfig, ModelConfig, OptimConfig, Recipe, Source, TrainConfig
from llmtrain.run_dir import RunDir

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts that the tests start import the package that is tested."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run with spaces")
    run.logs.mkdir(parents=True)
    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a worker script."""
    count: Iterator[int] = iter(range(100))

    def write(body: str) -> Path:
        path = tmp_path / f"worker_{next(count)}.py"
        path.write_text(textwrap.dedent(body))
        return path

    return write


MODEL = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 128, "vocab_size": 256},
}


@pytest.fixture
def plan() -> Plan:
    recipe = Recipe(
        name="small",
        model=ModelConfig(architecture="llama", config=MODEL),
        data=DataConfig(sources=[Source("stdlib")], tokenizer="somewhere", sequence_length=128),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(max_steps=100),
    )
    plan = resolve(recipe, Cluster(devices_per_node=2))
    return plan.model_copy(update={"flops_per_token": 6000.0})
