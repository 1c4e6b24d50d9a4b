"""Stores are made once and are complete, whatever happens during preparation."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from llmtrain.cli import app
from llmtrain.data import Prepared, Progress, data_summary, notes, prepare, report, verify_prepared
from llmtrain.data.samples import fill_fraction
from llmtrain.errors import DataError, Exit
from llmtrain.recipe import Recipe
from llmtrain.system.streams import short_names
from tests.helpers.small_corpora import MakeRecipe, make_texts, whole_batches, write_jsonl

PREPARE = """
    import json, sys, time
    from llmtrain.data import prepare
    from llmtrain.recipe import parse_recipe
    recipe = parse_recipe(json.loads(sys.argv[1]))
"""


def python(code: str, recipe: Recipe, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Starts `code`, after `PREPARE`, in another process."""
    script = textwrap.dedent(PREPARE) + textwrap.dedent(code)
    command = [*prefix, sys.executable, "-c", script, recipe.model_dump_json(), *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, text=True, env=environment
    )


def documents(prepared: Prepared, split: str) -> list[str]:
    """The texts of a split, decoded from the store."""
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    stream = prepared.sources[0].store.streams[split]  # type: ignore[index]
    bounds = stream.documents.astype(int).tolist()
    return [tokenizer.decode(stream.tokens[a : b - 1].tolist()) for a, b in itertools.pairwise(bounds)]


def partials(cache_dir: Path) -> list[Path]:
    return list(cache_dir.rglob("*.partial"))


def test_a_store_holds_the_documents(make_recipe: MakeRecipe, corpus_file: Path, texts: list[str]) -> None:
    prepared = prepare(make_recipe(corpus_file))
    train, held = documents(prepared, "train"), documents(prepared, "eval")
    assert sorted(train + held) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert 5 < len(held) < 40
    store = prepared.sources[0].store
    tokens = np.asarray(store.streams["train"].tokens)
    assert tokens.dtype == np.uint16
    assert np.array_equal(store.counts(), np.bincount(tokens, minlength=prepared.vocab_size))


def test_the_split_is_stable_under_reordering(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path, texts: list[str]
) -> None:
    first = prepare(make_recipe(corpus_file))
    write_jsonl(tmp_path / "other/1.jsonl", texts[150:] + make_texts(50, seed=9))
    write_jsonl(tmp_path / "other/2.jsonl", texts[149::-1])
    second = prepare(make_recipe(tmp_path / "other"))
    assert set(documents(first, "eval")) == set(documents(second, "eval")) & set(texts)
    assert set(documents(first, "train")) == set(documents(second, "train")) & set(texts)


def test_the_second_call_makes_nothing_and_reads_nothing(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    first = prepare(make_recipe(corpus_file))
    assert first.made
    assert first.sources[0].made
    check = """
        import builtins, io
        from pathlib import Path
        opened, plain, path_open = [], builtins.open, Path.open
        Path.open = lambda self, *a, **k: (opened.append(str(self)), path_open(self, *a, **k))[1]
        prepared = prepare(recipe)
        assert not prepared.made and not prepared.sources[0].made and not prepared.tokenizer.made
        assert sys.argv[2] not in opened, opened
        heavy = {"torch", "datasets", "transformers", "tokenizers", "pyarrow"} & set(sys.modules)
        print(heavy or "light")
    """
    process = python(check, make_recipe(corpus_file), str(corpus_file))
    assert process.communicate(timeout=60)[0] == "light\n"


def test_the_first_call_loads_neither_torch_nor_datasets(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    check = 'prepare(recipe); print({"torch", "datasets", "transformers"} & set(sys.modules) or "light")'
    assert python(check, make_recipe(corpus_file)).communicate(timeout=60)[0] == "light\n"


def test_only_affected_stores_are_rebuilt_after_a_change(
    make_recipe: MakeRecipe, corpus_file: Path, cache_dir: Path
) -> None:
    first = prepare(make_recipe(corpus_file))
    longer = prepare(make_recipe(corpus_file, sequence_length=64))
    assert longer.made
    assert not longer.sources[0].store.made  # packed again, not tokenized again
    assert longer.sources[0].store.key == first.sources[0].store.key
    assert not prepare(make_recipe(corpus_file, packing="concat")).made
    assert not prepare(make_recipe(corpus_file, mask_documents=False)).made
    assert not prepare(make_recipe({"name": str(corpus_file), "weight": 2.0})).made
    assert prepare(make_recipe(corpus_file, eval_fraction=0.2)).sources[0].store.made
    assert prepare(make_recipe(corpus_file, tokenizer={"vocab_size": 310})).sources[0].store.made
    assert not prepare(make_recipe(corpus_file)).made
    assert not partials(cache_dir)


def test_another_folder_gives_the_same_key(make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path) -> None:
    """Nodes that share no folder train a tokenizer each, and must agree, however many cores they have."""
    first = prepare(make_recipe(corpus_file, tokenizer={"vocab_size": 600}))
    recipe = make_recipe(corpus_file, tokenizer={"vocab_size": 600}, cache_dir=str(tmp_path / "other"))
    code = """
        import os
        os.environ["RAYON_NUM_THREADS"] = "1"
        prepared = prepare(recipe)
        print(prepared.made, prepared.key)
    """
    assert python(code, recipe).communicate(timeout=60)[0] == f"True {first.key}\n"
    assert prepare(make_recipe(corpus_file, tokenizer={"vocab_size": 280})).key != first.key


def test_simultaneous_processes_prepare_the_store_once(
    make_recipe: MakeRecipe, corpus_file: Path, cache_dir: Path
) -> None:
    together = """
        print("ready", flush=True)
        sys.stdin.readline()
        prepared = prepare(recipe)
        print(json.dumps([prepared.made, prepared.sources[0].key, prepared.tokenizer.made]))
    """
    processes = [python(together, make_recipe(corpus_file)) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(tokenizer_made for _, _, tokenizer_made in results) == 1
    assert len({key for _, key, _ in results}) == 1
    assert len([path for path in (cache_dir / "tokens").iterdir() if path.is_dir()]) == 1
    assert not partials(cache_dir)


SLOW = """
    from llmtrain.data import tokenize
    encode = tokenize.Encoder.encode
    def slow(encoder, texts):
        print("tokenizing", flush=True)
        time.sleep(float(sys.argv[2]))
        return encode(encoder, texts)
    tokenize.Encoder.encode = slow
    prepare(recipe)
"""


def test_a_waiting_process_reports_it_and_opens_the_result_of_the_other(
    make_recipe: MakeRecipe, corpus_file: Path
) -> None:
    first = python(SLOW, make_recipe(corpus_file), "1.5")
    assert first.stdout is not None
    assert first.stdout.readline() == "tokenizing\n"
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    second = prepare(make_recipe(corpus_file), Progress(console))
    assert not second.sources[0].store.made
    assert "Another process is preparing" in console.export_text()
    assert first.communicate(timeout=30)
    assert first.returncode == 0


def test_a_killed_preparation_is_repeated(make_recipe: MakeRecipe, corpus_file: Path, cache_dir: Path) -> None:
    process = python(SLOW, make_recipe(corpus_file), "60")
    assert process.stdout is not None
    assert process.stdout.readline() == "tokenizing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(partials(cache_dir)) == 1
    # Another store of the same kind sweeps it away, and its own makes it again.
    prepare(make_recipe(corpus_file, eval_fraction=0.3))
    assert not partials(cache_dir)
    prepared = prepare(make_recipe(corpus_file))
    assert prepared.sources[0].store.made
    assert len(documents(prepared, "train")) > 100


def test_a_temporary_folder_in_use_is_not_removed(make_recipe: MakeRecipe, corpus_file: Path, cache_dir: Path) -> None:
    process = python(SLOW, make_recipe(corpus_file), "2")
    assert process.stdout is not None
    assert process.stdout.readline() == "tokenizing\n"
    prepare(make_recipe(corpus_file, eval_fraction=0.3))
    assert len(partials(cache_dir)) == 1
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not prepare(make_recipe(corpus_file)).made


def test_an_interrupted_preparation_leaves_no_files(
    make_recipe: MakeRecipe, corpus_file: Path, cache_dir: Path
) -> None:
    process = python(SLOW, make_recipe(corpus_file), "60")
    assert process.stdout is not None
    assert process.stdout.readline() == "tokenizing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[0]
    assert not partials(cache_dir)


def can_mount() -> bool:
    if not shutil.which("unshare"):
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs `unshare -rm` with permission to mount a tmpfs")


@needs_mount
def test_a_full_disk_leaves_the_old_store_usable(make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path) -> None:
    big = write_jsonl(tmp_path / "big.jsonl", make_texts(6000, seed=3))
    check = """
        from llmtrain.errors import DataError
        from pathlib import Path
        from llmtrain.data.loader import BatchLoader
        old = prepare(recipe)
        try:
            prepare(recipe.with_(**{"data.sources.0.name": sys.argv[2]}))
        except DataError as error:
            print(int(error.exit_code), error)
        print("partial", list(Path(recipe.data.cache_dir).rglob("*.partial")))
        again = prepare(recipe)
        print("made", again.made, again.unigram_loss() == old.unigram_loss())
    """
    (tmp_path / "cache").mkdir()
    mount = f'mount -t tmpfs -o size=700k none {tmp_path}/cache && exec "$@"'
    process = python(check, make_recipe(corpus_file), str(big), prefix=("unshare", "-rm", "sh", "-c", mount, "sh"))
    output = process.communicate(timeout=60)[0]
    assert f"3 {tmp_path}/cache: the disk is full: " in output
    assert "one store needs" in output
    assert "bytes are free" in output
    assert "partial []\nmade False True\n" in output


@needs_mount
def test_a_cache_that_cannot_be_written(make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path) -> None:
    prepare(make_recipe(corpus_file))
    check = """
        from llmtrain.errors import DataError
        print("made", prepare(recipe).made)
        try:
            prepare(recipe.with_(**{"data.sequence_length": 64}))
        except DataError as error:
            print(error)
    """
    mount = f'mount --bind {tmp_path}/cache {tmp_path}/cache && mount -o remount,bind,ro {tmp_path}/cache && exec "$@"'
    process = python(check, make_recipe(corpus_file), prefix=("unshare", "-rm", "sh", "-c", mount, "sh"))
    output = process.communicate(timeout=60)[0]
    assert "made False\n" in output  # what is there is used
    assert f"{tmp_path}/cache: cannot be written: Read-only file system [data.cache]" in output


def test_a_cache_below_a_file_is_refused(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be written: Not a directory \[data.cache\]"):
        prepare(make_recipe(corpus_file, cache_dir=str(corpus_file)))


def test_a_truncated_store_is_refused(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    store = prepare(make_recipe(corpus_file)).sources[0].store
    path = store.path / "train_tokens.bin"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(DataError, match=rf"train_tokens.bin: has .* were written(.|\n)*remove {store.path}"):
        prepare(make_recipe(corpus_file))


def read_all(prepared: Prepared) -> None:
    """Reads what a run reads."""
    loader = whole_batches(prepared, prepared.train_sequences)
    read = 0
    for batch in loader.train_batches(0):
        if (read := read + batch.samples) >= prepared.train_sequences:
            break
    list(loader.eval_batches())
    prepared.unigram_loss(8)


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_a_changed_byte_stops_the_run_that_reads_it(
    make_recipe: MakeRecipe, corpus_file: Path, packing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(corpus_file, packing=packing)
    prepared = prepare(recipe)
    read_all(prepared)
    paths = [path for folder in prepared.sources[0].folders for path in sorted(folder.glob("*.bin"))]
    assert len(paths) == (5 if packing == "concat" else 13)
    for path in paths:
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        message = rf"{path}: the bytes .* not those that were written .*\n *remove {path.parent} and prepare again"
        is_read = packing == "concat" or "_documents" not in path.name  # packing has made an index of these
        for look in (lambda found: verify_prepared(found, Progress()), *([read_all] if is_read else [])):
            with pytest.raises(DataError, match=message) as caught:
                look(prepare(recipe))
            assert caught.value.exit_code == Exit.DATA
        path.write_bytes(content)
    read_all(prepare(recipe))
    recipe_file = corpus_file.with_name("recipe.yaml")
    recipe_file.write_text(recipe.model_dump_json())
    with pytest.raises(SystemExit):
        app(["data", str(recipe_file), "--verify"])
    size = sum(path.stat().st_size for path in paths)
    assert f"{size:,} bytes are as they were written" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", '{"text": ""}\n{"text": null}\n'])
def test_an_empty_corpus_is_refused(make_recipe: MakeRecipe, tmp_path: Path, cache_dir: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"data.sources.0.name: '.*a.jsonl' contains no text \[data.empty\]"):
        prepare(make_recipe(tmp_path / "a.jsonl"))
    assert not partials(cache_dir)


def test_evaluation_without_held_out_documents_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(write_jsonl(tmp_path / "a.jsonl", ["one document", "another"]), eval_fraction=0.001)
    assert prepare(recipe).eval_sequences() == 0
    with pytest.raises(DataError, match=r"0.001 held out 0 of 2 documents(.|\n)*evaluation.sources"):
        prepare(recipe.with_(**{"evaluation.every_steps": 10}))


def test_the_faults_of_all_sources_are_reported_at_once(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("broken\n")
    folder = prepare(make_recipe(corpus_file)).tokenizer_dir
    with pytest.raises(DataError) as caught:
        prepare(make_recipe(tmp_path / "a.jsonl", corpus_file, tmp_path / "b.jsonl", tokenizer=str(folder)))
    assert [problem.rule for problem in caught.value.problems] == ["data.json"] * 2


def test_the_cache_folder_follows_the_environment(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "chosen"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = make_recipe(corpus_file, cache_dir=None)
    assert prepare(recipe).tokenizer_dir.is_relative_to(tmp_path / "chosen")
    monkeypatch.delenv("LLMTRAIN_CACHE")
    assert prepare(recipe).tokenizer_dir.is_relative_to(tmp_path / "home/.cache/llmtrain")


def shown(prepared: Prepared, recipe: Recipe, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(report(prepared, recipe))
    return capture.get()


def test_the_report_shows_the_numbers_of_each_source(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    recipe = make_recipe(corpus_file)
    prepared = prepare(recipe)
    whole = data_summary(prepared, recipe)
    facts = whole["sources"][0]["train"]
    assert json.loads(json.dumps(whole)) == whole
    text = shown(prepared, recipe, 160)
    for number in (facts["documents"], facts["tokens"], facts["sequences"]):
        assert f"{number:,}" in text
    assert f"{facts['fill']:.2%}" in text
    concat = make_recipe(corpus_file, packing="concat")
    text = shown(prepare(concat), concat, 160)
    assert "found in the cache" in text
    assert "are unused" in text


def test_the_report_in_80_columns_has_short_and_whole_names(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path
) -> None:
    long = write_jsonl(tmp_path / ("a-corpus-of-a-long-name" * 4) / "b.jsonl", make_texts(300))
    recipe = make_recipe(long, corpus_file, sequence_length=16)
    text = shown(prepare(recipe), recipe, 80)
    assert "…" not in text
    rows = [line.split() for line in text.splitlines() if " train " in line or " eval " in line]
    assert [row[0] for row in rows] == ["b.jsonl", "b.jsonl", "corpus.jsonl", "corpus.jsonl"]
    assert {len(row) for row in rows} == {6, 7}  # no number is broken
    assert f"b.jsonl is {long}" in text.replace("\n", "")


def test_a_short_name_is_as_long_as_it_has_to_be() -> None:
    names = [
        "/data/web/en/part.jsonl",
        "/data/code/en/part.jsonl",
        "owner/name",
        "a" * 50,
        "/data/code/en/part.jsonl #1",
    ]
    short = ["web/en/part.jsonl", "code/en/part.jsonl", "owner/name", "a" * 50, "part.jsonl #1"]
    assert short_names(names) == dict(zip(names, short, strict=True))
    assert short_names(["/corpora/of/a/project/", "/corpora/of/a"]) == {
        "/corpora/of/a/project/": "project",
        "/corpora/of/a": "/corpora/of/a",
    }


def test_a_template_without_conversations_is_noted(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    for template, told in ((None, []), ("chatml", ["data.chat_template has no effect: no source has conversations"])):
        recipe = make_recipe(corpus_file, chat_template=template)
        assert [note for note in notes(prepare(recipe), recipe) if "chat_template" in note] == told


def test_the_summary_counts_the_epochs_of_each_source(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path
) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", make_texts(60, seed=5))
    recipe = make_recipe({"name": str(corpus_file), "weight": 1.0}, {"name": str(few), "weight": 3.0})
    recipe = recipe.with_(**{"train.max_steps": 40})
    prepared = prepare(recipe)
    epochs = [source["epochs"] for source in data_summary(prepared, recipe)["sources"]]
    drawn = whole_batches(prepared).sample_ids(0, 320)[0]
    for number, source in enumerate(prepared.sources):
        assert epochs[number] == int((drawn == number).sum()) / len(source.train)
    assert epochs[0] < 1 < epochs[1]
    (note,) = notes(prepared, recipe)
    assert note == f"{few} repeats: 40 steps are {epochs[1]:.3g} epochs of it"


def test_progress_is_plain_lines_without_a_terminal(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        prepare(make_recipe(corpus_file), Progress(console))
    lines = capture.get().splitlines()
    assert [line.split()[0] for line in lines] == ["Hashing", "Training", "Tokenizing", "Packing"]
    with console.capture() as capture:
        prepare(make_recipe(corpus_file), Progress(console))
    assert capture.get() == ""


def test_progress_is_shown_on_a_terminal(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    console = Console(width=160, force_terminal=True)
    with console.capture() as capture:
        prepare(make_recipe(corpus_file), Progress(console))
    assert "tokens/s" in capture.get()


@pytest.mark.slow
def test_the_standard_library_is_packed_full(make_recipe: MakeRecipe) -> None:
    """The corpus of the tiny recipe: hardly a slot is padding.

    Even an optimal packing of n random remainders wastes in the order of sqrt(n) sequences, so a
    longer T wastes a larger share of this small corpus.
    """
    for length, least in ((256, 0.999), (1024, 0.99)):
        recipe = make_recipe("stdlib", tokenizer={"vocab_size": 512}, sequence_length=length)
        assert fill_fraction(prepare(recipe).sources[0].train) > least
