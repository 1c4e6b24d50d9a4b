"""`llmtrain init` writes a recipe that can be planned and trained; `llmtrain recipe` shows recipes."""

import json
import os
import pty
import sys
from pathlib import Path

import jsonschema
import pytest

from llmtrain.cli import app, main
from llmtrain.commands import init
from llmtrain.data import prepare
from llmtrain.errors import UserError
from llmtrain.plan.load import load_recipe
from llmtrain.plan.load.yaml_file import as_yaml, recipe_schema

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))
CHAT = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
PAIR = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
LABELLED = {"prompt": "1 + 1?", "completion": "3", "label": False}
TOPIC = {**LABELLED, "label": "sums"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = {
        "chats": CHAT,
        "pairs": PAIR,
        "labelled": LABELLED,
        "topics": TOPIC,
        "texts": {"text": "a"},
        "others": {"a": 1},
    }
    for name, row in rows.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps({**row, "id": number}) + "\n" for number in range(100)))
    Path("labelled.csv").write_text("prompt,completion,label\na,b,TRUE\n")
    Path("weights").mkdir()
    Path("weights/config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 512})
    )
    return tmp_path


def refused(*words: str) -> tuple[int, str]:
    with pytest.raises(UserError) as error:
        _init(*words)
    return int(error.value.exit_code), str(error.value)


def _init(*words: str) -> None:
    app(["init", *words], standalone_mode=False)


@pytest.mark.parametrize("name", ["./nowhere", "nowhere.txt", "/no/such/folder"])
def test_a_missing_file_is_not_looked_up_on_the_hub(folder, name):
    code, message = refused("mine.yaml", "--data", name)
    assert (code, message) == (2, f"--data: '{name}' does not exist [init.data]")
    assert not Path("mine.yaml").exists()


def test_a_hub_lookup_is_reported(folder, capsys):
    _init("mine.yaml", "--data", "owner/name")
    assert "text from owner/name, a dataset on the hub" in capsys.readouterr().out
    _init("here.yaml", "--data", "texts.jsonl")
    assert "the hub" not in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["py", "yaml"])
@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--data", "texts.jsonl"], {"train.max_steps": 200, "data.sequence_length": 256, "optim.lr": 2e-3}),
        (["--data", "chats.jsonl"], {"train.epochs": 1, "data.chat_template": "plain"}),
        (
            ["--data", "pairs.jsonl", "--model", "weights", "--lora"],
            {"objective.name": "dpo", "model.adapter.rank": 16, "data.sequence_length": 256, "optim.lr": 1e-5},
        ),
        (
            ["--data", "labelled.jsonl", "--model", "weights"],
            {"objective.name": "kto", "optim.lr": 1e-6, "evaluation.every_steps": 50, "data.eval_fraction": 0.05},
        ),
        (["--data", "labelled.csv", "--model", "weights"], {"objective.name": "kto", "evaluation.every_steps": 0}),
        (["--data", "topics.jsonl"], {"objective.name": "language_model", "train.epochs": 1}),
        (["--data", "owner/name", "--kind", "conversations", "--model", "weights"], {"data.tokenizer": "weights"}),
        (["--data", 'a "b" *.txt', "--kind", "text"], {"data.sources.0.name": 'a "b" *.txt'}),
    ],
)
def test_init_writes_a_recipe_for_the_kind_of_data(folder, capsys, suffix, options, fields):
    _init(f"my recipe.{suffix}", *options)
    assert f"llmtrain train 'my recipe.{suffix}'" in capsys.readouterr().out
    recipe, _ = load_recipe(f"my recipe.{suffix}", [])
    assert {name: recipe.dotted()[name] for name in fields} == fields
    assert recipe.name == "my-recipe"


@pytest.mark.parametrize(("words", "length"), [(10, 256), (900, 2048), (9000, 8192)])
def test_sequences_are_as_long_as_most_conversations(folder, words, length):
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "a word " * (words // 2)}]
    Path("long.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 50)
    assert init._sequence_length(init._inspect("long.jsonl"), None, "weights") == length
    assert init._sequence_length(init._inspect("long.jsonl"), 1024, "weights") == min(length, 1024)


def test_the_recipe_holds_out_some_documents_and_evaluates_on_them(folder):
    for count, fraction in ((1, 0.0), (2, 0.0), (30, None), (400, None), (1200, 0.01)):
        lines = [json.dumps({"text": f"document {number}"}) + "\n" for number in range(count)]
        Path("some.jsonl").write_text("".join(lines))
        file = f"of{count}.yaml"
        _init(file, "--data", "some.jsonl")
        recipe, _ = load_recipe(file, [f"data.cache_dir={folder / 'cache'}"])
        assert fraction is None or recipe.data.eval_fraction == fraction
        assert bool(recipe.evaluation.every_steps) == bool(recipe.data.eval_fraction)
        prepared = prepare(recipe)
        held, train = prepared.eval_sequences(), prepared.train_sequences
        assert train
        assert bool(held) == (count > 2)


def test_both_kinds_of_file_are_the_same_recipe_and_a_name_alone_is_python(folder):
    for file in ("mine", "mine.yaml"):
        _init(file, "--data", "pairs.jsonl", "--model", "weights")
    assert load_recipe("mine.py", []) == load_recipe("mine.yaml", [])


def test_faults_are_reported_together_and_nothing_is_written(folder):
    assert refused("mine.py")[1].startswith("--data: is required")
    code, said = refused("mine.toml", "--data", "pairs.jsonl", "--lora", "--kind", "preferences")
    assert (code, said.count("[init.")) == (2, 3)
    code, said = refused("mine.py", "--data", "others.jsonl")
    assert (code, "neither a column 'text'" in said) == (3, True)
    assert "is not valid Unicode" in refused("mine.py", "--data", "a\udcff.txt")[1]
    assert "cannot be written" in refused("gone/mine.py", "--data", "texts.jsonl")[1]
    for kind in ("pairs", "labelled"):
        assert "compar" in refused("mine.py", "--data", f"{kind}.jsonl")[1]
    Path("folder").mkdir()
    Path("folder/test.jsonl").write_text("{}\n")
    assert refused("mine.py", "--data", "folder")[1].startswith("--data: 'folder' has no split 'train'")
    Path("mine.py").write_text("mine")
    assert "exists" in refused("mine.py", "--data", "texts.jsonl")[1]
    assert Path("mine.py").read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir() if path.suffix in (".py", ".toml")) == ["mine.py"]


def test_init_asks_on_a_terminal(folder):
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "llmtrain", "init", "mine.py"])
    for answer in ("pairs.jsonl", "weights", "y"):
        os.write(terminal, f"{answer}\n".encode())
    said = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the terminal was closed
            break
        said += part
        if not part:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, said
    recipe, _ = load_recipe("mine.py", [])
    assert (recipe.model.pretrained, recipe.objective.name) == ("weights", "dpo")
    assert recipe.model.adapter is not None


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_show_prints_the_recipe(path, tmp_path):
    recipe, cluster = load_recipe(str(path), [])
    recipe = recipe.with_(name="1e3")
    for with_defaults in (False, True):
        (tmp_path / "shown.yaml").write_text(as_yaml(recipe, cluster, with_defaults))
        assert load_recipe(str(tmp_path / "shown.yaml"), []) == (recipe, cluster)


def test_the_schema_accepts_recipes_and_finds_typing_errors(capsys):
    main_schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(main_schema)
    check = jsonschema.Draft202012Validator(main_schema)
    for path in RECIPES:
        recipe, cluster = load_recipe(str(path), [])
        values = recipe.model_dump(mode="json") | {"cluster": cluster.model_dump(mode="json") if cluster else {}}
        assert not list(check.iter_errors(values | {"extends": "x.py", "variants": {"a": {"optim": {"lr": 1.0}}}}))
    for wrong in ({"optim": {"lrr": 1}}, {"trian": {}}, {"variants": {"a": {"trian": {}}}}, {"optim": {"lr": "x"}}):
        assert list(check.iter_errors(wrong))
    with pytest.raises(SystemExit) as ended:
        main(["recipe", "schema"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == main_schema


def test_version_prints_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("llmtrain 0.")
