"""Tokenizers restore every text, count its bytes, and are trained, cut, read and stored as the recipe says."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from llmtrain.data import notes, prepare
from llmtrain.data import tokenizer as module
from llmtrain.data.tokenizer import Encoder, split_text, token_bytes
from llmtrain.errors import DataError, RecipeError
from tests.helpers.small_corpora import MakeRecipe, make_texts, write_jsonl, write_tokenizer

HARD = [
    "",
    " ",
    "a  b\t\n\n c\r\n",
    "naïve 雪 🙂 \u200b\x00\x7f",
    "<|endoftext|> is text",
    "  def f(x):\n\treturn 0x1F\n",
]


@pytest.mark.parametrize("text", [*HARD, "\n".join(make_texts(20))])
def test_a_trained_tokenizer_restores_every_text(make_recipe: MakeRecipe, corpus_file: Path, text: str) -> None:
    prepared = prepare(make_recipe(corpus_file))
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    ids = Encoder(prepared.tokenizer_dir).encode([text])[0]
    assert tokenizer.decode(ids) == text
    assert tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids
    assert prepared.eos_id not in ids  # no text can end the document


@pytest.mark.parametrize("text", HARD)
def test_bytes_of_tokens_add_up_to_those_of_the_text(make_recipe: MakeRecipe, corpus_file: Path, text: str) -> None:
    prepared = prepare(make_recipe(corpus_file))
    found = token_bytes(prepared.tokenizer_dir, prepared.vocab_size)
    assert found is not None
    assert found[Encoder(prepared.tokenizer_dir).encode([text])[0]].sum() == len(text.encode())
    assert found[prepared.eos_id] == 0


def test_bytes_of_tokens_with_marks_for_spaces_or_without_a_rule(tmp_path: Path) -> None:
    texts = ["<unk>", "▁", "n", "▁n", "a", "ï", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {text: number for number, text in enumerate(texts)}
    model = models.BPE(vocabulary, [("▁", "n")], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["<unk>"])
    made.save(str(tmp_path / "tokenizer.json"))
    found, text = token_bytes(tmp_path, len(vocabulary)), "na na ï雪"
    assert found is not None
    assert found[made.encode(text).ids].sum() == len(text.encode()) + 1  # it puts a space before the text
    made.decoder = decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    assert token_bytes(tmp_path, len(vocabulary)) is None


def test_a_trained_tokenizer_follows_its_recipe(make_recipe: MakeRecipe, corpus_file: Path) -> None:
    prepared = prepare(make_recipe(corpus_file, tokenizer={"vocab_size": 290}))
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    assert prepared.vocab_size == len(tokenizer) == 290
    assert prepared.eos_id == tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id
    assert prepared.tokenizer.bos_id is None


def test_a_tokenizer_is_not_trained_on_held_out_documents(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    from llmtrain.data.sources.corpus import held_out

    texts = make_texts(100)
    marked = [text + " qqzz" * 50 if held_out(text + " qqzz" * 50, 0.3) else text for text in texts]
    assert marked != texts
    prepared = prepare(make_recipe(write_jsonl(tmp_path / "a.jsonl", marked), eval_fraction=0.3))
    vocabulary = AutoTokenizer.from_pretrained(prepared.tokenizer_dir).get_vocab()
    assert not any("qq" in token for token in vocabulary)


def test_long_texts_are_cut_without_changing_the_tokens(
    make_recipe: MakeRecipe, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder(prepare(make_recipe(corpus_file)).tokenizer_dir)
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 500)
    for text in ("\n".join(make_texts(100)), "word " * 3000, "line\n" * 3000):
        pieces = list(split_text(text))
        assert "".join(pieces) == text
        assert len(pieces) > 10
        assert max(map(len, pieces)) <= 500
        assert [token for ids in encoder.encode(pieces) for token in ids] == encoder.encode([text])[0]
    assert "".join(split_text("x" * 5001)) == "x" * 5001


def test_a_tokenizer_is_read_from_a_folder(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path, texts: list[str]
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    prepared = prepare(make_recipe(corpus_file, tokenizer=str(folder), eval_fraction=0.0))
    assert (prepared.vocab_size, prepared.eos_id, prepared.tokenizer.bos_id) == (258, 1, None)
    assert not prepare(make_recipe(corpus_file, tokenizer=str(folder), eval_fraction=0.0)).made
    stream = prepared.sources[0].store.streams["train"]
    assert stream.tokens[stream.documents[1] - 1] == 1
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    assert tokenizer.decode(stream.tokens[: stream.documents[1] - 1].tolist()) == texts[0]


def test_a_start_token_is_added_to_each_document(make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path) -> None:
    prepared = prepare(make_recipe(corpus_file, tokenizer=str(write_tokenizer(tmp_path / "tokenizer", bos=True))))
    assert prepared.tokenizer.bos_id == 0
    stream = prepared.sources[0].store.streams["train"]
    starts = stream.documents[:-1].astype(int)
    assert (stream.tokens[starts] == 0).all()
    assert (stream.tokens == 0).sum() == (stream.tokens == 1).sum() == len(starts)


def test_a_class_that_changes_the_tokens_is_told_and_can_be_avoided(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path
) -> None:
    """Qwen2's splits numbers into digits, whatever the file says."""
    folder = write_tokenizer(tmp_path / "own", tokenizer_class="Qwen2Tokenizer", pad_token="</s>", unk_token="</s>")
    described = json.loads((folder / "tokenizer.json").read_text())
    described["model"]["merges"] = [["2", "0"], ["20", "2"]]
    described["model"]["vocab"] |= {"20": 258, "202": 259}
    described["added_tokens"].append({**described["added_tokens"][0], "id": 260, "content": "<|endoftext|>"})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {}
    for chosen in ("auto", "generic"):
        recipe = make_recipe(corpus_file, tokenizer=str(folder), tokenizer_class=chosen)
        prepared = prepare(recipe)
        found[chosen] = Encoder(prepared.tokenizer_dir).encode(["202 3"])[0]
        # What is trained on is what `transformers` reads when it loads the copy, which is exported.
        loaded = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
        assert loaded("202 3", add_special_tokens=False)["input_ids"] == found[chosen]
        told = [note for note in notes(prepared, recipe) if "read in two ways" in note]
        if chosen == "generic":
            assert not told
        else:
            assert "class Qwen2Tokenizer reads '2' '0' '2' '3' ',', but its tokenizer.json '202' '3' ','" in told[0]
    assert len(found["auto"]) == 5
    assert found["generic"] == own.encode("202 3").ids
    with pytest.raises(RecipeError, match="no effect on a tokenizer that is trained"):
        make_recipe(corpus_file, tokenizer_class="generic")


def test_a_changed_vocabulary_of_tekken_is_another_tokenizer(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    special = [{"rank": rank, "token_str": text} for rank, text in enumerate(["<unk>", "<s>", "</s>"])]
    tokens = [bytes([byte]) for byte in range(256)]
    for token in (b"th", b"he"):
        tokens.append(token)
        vocab = [{"rank": rank, "token_bytes": base64.b64encode(one).decode()} for rank, one in enumerate(tokens)]
        config = {"pattern": r"\s?\w+|\s+|[^\s\w]+", "default_num_special_tokens": len(special)}
        content = json.dumps({"config": config, "vocab": vocab, "special_tokens": special})
        (tmp_path / "tekken.json").write_text(content)
        prepared = prepare(make_recipe(corpus_file, tokenizer=str(tmp_path)))
        assert prepared.vocab_size == len(special) + len(tokens)


def test_a_changed_additional_template_is_another_tokenizer(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    made = make_recipe(corpus_file, tokenizer=str(folder))
    template = folder / "additional_chat_templates" / "tool_use.jinja"
    identity = prepare(made).tokenizer.identity
    template.parent.mkdir()
    for text in ("one", "two"):
        template.write_text(text)
        prepared = prepare(made)
        assert AutoTokenizer.from_pretrained(prepared.tokenizer_dir).chat_template == {"tool_use": text}
        assert prepared.tokenizer.identity == identity  # the tokens are the same


def fault(make_recipe: MakeRecipe, corpus_file: Path, rule: str, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepare(make_recipe(corpus_file, **data))
    assert [problem.rule for problem in caught.value.problems] == [rule]
    return str(caught.value)


def test_tokenizers_that_cannot_be_used(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    endless = str(write_tokenizer(tmp_path / "endless", eos_token=None))
    assert "has no end-of-text token" in fault(make_recipe, corpus_file, "data.eos", tokenizer=endless)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in fault(make_recipe, corpus_file, "data.tokenizer", tokenizer=str(empty))
    assert "nobody/nothing" in fault(make_recipe, corpus_file, "data.tokenizer", tokenizer="nobody/nothing")
    (empty / "config.json").write_text('{"model_type": "llama"}')
    told = fault(make_recipe, corpus_file, "data.tokenizer", tokenizer=str(empty))
    assert f"'{empty}' contains no vocabulary" in told or f"'{empty}' is neither a folder with a tokenizer" in told
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for content in ("{", "[]", "[" * 100_000):
            broken = write_tokenizer(tmp_path / f"{name}{content[:2]}{len(content)}")
            (broken / name).write_text(content)
            assert str(broken) in fault(make_recipe, corpus_file, "data.tokenizer", tokenizer=str(broken))
    small = fault(make_recipe, corpus_file, "data.vocab", tokenizer={"vocab_size": 256})
    assert "256 tokens are too few for 256 bytes" in small


def test_a_tokenizer_larger_than_the_model_is_refused(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(corpus_file, tokenizer=str(write_tokenizer(tmp_path / "tokenizer")))
    recipe = recipe.with_(**{"model.config.vocab_size": 100})
    with pytest.raises(DataError, match=r"has 258 tokens, but the model's vocabulary has only 100"):
        prepare(recipe)


@pytest.mark.parametrize("config", [{"vocab_size": 257}, {"text_config": {"vocab_size": 257}}])
def test_a_tokenizer_larger_than_pretrained_weights_is_refused(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Nobody loads torch, or a weight, to find out."""
    recipe = make_recipe(corpus_file, tokenizer=str(write_tokenizer(tmp_path / "tokenizer")))
    model = tmp_path / "model"
    model.mkdir()
    recipe = recipe.with_(**{"model.architecture": None, "model.pretrained": str(model)})
    for rows, refused in ((config, True), (json.loads(json.dumps(config).replace("257", "258")), False)):
        (model / "config.json").write_text(json.dumps({"model_type": "llama", **rows}))
        if refused:
            with pytest.raises(DataError, match=r"258 tokens, .* only 257 .*\n.*data.tokenizer=") as caught:
                prepare(recipe)
            assert caught.value.exit_code == 3
        else:
            prepare(recipe)


def test_a_name_unknown_to_the_hub_is_looked_up_once(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}"
        close_session()  # a session that was opened offline stays offline
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", where)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", where + "/{repo_id}/{revision}/{filename}"
        )
        told = fault(make_recipe, corpus_file, "data.tokenizer", tokenizer="toks/mine")
        assert "the hub has no such repository, or it is private" in told
        assert len(asked) == 1
        for name in ("./toks/mine", str(tmp_path / "toks"), "~/toks", "a/b/c"):
            assert f"the folder '{name}' does not exist" in fault(
                make_recipe, corpus_file, "data.tokenizer", tokenizer=name
            )
        assert len(asked) == 1
        told = fault(make_recipe, Path("data/mine"), "data.missing", tokenizer={"vocab_size": 300})
        assert len(asked) == 2
        server.shutdown()
    close_session()
    assert "nor a dataset on the hub" in told


def test_a_fault_in_the_corpus_ends_the_training_of_a_tokenizer(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nbroken\n')
    with pytest.raises(DataError, match="line 2"):
        prepare(make_recipe(tmp_path / "a.jsonl"))


def test_code_beside_a_tokenizer_is_not_run(
    make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "own")
    code = {"model_type": "own_of_the_tests", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(code))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    assert prepare(make_recipe(corpus_file, tokenizer=str(folder))).tokenizer.eos_id == 1
    assert asked == []
