"""Every kind of source, and every fault of a source."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from llmtrain.data.cache import Cache
from llmtrain.data.progress import Progress
from llmtrain.data.sources.corpus import ConversationCorpus, held_out, open_corpora
from llmtrain.data.sources.formats import READERS
from llmtrain.data.sources.hub import hub_corpus
from llmtrain.errors import DataError, Exit
from llmtrain.recipe import Source
from tests.helpers.small_corpora import make_texts, write_jsonl

TEXTS = make_texts(30)


@pytest.fixture
def cache(cache_dir: Path) -> Cache:
    return Cache(cache_dir, Progress())


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def read(cache: Cache, name: Path | str, **fields: Any) -> list[str]:
    (corpus,) = open_corpora([Source(str(name), **fields)], cache)
    documents = list(corpus.documents())
    fractions = [document.fraction for document in documents]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0, abs=0.05)  # an Arrow stream has an end mark
    return [document.text for document in documents]


def fault(cache: Cache, name: Path | str, rule: str, **fields: Any) -> str:
    """The message of the one fault that reading a source ends in."""
    with pytest.raises(DataError) as caught:
        read(cache, name, **fields)
    assert caught.value.exit_code == Exit.DATA
    assert [problem.rule for problem in caught.value.problems] == [rule]
    return str(caught.value)


def table() -> pyarrow.Table:
    return pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})


def test_jsonl_files_are_read(cache: Cache, tmp_path: Path) -> None:
    assert read(cache, write_jsonl(tmp_path / "a.jsonl", TEXTS)) == TEXTS


def test_text_is_read_from_the_named_column(cache: Cache, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, column="content")
    assert read(cache, path, text_column="content") == TEXTS


def test_compressed_files_are_read(cache: Cache, tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "c.jsonl.zst").write_bytes(pyarrow.compress(plain, "zstd", asbytes=True))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"one"))
    assert read(cache, tmp_path / "b.jsonl.gz") == TEXTS
    assert read(cache, tmp_path / "c.jsonl.zst") == TEXTS
    assert read(cache, tmp_path / "d.txt.gz") == ["one"]


def test_parquet_files_are_read(cache: Cache, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(table(), tmp_path / "a.parquet", row_group_size=7)
    assert read(cache, tmp_path / "a.parquet") == TEXTS


def test_arrow_files_and_streams_are_read(cache: Cache, tmp_path: Path) -> None:
    pyarrow.feather.write_feather(table(), tmp_path / "a.arrow", compression="lz4", chunksize=7)
    assert read(cache, tmp_path / "a.arrow") == TEXTS
    with pyarrow.ipc.new_stream(tmp_path / "b.arrow", table().schema) as stream:
        stream.write_table(table(), max_chunksize=7)
    assert read(cache, tmp_path / "b.arrow") == TEXTS


def test_folders_saved_by_datasets_are_read(cache: Cache, tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_dict({"text": TEXTS}), "test": datasets.Dataset.from_dict({"text": ["x"]})}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert read(cache, tmp_path / "saved") == TEXTS
    assert read(cache, tmp_path / "saved", split="test") == ["x"]
    assert "did you mean 'test'" in fault(cache, tmp_path / "saved", "data.split", split="tests")


def test_what_a_cache_left_in_a_saved_folder_is_not_read(cache: Cache, tmp_path: Path) -> None:
    """`map` and `filter` of a data set that was loaded from a folder write their results beside it."""
    for split, folder in (("train", tmp_path / "one"), ("test", tmp_path / "several" / "test")):
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder)
        datasets.load_from_disk(folder).map(lambda row: {"text": row["text"] + "!"})
        assert len(list(folder.glob("*.arrow"))) == 2
        source = tmp_path / ("one" if split == "train" else "several")
        if split == "test":
            (source / "dataset_dict.json").write_text('{"splits": ["test"]}')
        assert read(cache, source, split=split) == TEXTS
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    assert "00001.arrow: does not exist, but state.json names it" in fault(cache, tmp_path / "one", "data.read")
    (tmp_path / "one" / "state.json").write_text("{}")
    assert "state.json: does not contain" in fault(cache, tmp_path / "one", "data.format")


@pytest.mark.parametrize(
    "names",
    [
        ("a.jsonl", "b/c.jsonl"),
        ("train.jsonl", "test.jsonl"),
        ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"),
        ("data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"),
        ("data/dev.jsonl", "data/my-training.v2.jsonl", "evaluation_1.jsonl"),
        ("train/0.jsonl", "val/0.jsonl", "val/test.jsonl"),
        ("x/2024 train/y/0.jsonl", "x/test-2/0.jsonl"),
        ("trained.jsonl", "latest.jsonl"),
        ("test.jsonl",),
    ],
)
def test_the_split_of_a_file_is_the_one_that_datasets_gives_it(
    cache: Cache, tmp_path: Path, names: tuple[str, ...]
) -> None:
    folder = tmp_path / "corpus"
    for name in names:
        write_jsonl(folder / name, [name])
    patterns = datasets.data_files.get_data_patterns(str(folder))
    files = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=str(folder))
    expected = {str(split): sorted(os.path.relpath(path, folder) for path in paths) for split, paths in files.items()}
    assert {split: read(cache, folder, split=split) for split in expected} == expected
    if "train" not in expected:
        assert "has no split 'train'" in fault(cache, folder, "data.split")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train.jsonl", "a.jsonl"), "name no split, while train.jsonl names 'train': a.jsonl"),
        (("train/a.jsonl", "b.jsonl", "c/d.jsonl"), "name no split, while train/a.jsonl names 'train': b.jsonl, c/d"),
        (("data/train-00000-of-00001.jsonl", "more/a.jsonl"), "name no split, while .*: more/a.jsonl"),
        (("train.jsonl", "train-test.jsonl"), "name several splits, while train.jsonl .*: train-test.jsonl"),
    ],
)
def test_files_that_belong_to_no_split_or_to_several_are_refused(
    cache: Cache, tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    for name in names:
        write_jsonl(tmp_path / name, [name])
    assert re.search(message, fault(cache, tmp_path, "data.split"))
    assert read(cache, tmp_path / names[0]) == [names[0]]


@pytest.mark.parametrize(
    "head", ["", "---\nlicense: mit\n---\n", "---\nconfigs:\n- config_name: en\n---\n", "---\n[\n---"]
)
def test_a_folder_with_several_subsets_is_refused(cache: Cache, tmp_path: Path, head: str) -> None:
    folder = tmp_path / "corpus"
    for subset in ("en", "de"):
        write_jsonl(folder / subset / "train-00000-of-00001.jsonl", [subset])
    (folder / "README.md").write_text(head + "# Corpus\n")
    assert read(cache, folder) == ["de", "en"]
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: en\n- config_name: de\n---\n# Corpus\n")
    message = fault(cache, folder, "data.subset")
    assert "has several subsets, as its README.md says: en, de" in message
    assert read(cache, folder / "en") == ["en"]


def test_what_only_a_dataset_of_the_hub_has_is_refused_for_local_files(cache: Cache, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert "have no split 'test'" in fault(cache, path, "data.split", split="test")
    assert "have no split 'test'" in fault(cache, tmp_path / "*.jsonl", "data.split", split="test")
    assert "has no split 'test' (splits: train)" in fault(cache, tmp_path, "data.split", split="test")
    assert "0.subset" in fault(cache, path, "data.local", subset="en")
    assert "0.revision" in fault(cache, tmp_path, "data.local", revision="main")
    assert "0.split" in fault(cache, "stdlib", "data.local", split="test")


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
@pytest.mark.parametrize("form", ["array", "indented", "lines", "csv", "tsv"])
def test_json_and_csv_files_are_read(
    cache: Cache, tmp_path: Path, form: str, packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of a few bytes, so that these divide every character, escape and bracket of a JSON array."""
    monkeypatch.setattr("llmtrain.data.sources.formats.READ_BYTES", 7)
    texts = [*TEXTS, '"quoted", \n in two\nlines\r\n', "\\ 😀 [{,}]\t;", "2024", "x" * 200_000]
    rows = [{"id": number, "text": text} for number, text in enumerate([*texts[:-1], None, texts[-1]])]
    file = io.StringIO(newline="")
    if form == "lines":
        file.write("\n".join(map(json.dumps, rows)))
    elif form in ("csv", "tsv"):
        writer = csv.DictWriter(file, ("id", "text"), dialect="excel" if form == "csv" else "excel-tab")
        writer.writeheader()
        writer.writerows(rows)
    else:
        file.write(" \n" + json.dumps(rows, indent=1 if form == "indented" else None) + "\n")
    path = tmp_path / f"a.{form if form in ('csv', 'tsv') else 'json'}{'' if packed is bytes else '.gz'}"
    path.write_bytes(packed(b"\xef\xbb\xbf" + file.getvalue().encode()))
    assert read(cache, path) == texts
    assert "no column 'texts'; did you mean 'text'? (columns: id, text)" in fault(
        cache, path, "data.column", text_column="texts"
    )


def test_the_fields_of_a_table_are_read_as_conversations(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion,system\na,"b,c",\n')
    (corpus,) = open_corpora([Source(str(tmp_path / "a.csv"))], cache)
    assert isinstance(corpus, ConversationCorpus)
    (row,) = corpus.documents()
    assert json.loads(row.text) == row.row == {"prompt": "a", "completion": "b,c", "system": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b}, {"text": "c"}]', "row 2: is not JSON"),
        ('[{"text": "a"} {"text": "b"}]', "row 1: is followed by '{' where ',' is expected"),
        ('[{"text": "a"}, 3]', "row 2: begins with '3', so it is not an object"),
        ('[{"text": "a"},]', "row 2: begins with ']'"),
        ('[{"text": "a"}', "row 1: is followed by the end of the file where ',' is expected"),
        ('[{"text": "a', "row 1: is not JSON"),
        ('[{"text": "a"}] []', "row 1: is followed by '[' where 'the end of the file' is expected"),
        ('[{"text": ' + "[" * 100_000, "row 1: is nested too deeply"),
        ('{\n"text": "a"}', "line 1: is not JSON"),
    ],
)
def test_a_damaged_json_file_is_named_with_the_place(cache: Cache, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    found = fault(cache, tmp_path / "a.json", "data.json")
    assert f"a.json, {message}" in found
    assert "array" in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,id\na,1\nb\n", "line 3: is not a row of a table: 1 cells, but 2 names of columns"),
        ('text,id\n"a,1\n', "line 2: is not a row of a table: unexpected end of data"),
        ("text,text\na,b\n", "has 2 columns 'text'"),
    ],
)
def test_a_damaged_table_is_named_with_the_place(cache: Cache, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert message in fault(cache, tmp_path / "a.csv", "data.column" if "has 2" in message else "data.csv")


def test_a_text_file_is_a_document(cache: Cache, tmp_path: Path) -> None:
    for name, text in (("b/2.txt", "two\r\nlines\n"), ("a.txt", "\ufeffone"), (".hidden/3.txt", "no"), ("c.md", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    assert read(cache, tmp_path) == ["one", "two\r\nlines\n"]


def test_globs_and_folders_are_sorted(cache: Cache, tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_jsonl(tmp_path / f"data/{number}.jsonl", TEXTS[number * 10 : number * 10 + 10])
    assert read(cache, tmp_path / "data") == TEXTS
    assert read(cache, tmp_path / "**/*.jsonl") == TEXTS
    assert read(cache, tmp_path / "data/[12].jsonl") == TEXTS[10:]


def test_stdlib_is_source_text_without_tests(cache: Cache) -> None:
    (corpus,) = open_corpora([Source("stdlib")], cache)
    texts = [document.text for document in corpus.documents()]
    assert 300 < len(texts) < 3000
    assert 5_000_000 < sum(map(len, texts)) < 40_000_000
    assert Path(os.__file__).read_text() in texts
    assert not any("test" in path.parts or "site-packages" in path.parts for path in corpus.files)  # type: ignore[attr-defined]


def test_a_dataset_is_loaded_by_datasets(cache: Cache, tmp_path: Path) -> None:
    """`load_dataset` takes folders as it takes hub names; the hub itself cannot be reached in a test."""
    folder = tmp_path / "named"
    write_jsonl(folder / "train.jsonl", TEXTS)
    write_jsonl(folder / "test.jsonl", ["held"])
    corpus = hub_corpus(Source(str(folder)), "data.sources.0", cache, "text")
    assert [document.text for document in corpus.documents()] == TEXTS
    test = hub_corpus(Source(str(folder), split="test"), "data.sources.0", cache, "text")
    assert [document.text for document in test.documents()] == ["held"]
    assert corpus.identity != test.identity
    missing = hub_corpus(Source(str(folder), text_column="txt"), "data.sources.0", cache, "txt")
    with pytest.raises(DataError, match=r"no column 'txt'; did you mean 'text'\? \(columns: id, text\)"):
        list(missing.documents())
    with pytest.raises(DataError, match="nosplit"):
        list(hub_corpus(Source(str(folder), split="nosplit"), "data.sources.0", cache, "text").documents())


def test_declared_columns_of_a_dataset_are_recognised_as_conversations(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llmtrain.data.sources.corpus.find_files", lambda *_: [])  # as for a name on the hub
    rows = [{"prompt": "a", "completion": "b"}]
    declared = "".join(f"  - name: {name}\n    dtype: string\n" for name in rows[0])
    for name, head in (("declared", f"---\ndataset_info:\n  features:\n{declared}---\n"), ("silent", "")):
        Path(name).mkdir()
        Path(name, "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path(name, "README.md").write_text(head)
    found, unknown = open_corpora([Source("declared"), Source("silent")], cache)
    assert isinstance(found, ConversationCorpus)
    assert [json.loads(document.text) for document in found.documents()] == rows
    assert not isinstance(unknown, ConversationCorpus)


def test_a_dataset_that_changed_since_its_first_use_is_refused(cache: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    path = write_jsonl(folder / "train.jsonl", TEXTS)
    hub_corpus(Source(str(folder)), "data.sources.0", cache, "text")
    write_jsonl(path, TEXTS[:5])
    with pytest.raises(DataError, match=r"when it was first prepared(.|\n)*set data.sources.0.revision"):
        list(hub_corpus(Source(str(folder)), "data.sources.0", cache, "text").documents())


def test_a_file_that_is_not_utf8_is_named_with_the_byte(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode("latin-1"))
    assert "a.txt: is not UTF-8: byte 0xe9 at offset 3" in fault(cache, tmp_path / "a.txt", "data.utf8")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "one"}\n{"text": "caf\xe9"}\n')
    assert "b.jsonl: is not UTF-8: byte 0xe9 at offset 29" in fault(cache, tmp_path / "b.jsonl", "data.utf8")
    raw = pyarrow.array([b"good", b"\xff"], pyarrow.binary())
    unchecked = pyarrow.StringArray.from_buffers(len(raw), *raw.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"text": unchecked}), tmp_path / "c.parquet")
    assert "c.parquet, row 2: is not UTF-8: byte 0xff" in fault(cache, tmp_path / "c.parquet", "data.utf8")


def test_half_a_surrogate_pair_is_refused(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d"}\n')
    assert "a.jsonl, line 1: contains a lone surrogate" in fault(cache, tmp_path / "a.jsonl", "data.utf8")


def test_a_missing_column_is_named_with_the_existing_ones(cache: Cache, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    pyarrow.parquet.write_table(table(), tmp_path / "a.parquet")
    pyarrow.feather.write_feather(table(), tmp_path / "a.arrow")
    for suffix in ("jsonl", "parquet", "arrow"):
        message = fault(cache, tmp_path / f"a.{suffix}", "data.column", text_column="texts")
        assert "no column 'texts'; did you mean 'text'? (columns: id, text)" in message


@pytest.mark.parametrize("column", ["text", None])
def test_several_columns_of_one_name_are_refused(column: str | None, tmp_path: Path) -> None:
    written = pyarrow.Table.from_arrays([pyarrow.array([text]) for text in "abc"], names=["text", "text", "other"])
    pyarrow.parquet.write_table(written, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", written.schema) as stream:
        stream.write(written)
    for path in tmp_path.iterdir():
        reader = READERS[path.suffix]
        with pytest.raises(DataError, match="has 2 columns 'text'"):
            list(reader(path, column))
        assert [document.text for document in reader(path, "other")] == ["c"]


def test_nulls_are_skipped_and_numbers_refused(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n\n{"text": "one"}\n')
    assert read(cache, path) == ["one"]
    path.write_text('{"text": "one"}\n{"text": 12345}\n')
    assert "line 2: column 'text' contains a int" in fault(cache, path, "data.column")


@pytest.mark.parametrize("line", ['{"text": "cut', '["text"]', "plain"])
def test_a_line_that_is_not_a_json_object_is_named(cache: Cache, tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + line)
    assert "a.jsonl, line 2: is" in fault(cache, tmp_path / "a.jsonl", "data.json")


def test_a_line_nested_too_deeply_is_named(cache: Cache, tmp_path: Path) -> None:
    for number, line in enumerate(("[" * 100_000, '{"a":' * 100_000)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text('{"text": "a"}\n' + line)
        assert f"{number}.jsonl, line 2: is nested too deeply" in fault(cache, path, "data.json")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b"3", b"{}", b'{"splits": 3}', b'{"splits": [1]}', b"\xff", b"[" * 100_000]
)
def test_an_invalid_dataset_dict_is_reported(cache: Cache, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dataset_dict.json").write_bytes(content)
    assert "dataset_dict.json: does not contain" in fault(cache, tmp_path, "data.format")


def test_a_fifo_in_place_of_a_dataset_dict_is_not_waited_for(cache: Cache, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dataset_dict.json")
    assert "dataset_dict.json: does not contain" in fault(cache, tmp_path, "data.format")


@pytest.mark.parametrize("kind", [".jsonl", ".txt", ".txt.gz", ".parquet", ".arrow"])
def test_names_that_are_not_utf8(cache: Cache, tmp_path: Path, kind: str) -> None:
    """The system's names are bytes. Damaged, such a file is told as any other."""
    good, bad = (tmp_path / where / os.fsdecode(b"caf\xe9" + kind.encode()) for where in ("good", "bad"))
    for path in (good, bad):
        path.parent.mkdir()
    texts = ["one", "two"]
    if kind == ".jsonl":
        write_jsonl(good, texts)
    elif kind.startswith(".txt"):
        texts = ["one"]
        good.write_bytes(gzip.compress(b"one") if kind == ".txt.gz" else b"one")
    else:
        written = pyarrow.table({"text": texts})
        with good.open("wb") as file:
            if kind == ".parquet":
                pyarrow.parquet.write_table(written, file)
            else:
                with pyarrow.ipc.new_stream(file, written.schema) as stream:
                    stream.write_table(written)
    assert read(cache, good.parent) == texts
    bad.write_bytes(b"\xff")
    with pytest.raises(DataError) as caught:
        read(cache, bad.parent)
    assert "Traceback" not in caught.value.report()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst"])
def test_damaged_files_are_named(cache: Cache, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"ARROW1 this is not what its name says")
    assert name in fault(cache, tmp_path / name, "data.read")


def test_a_truncated_archive_is_named(cache: Cache, tmp_path: Path) -> None:
    whole = gzip.compress(write_jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert "a.jsonl.gz" in fault(cache, tmp_path / "a.jsonl.gz", "data.read")


def test_unknown_source_names_are_refused(cache: Cache, tmp_path: Path) -> None:
    assert f"matches {tmp_path}/nothing.jsonl" in fault(cache, tmp_path / "nothing.jsonl", "data.missing")
    assert "has no data files (.txt, .jsonl" in fault(cache, tmp_path / "*.jsonl", "data.missing")
    (tmp_path / "empty").mkdir()
    assert "has no data files" in fault(cache, tmp_path / "empty", "data.missing")
    message = fault(cache, "nobody/nothing", "data.missing")
    assert "'nobody/nothing' is not a file, folder or glob on this machine, nor a dataset that can be loaded" in message


def test_files_of_several_or_unknown_kinds_are_refused(cache: Cache, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.txt").write_text("licence")
    (tmp_path / "c.xml").write_text("a,b")
    assert "files of several kinds (1 .jsonl, 1 .txt)" in fault(cache, tmp_path, "data.mixed")
    message = fault(cache, tmp_path / "c.xml", "data.format")
    assert "c.xml' has an unknown format (.txt, .jsonl" in message
    assert message.endswith("convert it to .jsonl or .parquet")


def test_the_faults_of_all_sources_are_reported_at_once(cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_corpora([Source(str(tmp_path / "x.txt")), Source("stdlib"), Source(str(tmp_path / "y.txt"))], cache)
    assert [problem.field for problem in caught.value.problems] == ["data.sources.0.name", "data.sources.2.name"]


def test_a_file_that_changes_while_it_is_read_is_refused(cache: Cache, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (corpus,) = open_corpora([Source(str(path))], cache)
    write_jsonl(path, TEXTS[::-1])
    with pytest.raises(DataError, match="changed while it was read"):
        list(corpus.documents())


def test_the_identity_of_a_source_is_its_content(cache: Cache, tmp_path: Path) -> None:
    def identity(name: Path, **fields: Any) -> str:
        return open_corpora([Source(str(name), **fields)], cache)[0].identity

    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = identity(path)
    assert identity(write_jsonl(tmp_path / "elsewhere/b.jsonl", TEXTS)) == first
    assert identity(path, weight=2.0) == first
    assert identity(path, text_column="id") != first
    write_jsonl(path, [TEXTS[0].replace("0", "9", 1), *TEXTS[1:]])  # as long as before
    assert identity(path) != first


def test_the_split_is_a_property_of_the_text() -> None:
    chosen = {text for text in make_texts(2000) if held_out(text, 0.1)}
    assert 150 < len(chosen) < 250
    assert chosen < {text for text in make_texts(2000) if held_out(text, 0.2)}
    assert not any(held_out(text, 0.0) for text in chosen)
