"""Rows that functions of a user's own read, filter and map, in processes of their own."""

import json
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from llmtrain.data import prepare
from llmtrain.data.cache import Cache
from llmtrain.data.progress import Progress
from llmtrain.data.report import notes
from llmtrain.data.sources import own_rows, own_rows_process
from llmtrain.data.sources.corpus import ConversationCorpus, open_corpora
from llmtrain.errors import DataError, Exit, RecipeError
from llmtrain.recipe import Source
from tests.helpers.forked_helpers import fork_helpers
from tests.helpers.small_corpora import MakeRecipe

MINE = """
import os
import random

print("this line must not reach the rows")


def read(path):
    if not os.path.exists(path):
        yield from ({"text": f"{path} {number}"} for number in range(3))
        return
    with open(path) as lines:
        for line in lines:
            yield {"title": path, "text": line.strip()} if line.startswith("row") else line.strip()


def breaks(path):
    yield "one"
    raise OSError(f"no server at {path}")


def yields_a_number(path):
    return ["one", 2]


def shuffled(path):
    return iter([str(random.random()), "two"])


def keep(row):
    return row["number"] % 2 == 0


def clean(row):
    if row["number"] == 4:
        return None
    if row["number"] == 6:
        return [{"text": "six"}, {"text": "sechs"}]
    row["text"] = row["text"].upper()
    return row


def unchanged(row):
    return dict(row)


def without_text(row):
    return {"txt": row["text"]}


def one_fails(row):
    number = 1 / (row["number"] - 3)
    return row


def forgets(row):
    row["number"] > 3


def is_new(row, seen=set()):
    return not (row["number"] in seen or seen.add(row["number"]))


def as_text(row):
    return row["text"]


def as_object(row):
    return {"text": object()}


def by_two(row, other):
    return row


def as_conversation(row):
    return {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": row["text"]}]}


def of_text(row):
    return [{"text": part} for part in row["text"].split()]


def of_process(row):
    return {"text": f"{os.getpid()} {row['number']}"} if row["number"] > 20 else row


def of_set(row):
    return {"text": " ".join({str(number) for number in range(20)})}


def dies(row):
    os._exit(7)
"""


@pytest.fixture
def folder(own_folder, monkeypatch):
    """The folder; functions run in forks of this process."""
    fork_helpers(monkeypatch)
    return own_folder


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder with a module and rows, and an empty cache."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"number": number, "text": f"text {number}"} for number in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def opened(folder: Path, name: str = "rows.jsonl", drops_faulty: bool = False, **fields):
    cache = Cache(folder / "cache", Progress())
    (corpus,) = open_corpora([Source(str(folder / name), **fields)], cache, "data.sources", str(folder), drops_faulty)
    return corpus


def texts(folder: Path, name: str = "rows.jsonl", **fields) -> list[str]:
    return [document.text for document in opened(folder, name, **fields).documents()]


def refused(folder: Path, name: str = "rows.jsonl", **fields) -> str:
    with pytest.raises(DataError) as error:
        texts(folder, name, **fields)
    assert error.value.exit_code == Exit.DATA
    (problem,) = error.value.problems
    return str(problem)


def line_of(folder: Path, text: str) -> str:
    return f"{folder / 'mine.py'}, line {1 + MINE.splitlines().index(text)}: "


def test_rows_are_filtered_and_mapped_and_counted(folder):
    corpus = opened(folder, filter="mine:keep", map="mine:clean")
    assert [document.text for document in corpus.documents()] == ["TEXT 0", "TEXT 2", "six", "sechs", "TEXT 8"]
    assert str(corpus.counts) == ("10 rows read, 5 dropped by `filter`, 4 changed, 1 left out, 1 added by `map`")
    assert len(list(corpus.documents())) == 5  # again, and counted anew
    assert corpus.counts.read == 10


def test_a_function_is_named_by_its_path():
    assert Source("rows", map=texts).map == "tests.data.test_own_rows:texts"
    with pytest.raises(ValidationError, match="is a lambda"):
        Source("rows", filter=lambda row: True)


def test_rows_that_map_returns_as_they_were_are_unchanged(folder):
    corpus = opened(folder, map="mine:unchanged")
    assert [document.text for document in corpus.documents()] == texts(folder)
    assert corpus.counts.changed == 0


def test_a_reader_gets_files_of_any_suffix_and_yields_rows_or_texts(folder):
    (folder / "logs").mkdir()
    (folder / "logs/b.log").write_text("row of b\n")
    (folder / "logs/a.txt.old").write_text("text of a\n")
    (folder / "logs/.hidden").write_text("hidden\n")
    assert texts(folder, "logs", reader="mine:read") == ["text of a", "row of b"]
    assert texts(folder, "logs/*.log", reader="mine:read", text_column="title") == [str(folder / "logs/b.log")]


def test_a_reader_of_no_file_gets_the_name(folder):
    assert texts(folder, "server", reader="mine:read")[1:] == [f"{folder / 'server'} {number}" for number in (1, 2)]


def test_a_text_is_a_row(folder):
    (folder / "words.txt").write_text("some words")
    assert texts(folder, "words.txt", map="mine:of_text") == ["some", "words"]


def test_rows_may_become_conversations(folder):
    corpus = opened(folder, map="mine:as_conversation")
    assert isinstance(corpus, ConversationCorpus)
    assert "text 0" in corpus.text_of(next(iter(corpus.documents())).text)


def test_several_processes_keep_the_order(folder, monkeypatch):
    monkeypatch.setattr(own_rows, "available_cores", lambda: 3)
    monkeypatch.setattr(own_rows, "BATCH_ROWS", 7)
    monkeypatch.setattr(own_rows, "CHECKED_ROWS", 5)
    rows = [{"number": number, "text": str(number)} for number in range(100)]
    (folder / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapped = [text.split() for text in texts(folder, "many.jsonl", map="mine:of_process")]
    assert [int(words[-1]) for words in mapped] == list(range(100))
    assert len({words[0] for words in mapped[21:]}) == 3


def test_faults_name_the_row_and_the_line_of_the_function(folder):
    fault = refused(folder, map="mine:one_fails")
    assert "1 of the first 10 rows" in fault
    failing = line_of(folder, '    number = 1 / (row["number"] - 3)')
    assert f"{folder / 'rows.jsonl'}, line 4: {failing}" in fault
    assert "mine:one_fails fails: ZeroDivisionError: division by zero" in fault
    assert "data.faulty_rows=drop" in fault


def test_faulty_rows_are_dropped_on_request(folder):
    corpus = opened(folder, map="mine:one_fails", drops_faulty=True)
    assert len(list(corpus.documents())) == 9
    assert "1 faulty left out, such as" in str(corpus.counts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"map": "mine:without_text"}, "has no column 'text'; did you mean 'txt'?"),
        ({"filter": "mine:forgets"}, "mine:forgets returns None, not whether to keep the row (a bool)"),
        ({"filter": "mine:is_new"}, "must give the same result for the same argument"),
        ({"map": "mine:as_text"}, "not a row (dict), a list of rows or None"),
        ({"map": "mine:as_object"}, "which is not JSON data"),
        ({"map": "mine:dies"}, "the process that runs mine:dies (data.sources.0) ended with code 7"),
        ({"reader": "mine:yields_a_number"}, "yields 2, which is neither a row (dict) nor a text as row 2"),
        ({"reader": "mine:shuffled"}, "must give the same result for the same argument"),
        ({"reader": "mine:read", "subset": "en"}, "has no effect, since"),
        ({"reader": "mine:read", "split": "test"}, "'test' has no effect: a reader reads all files"),
    ],
)
def test_what_functions_return_is_checked(folder, fields, message):
    assert message in refused(folder, **fields)


def test_a_column_that_is_missing_is_refused_with_the_row(folder):
    assert f"{folder / 'rows.jsonl'}, line 1, after mine:without_text: " in refused(folder, map="mine:without_text")


def test_a_reader_that_fails_says_where(folder):
    fault = refused(folder, "db", reader="mine:breaks")
    assert fault.startswith("data.sources.0.reader: " + line_of(folder, '    raise OSError(f"no server at {path}")'))
    assert f"OSError: no server at {folder / 'db'}, after 1 rows of" in fault


def test_functions_that_cannot_be_called_are_refused_at_once(folder):
    with pytest.raises(RecipeError, match=r"mine:by_two\(row, other\) cannot be called with one argument"):
        opened(folder, map="mine:by_two").identity  # noqa: B018


def test_the_identity_follows_the_code_not_its_place(folder):
    before = opened(folder, map="mine:clean").identity
    (folder / "unrelated.py").write_text("X = 1\n")
    assert opened(folder, map="mine:clean").identity == before
    assert opened(folder, filter="mine:keep", map="mine:clean").identity != before
    (folder / "mine.py").write_text(MINE.replace("upper", "lower"))
    assert opened(folder, map="mine:clean").identity != before


def test_a_set_of_texts_has_one_order_in_all_processes(own_folder):
    assert texts(own_folder, map="mine:of_set") == texts(own_folder, map="mine:of_set")


def test_this_process_imports_nothing_of_the_users(folder):
    texts(folder, filter="mine:keep", map="mine:clean")
    texts(folder, "server", reader="mine:read")
    assert "mine" not in sys.modules


def test_data_are_prepared_with_the_functions_and_reported(folder, make_recipe: MakeRecipe):
    rows = {"name": str(folder / "rows.jsonl"), "filter": "mine:keep"}
    recipe = make_recipe(rows, eval_fraction=0.0).with_(
        **{"code_dir": str(folder), "evaluation.sources": [{**rows, "map": "mine:clean"}]}
    )
    prepared = prepare(recipe)
    assert prepared.sources[0].store.meta["rows"]["filtered"] == 5
    assert prepared.evaluation_sources[0].store.meta["rows"]["removed"] == 1
    assert any("5 dropped by `filter`" in note for note in notes(prepared, recipe))
    assert not prepare(recipe).made


def test_the_first_rows_are_read_before_other_processes_start(folder, monkeypatch):
    started = []
    process = own_rows.HelperProcess
    monkeypatch.setattr(own_rows, "HelperProcess", lambda *given: started.append(given) or process(*given))
    monkeypatch.setattr(own_rows, "BATCH_ROWS", 2)
    monkeypatch.setattr(own_rows, "CHECKED_ROWS", 2)
    documents = opened(folder, map="mine:clean", format="text").documents()
    next(documents)
    documents.close()
    assert len(started) == 1
    assert own_rows_process.CHECKED_ROWS == 100
