"""The recipes that ship."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.errors import RecipeError
from llmtrain.plan.axes import model_parallel_size
from llmtrain.plan.load import PythonRecipe, declared, load_recipe, shipped_recipes
from llmtrain.plan.predict import memory_shortage
from llmtrain.plan.predict.time import predict
from llmtrain.plan.rules import resolve
from llmtrain.plan.search.cheapest import EQUAL
from llmtrain.plan.search.search import search_plans
from llmtrain.recipe.cluster import Cluster
from tools.configurations import declared_facts

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
# As published with the weights.
PARAMETERS = {
    "gpt2_124m": 124_439_808,
    "gpt2_124m:350m": 354_823_168,
    "llama_1b": 1_100_048_384,
    "llama_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_long": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_30b_a3b": 30_532_122_624,
}


def module_plans(path: Path):
    file = PythonRecipe(path)
    for variant in ("", *file.variants()):
        recipe = file.recipe(variant)
        yield variant, resolve(recipe, file.cluster(variant), declared_facts(file, recipe))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_variant_is_legal_on_its_cluster(path):
    plans = dict(module_plans(path))
    assert len(plans) >= 2
    for variant, plan in plans.items():
        batch = plan.batch
        assert plan.data_parallel_size * model_parallel_size(plan.parallel) == plan.cluster.world_size
        product = batch.micro_batch_size * batch.gradient_accumulation_steps * plan.data_parallel_size
        assert product == batch.global_batch_size
        assert {note["rule"] for note in plan.notes} <= {"pipeline.bubble", "model.router_loss"}, (variant, plan.notes)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs_as_a_script_and_shows_what_it_trains(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert text.rstrip().endswith('if __name__ == "__main__":\n    main(recipe)')
    file = PythonRecipe(path)
    assert all(getattr(file.module, f"recipe_{variant}").__doc__ for variant in file.variants())


@pytest.mark.parametrize("name", PARAMETERS)
def test_model_sizes_are_the_published_ones(name):
    stem, _, variant = name.partition(":")
    recipe, cluster = load_recipe(str(ROOT / f"recipes/{stem}.py:{variant}"), [])
    assert cluster is not None
    assert resolve(recipe, cluster).model.parameters == PARAMETERS[name]


def test_layouts_match_the_names_of_their_variants():
    def layout(spec: str):
        recipe, cluster = load_recipe(str(ROOT / "recipes" / spec), [])
        return resolve(recipe, cluster).layout()

    seventy = layout("llama3_70b.py")
    assert (seventy["sp"], seventy["dp"], seventy["zero_stage"]) == (2, 128, 3)
    seventy = layout("llama3_70b.py:pipeline")
    assert (seventy["pp"], seventy["dp"], seventy["zero_stage"]) == (16, 16, 1)
    assert layout("qwen3_30b_a3b.py")["ep"] == 8
    assert layout("llama3_8b_long.py")["sp"] == 8
    assert layout("llama3_8b.py:8gpu")["zero_stage"] == 3


QUICK = ("gpt2_124m",)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.breadth) for path in RECIPES],
)
def test_gpu_recipes_use_the_plan_with_the_fastest_prediction(path, tmp_path):
    file = PythonRecipe(path)
    for variant in {"", *file.variants()} - {"pipeline"}:  # that variant is for slow networks
        recipe, cluster = file.recipe(variant), file.cluster(variant)
        if cluster.spec.on_cpu or recipe.model.images:  # predictions leave out the time of the tower
            continue
        if hasattr(file.module, "architecture"):
            declared = file.module.architecture()
            (tmp_path / "config.json").write_text(json.dumps({"model_type": declared.architecture, **declared.config}))
            recipe = recipe.with_(**{"model.pretrained": str(tmp_path)})
        best = search_plans(recipe, cluster, memory_shortage).best[0]
        own = predict(resolve(recipe, cluster))
        assert own.tokens_per_second >= (1 - EQUAL) * best.time.tokens_per_second, (variant, best.arguments)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_shrinks_by_set(path, tmp_path):
    small = ['data.tokenizer={"vocab_size": 512}', 'data.sources=[{"name": "stdlib"}]', "data.sequence_length=64"]
    small += ["parallel.pipeline=1", "parallel.sequence=1", "parallel.expert=1"]
    small += [
        "batch.global_batch_size=8",
        "batch.micro_batch_size=2",
        "parallel.zero_stage=1",
        "train.max_steps=2",
        "train.epochs=null",
    ]
    small += ["model.config.vocab_size=512"]
    recipe, _ = load_recipe(str(path), small)
    if recipe.model.pretrained is None:
        resolve(recipe, load_recipe(str(ROOT / "recipes/tiny.py"), [])[1])


PURE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "deepspeed", "transformers", "datasets", "accelerate", "numpy"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from pathlib import Path
import llmtrain, llmtrain.recipe.cluster, llmtrain.errors, llmtrain.recipe
from llmtrain_lint import examine
from llmtrain.plan.ds_config import render
from llmtrain.cli import app
from llmtrain.recipe.cluster import Cluster
from tools.configurations import declared_facts
from llmtrain.plan.rules import resolve
from llmtrain.plan.axes import model_parallel_size
from llmtrain.plan.load import load_recipe
from llmtrain.plan.facts.model_facts import model_facts
for path in sorted(Path("recipes").glob("*.py")):
    recipe, cluster = load_recipe(str(path), [])
    if recipe.model.pretrained is None:
        assert render(resolve(recipe, cluster))
assert examine("tiny.json", Path("ds_configs/tiny.json")).findings == []
"""


def test_planning_needs_no_heavy_package():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PURE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_tiny_runs_on_any_number_of_workers(workers):
    recipe, _ = load_recipe(str(ROOT / "recipes/tiny.py"), [])
    plan = resolve(recipe, Cluster(devices_per_node=workers))
    assert plan.batch.gradient_accumulation_steps * workers == 4


def test_recipes_are_listed_and_found_by_name():
    """By commands and from Python; a file or a folder of the same name does not matter."""
    listed = CliRunner().invoke(app, ["recipe", "list"]).stdout
    assert [*shipped_recipes()] == [line.split()[0] for line in listed.splitlines() if line[0] != " "]
    assert "variants: zero3, bf16, verify, moe" in listed
    assert declared("tiny:zero3") == load_recipe(f"{ROOT}/recipes/tiny.py:zero3", [])
    assert "zero_stage: 3" in CliRunner().invoke(app, ["recipe", "show", "tiny:zero3"]).stdout
    with pytest.raises(RecipeError, match=r"tinny: does not exist; did you mean 'tiny'\?(.|\n)*llmtrain recipe list"):
        declared("tinny")
