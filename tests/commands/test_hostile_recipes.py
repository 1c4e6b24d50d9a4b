"""Any exception of a recipe file, and any value of `--set`, gives exit code 2 and a message, never a traceback."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import pytest

from llmtrain import cli
from llmtrain.errors import RecipeError
from llmtrain.plan.load import PythonRecipe, load_recipe
from tests.helpers.commands import run

TINY = Path("recipes/tiny.py").resolve()


def answer(capfd, *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and error output of a command that runs in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    out, error = capfd.readouterr()
    assert "Traceback" not in error
    return ended.value.code, out, error


def refusal(capfd, *arguments: object) -> str:
    code, _, error = answer(capfd, *arguments)
    assert code == 2, error
    assert error.startswith("error: ")
    assert max(len(line) for line in error.splitlines()) < 1000
    return error


DEEP = "[" * 100_000 + "]" * 100_000
RATHER_DEEP = "[" * 500 + "]" * 500
NUMBER = "9" * 5000


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        (f"model.config.x={DEEP}", ["model.config.x", "nested deeper than 32"]),
        (f"model.config.x={RATHER_DEEP}", ["model.config.x", "nested deeper than 32"]),
        ("model.config.x=" + '{"a":' * 500 + "1" + "}" * 500, ["nested deeper"]),
        ("data.sources.²=1", ["data.sources.²", "has 1 items"]),
        ("data.sources.².name=1", ["data.sources.²"]),
        (f"data.sources.{NUMBER}=1", ["has 1 items"]),
        (f"data.sources.{NUMBER}.name=x", ["has 1 items"]),
        ("data.sources.00=x", ["has 1 items"]),
        (f"optim.lr={NUMBER}", ["optim.lr"]),
        (f"train.max_steps={NUMBER[:4000]}", ["train.max_steps"]),
        (f"model.config.hidden_size={NUMBER[:4000]}", ["model.config.hidden_size", "40 digits"]),
        (f"model.config.hidden_size={NUMBER}", ["hidden_size"]),
        ("model.config.rope_theta=NaN", ["model.config.rope_theta", "nan is not a finite number"]),
        ('model.config={"a": [1, {"b": -Infinity}]}', ["model.config", "-inf is not a finite number"]),
        ("optim.lr=1e999", ["optim.lr"]),
        ('model.config.hidden_act="a\\u0000b"', ["NUL"]),
        ('data.tokenizer="a\\u0000b"', ["data.tokenizer", "NUL"]),
        ('name="\\ud800"', ["name", "not valid Unicode"]),
        ("name=\udcff", ["name", "not valid Unicode"]),
        ('model.config={"\\ud800": 1}', ["model.config", "not valid Unicode"]),
        (f"{'a.' * 5000}b=1", ["there is no such field"]),
        ("..=3", ["error: '..': there is no such field"]),
        (" =3", ["error: ' ': there is no such field"]),
        (".lr=3", ["error: .lr: there is no such field; the field for that is 'optim.lr'"]),
        (f"model.pretrained={'x/' * 3000}x", ["model"]),
    ],
    ids=lambda value: value[:24].replace("\0", "") if isinstance(value, str) else "",
)
def test_any_value_of_set_is_handled(assignment, words, capfd):
    error = refusal(capfd, "plan", TINY, "--set", assignment)
    assert all(word in error for word in words), error


def test_names_that_are_too_long(capfd):
    folder = "x" * 5000
    pretrained = ("--set", "model.architecture=null", "--set", "model.config={}")
    long = refusal(
        capfd, "plan", TINY, *pretrained, "--set", f"model.pretrained=/{folder}", "--set", "data.tokenizer=x"
    )
    assert "File name too long" in long
    assert "File name too long" in refusal(capfd, "plan", f"{folder}.py")
    assert "File name too long" in refusal(capfd, "plan", TINY, "--write", folder)


def test_a_plan_is_not_written_onto_a_file(capfd, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "File exists" in refusal(capfd, "plan", TINY, "--write", tmp_path / "file")
    assert "Not a directory" in refusal(capfd, "plan", TINY, "--write", tmp_path / "file" / "plan")
    assert (tmp_path / "file").read_text() == "mine"


CONFIG = "import llmtrain; return llmtrain.ModelConfig(architecture='a', config=VALUE)"
RAISED = {
    "raise SystemExit": "SystemExit",
    "raise SystemExit(0)": "SystemExit: 0",
    "raise SystemExit(77)": "SystemExit: 77",
    "import sys; sys.exit('bye')": "SystemExit: bye",
    "raise ValueError('x' * 10**6)": "ValueError: xxx",
    "raise ValueError('one\\ntwo')": "ValueError: one two",
    "f = lambda: f()\n    f()": "RecursionError",
    "import llmtrain; return llmtrain.OptimConfig(lr=10**5000)": "optim.lr",
    "x = []; [x := [x] for _ in range(10**5)]; " + CONFIG.replace("VALUE", "{'a': x}"): "nested deeper",
    CONFIG.replace("VALUE", "{'a': object()}"): "not JSON data",
    CONFIG.replace("VALUE", "{'a': 10**5000}"): "40 digits",
    CONFIG.replace("VALUE", "{'a': float('nan')}"): "not a finite",
    CONFIG.replace("VALUE", "{1: 2}"): "model.config",
    "import llmtrain; return llmtrain.Source('\\udcff')": "data.sources.name",
    "import llmtrain; return llmtrain.Source('a\\0b')": "NUL",
}


CASES = [(statement, inside) for statement in RAISED for inside in (True, False) if inside or "return" not in statement]


@pytest.mark.parametrize(("statement", "inside"), CASES)
def test_any_exception_of_a_recipe_is_reported(statement, inside, capsys, tmp_path):
    text = f"def recipe():\n    {statement}\n" if inside else "if True:\n    " + statement
    (tmp_path / "mine.py").write_text(text + "\n")
    error = refusal(capsys, "plan", tmp_path / "mine.py")
    assert RAISED[statement] in error


def test_what_a_recipe_prints_is_not_in_json(capfd, tmp_path):
    text = TINY.read_text().replace(
        "def recipe() -> Recipe:\n", "print('imported')\ndef recipe() -> Recipe:\n    print('called')\n", 1
    )
    (tmp_path / "mine.py").write_text(text)
    code, out, error = answer(capfd, "plan", tmp_path / "mine.py", "--json")
    assert code == 0
    assert json.loads(out)["recipe"] == "tiny"
    assert error.splitlines() == ["imported", "called"]


def test_an_interruption_is_not_reported_as_a_fault_of_the_recipe(tmp_path):
    """Ctrl-C while a recipe is read ends the command as it does elsewhere."""
    (tmp_path / "mine.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n")
    with pytest.raises(KeyboardInterrupt):
        load_recipe(str(tmp_path / "mine.py"), [])


@pytest.fixture
def guardless(tmp_path):
    """The text of a recipe that ends before its guard."""
    return TINY.read_text().partition("if __name__")[0] + "\nfrom llmtrain import main\n"


def test_main_without_its_guard_is_named(guardless, tmp_path, capfd):
    (tmp_path / "mine.py").write_text(guardless + "main(recipe)\n")
    assert 'if __name__ == "__main__":' in refusal(capfd, "plan", tmp_path / "mine.py")
    result = run(sys.executable, tmp_path / "mine.py", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "RecursionError" not in result.stderr
    assert 'if __name__ == "__main__":' in result.stderr


def test_main_trains_the_function_that_it_is_given(guardless, tmp_path, monkeypatch, capfd):
    file = tmp_path / "mine.py"
    file.write_text(guardless + "def my(): return recipe()\n")
    module = PythonRecipe(file).module
    assert cli._script_arguments(module.recipe, ["--nproc", "2"]) == ["train", str(file), "--nproc", "2"]
    assert cli._script_arguments(module.recipe_zero3, []) == ["train", f"{file}:zero3"]
    assert cli._script_arguments(module.recipe, ["--variant", "bf16", "-x"]) == ["train", f"{file}:bf16", "-x"]
    for function, words in (
        (module.my, "main(my)"),
        (lambda: module.recipe(), "main(<lambda>)"),
        (functools.partial(module.recipe), "main(partial)"),
    ):
        with pytest.raises(RecipeError, match=re.escape(words)):
            cli._script_arguments(function, [])
    monkeypatch.setattr(sys, "argv", [str(file), "--variant"])
    with pytest.raises(SystemExit) as ended:
        cli.run_script(module.recipe)
    assert ended.value.code == 2
    assert "--variant: needs a name" in capfd.readouterr().err
