"""Recipes with variants, assignments and clusters are loaded; faults in a user's file name its line."""

from pathlib import Path

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.load import PythonRecipe, load_recipe, with_variant
from llmtrain.recipe import OptimConfig, Recipe
from llmtrain.recipe.aliases import ALIASES, FIELD_OF_ALIAS

TINY = Path(__file__).parents[2] / "recipes/tiny.py"


def refusal(spec: object, *assignments: str) -> list:
    with pytest.raises(RecipeError) as error:
        load_recipe(str(spec), list(assignments))
    assert error.value.exit_code == 2
    return list(error.value.problems)


def test_a_base_a_variant_and_assignments_are_loaded():
    base, cluster = load_recipe(str(TINY), [])
    assert (base.name, cluster.world_size) == ("tiny", 1)
    variant, _ = load_recipe(f"{TINY}:zero3", ["optim.lr=1e-4", "data.packing=concat"])
    assert (variant.parallel.zero_stage, variant.optim.lr, variant.data.packing) == (3, 1e-4, "concat")
    assert PythonRecipe(TINY).variants() == ["zero3", "bf16", "verify", "moe"]


def test_a_default_variant_is_added_to_a_spec_that_names_none(tmp_path):
    assert with_variant(str(TINY), "verify") == f"{TINY}:verify"
    assert with_variant(f"{TINY}:zero3", "verify") == f"{TINY}:zero3"
    assert with_variant(f"{TINY}:", "verify") == f"{TINY}:"
    without = TINY.with_name("llama_1b.py")
    assert with_variant(str(without), "verify") == str(without)
    with pytest.raises(RecipeError):
        with_variant(str(tmp_path / "gone.py"), "verify")


def test_file_that_does_not_exist(tmp_path):
    (problem,) = refusal(TINY.with_name("tinny.py"))
    assert problem.rule == "recipe.file"
    assert "did you mean 'tiny.py'" in problem.message
    assert "llama3_70b" in problem.fix
    assert refusal(tmp_path / "gone/tiny.py")[0].message == "does not exist"
    assert "is a folder" in refusal(TINY.parent)[0].message
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert refusal(tmp_path / "loop.yaml")[0].message == "is not a regular file, nor a link to one"
    (tmp_path / "recipe.json").write_text("{}")
    assert "neither a Python file" in refusal(tmp_path / "recipe.json")[0].message


def test_variant_that_does_not_exist():
    (problem,) = refusal(f"{TINY}:zero4")
    assert (problem.rule, problem.fix) == ("recipe.variant", "variants: zero3, bf16, verify, moe")
    assert "did you mean 'zero3'" in problem.message


BROKEN = {
    "syntax": ("x = (\n", "line 1", "SyntaxError"),
    "import": ("import os\nimport no_such_module_at_all\n", "line 2", "no_such_module_at_all"),
    "deeper": ("import json\n\ndef f():\n    return json.loads('{')\n\nf()\n", "line 4", "JSONDecodeError"),
    "raises": ("def recipe():\n    return {}['name']\n", "line 2", "KeyError"),
    "type": ("def recipe():\n    return 3\n", "returned int", "Recipe"),
    "missing": ("x = 1\n", "no function recipe()", ""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_recipes_that_fail_name_the_line(tmp_path, case):
    text, where, what = BROKEN[case]
    (tmp_path / "mine.py").write_text(text)
    (problem,) = refusal(tmp_path / "mine.py")
    assert problem.field == str(tmp_path / "mine.py")
    assert where in problem.message
    assert what in problem.message


def test_the_users_own_line_is_named_when_deeper_code_fails(tmp_path):
    text = "import json\ndef load():\n    return json.loads('{')\ndef recipe():\n    return load()\n"
    (tmp_path / "mine.py").write_text(text)
    assert "line 3" in refusal(tmp_path / "mine.py")[0].message


def test_invalid_fields_are_located(tmp_path):
    text = "from llmtrain import *\ndef recipe():\n    return OptimConfig(learning_rte=1, warmup_steps=-1)\n"
    (tmp_path / "mine.py").write_text(text)
    found = {problem.field: problem.message for problem in refusal(tmp_path / "mine.py")}
    assert set(found) == {"optim.learning_rte", "optim.lr", "optim.warmup_steps"}
    text = "from llmtrain import *\ndef recipe():\n    return OptimConfig(lr=1e-3, warmup_step=1)\n"
    (tmp_path / "mine.py").write_text(text)
    assert "did you mean 'warmup_steps'" in refusal(tmp_path / "mine.py")[0].message


def test_an_invalid_cluster_is_refused(tmp_path):
    text = TINY.read_text().replace("return Cluster()", 'return Cluster(device="h10")')
    (tmp_path / "mine.py").write_text(text)
    (problem,) = refusal(tmp_path / "mine.py")
    assert problem.field == "cluster.device"
    assert "did you mean 'h100'" in problem.message


def test_all_invalid_assignments_are_reported():
    found = {problem.field for problem in refusal(TINY, "optim.lrr=1", "parallel.zero=1")}
    assert found == {"optim.lrr", "parallel.zero"}


def test_equal_module_names_in_two_folders_are_separate_modules(tmp_path):
    for name, rate in (("one", "0.1"), ("two", "0.2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "base.py").write_text(TINY.read_text().replace("lr=4e-3", f"lr={rate}"))
        (folder / "mine.py").write_text("from base import recipe\n")
        assert load_recipe(str(folder / "mine.py"), [])[0].optim.lr == float(rate)


def test_a_replaced_field_is_a_copy(tiny):
    """A later field may lie within it, and must not change what the caller holds."""
    config = {"hidden_size": 64, "layers": {"kinds": ["full"]}}
    recipe = tiny.with_(
        **{"model.config": config, "model.config.hidden_size": 32, "model.config.layers.kinds": ["own"]}
    )
    assert recipe.model.config == {"hidden_size": 32, "layers": {"kinds": ["own"]}}
    assert config == {"hidden_size": 64, "layers": {"kinds": ["full"]}}


def test_field_names_of_other_tools_map_to_existing_fields(tiny):
    ours = {*tiny.dotted(), "data.sources", "data.tokenizer", "optim.betas", "logging.trackers"}
    assert set(ALIASES) <= ours
    assert len(FIELD_OF_ALIAS) == sum(len(names) for names in ALIASES.values())
    for theirs, field in FIELD_OF_ALIAS.items():
        part = field.rpartition(".")[0]
        for path in {theirs, f"{part}.{theirs}" if part else theirs} - ours - set(Recipe.model_fields):
            with pytest.raises(RecipeError) as error:
                tiny.with_(**{path: 1})
            assert f"the field for that is '{field}'" in error.value.problems[0].message


@pytest.mark.parametrize(
    ("field", "ours"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("learning_rate", "optim.lr"),
        ("batch.per_device_train_batch_size", "batch.micro_batch_size"),
        ("train.num_train_epochs", "train.epochs"),
        ("sequence_len", "data.sequence_length"),
        ("zero_optimization", "parallel.zero_stage"),
        ("optim.zero_stage", "parallel.zero_stage"),
    ],
)
def test_a_field_name_of_another_tool_is_answered_with_ours(field, ours):
    (problem,) = refusal(TINY, f"{field}=1")
    assert problem.message == f"there is no such field; the field for that is '{ours}'"


def test_a_field_that_does_not_exist_lists_those_that_do(tmp_path):
    (problem,) = refusal(TINY, "optim.frobnication=1")
    assert problem.fix == f"fields of optim: {', '.join(OptimConfig.model_fields)}"
    assert "parallel, train" in refusal(TINY, "frobnication=1")[0].fix
    (tmp_path / "mine.py").write_text(
        "from llmtrain import *\ndef recipe():\n    return OptimConfig(learning_rate=1)\n"
    )
    found = {problem.field: problem for problem in refusal(tmp_path / "mine.py")}
    assert "the field for that is 'optim.lr'" in found["optim.learning_rate"].message
    assert "fields of optim: name, lr" in found["optim.learning_rate"].fix
