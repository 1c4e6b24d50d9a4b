"""Conversations from files to batches: found, masked, packed whole, with labels for the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from llmtrain.data import BatchLoader, MicroBatch, Prepared, notes, prepare
from llmtrain.data.samples import NO_TARGET, fill_fraction
from llmtrain.engines.forward import forward
from llmtrain.engines.optim import gradients_of
from llmtrain.errors import DataError
from llmtrain.models import build_model
from llmtrain.models.documents import keep_apart
from llmtrain.models.tiny.documents_check import mixing_parts
from llmtrain.trials.verify.compare import FP32
from llmtrain.trials.verify.documents import read_documents
from tests.helpers.chat_tokenizers import Case, case, write_chat_tokenizer
from tests.helpers.small_chats import ROWS, chat, recipe


@pytest.fixture
def chatml(tmp_path: Path) -> Case:
    return case("chatml", tmp_path / "tokenizer")


TINY = {"vocab_size": 400, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_sequences_hold_whole_conversations_with_labels_on_the_assistants_tokens(chatml: Case) -> None:
    made = recipe(chatml, ROWS)
    prepared = prepare(made)
    samples, stream = prepared.sources[0].train, prepared.sources[0].store.streams["train"]
    rows = samples.read(np.arange(len(samples)))
    assert stream.loss_mask is not None
    assert np.array_equal((rows.labels != NO_TARGET).sum(axis=1), samples.count_targets(np.arange(len(samples))))
    assert (rows.labels != NO_TARGET).sum() == stream.loss_mask.sum()
    end = chatml.encoder()._plain.token_to_id("<|im_end|>")
    answers = sum(len(row["messages"]) // 2 for row in ROWS)
    assert prepared.eos_id == end  # padding has the same token, which does not hide the true ends
    assert (rows.labels == end).sum() == answers
    assert (rows.position_ids == 0).sum() == len(ROWS) + _paddings(prepared)
    said = "\n".join(notes(prepared, made))
    assert "60 conversations (messages from 'messages')" in said
    assert f"{stream.loss_mask.sum():,} trained tokens" in said


def _paddings(prepared: Prepared) -> int:
    """How many sequences end in padding, whose positions begin at 0 again."""
    samples: Any = prepared.sources[0].train
    filled = np.add.reduceat(samples.lengths.astype(int), samples.offsets[:-1].astype(int))
    return int((filled < samples.sequence_length).sum())


def test_the_reference_reads_the_same_labels_one_document_at_a_time(chatml: Case) -> None:
    made = recipe(chatml, ROWS)
    prepared = prepare(made)
    samples = prepared.sources[0].train
    rows = samples.read(np.arange(len(samples)))
    for number in range(len(samples)):
        documents = read_documents(samples, number, made.data, prepared.eos_id)
        assert np.concatenate([one.inputs.numpy() for one in documents]).tolist() == rows.input_ids[number].tolist()
        assert np.concatenate([one.targets.numpy() for one in documents]).tolist() == rows.labels[number].tolist()


def test_the_targets_of_a_batch_are_those_of_all_ranks(chatml: Case) -> None:
    prepared = prepare(recipe(chatml, ROWS))
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "dp_size": 2}
    ranks = [BatchLoader(prepared, seed=1, dp_rank=rank, **sizes).train_batch(8) for rank in (0, 1)]
    seen = sum(int((one.labels != NO_TARGET).sum()) for batch in ranks for one in batch.micro_batches)
    assert [batch.target_tokens for batch in ranks] == [seen, seen]


def test_long_conversations_are_dropped_or_cut_at_a_turn(chatml: Case) -> None:
    rows = [*ROWS, {"messages": chat(99, 60)}]
    dropped, cut = (prepare(recipe(chatml, rows, too_long=how)) for how in ("drop", "cut_turns"))
    for prepared, kept in ((dropped, 60), (cut, 61)):
        found = prepared.sources[0].store.meta["conversations"]
        assert (found["kept"], found["dropped"], found["cut"]) == (kept, 61 - kept, kept - 60)
    stream = cut.sources[0].store.streams["train"]
    last = stream.tokens[int(stream.documents[-2]) :]
    assert 1 < len(last) <= 257
    assert stream.loss_mask is not None
    assert stream.loss_mask[-1]


def test_a_source_of_which_every_conversation_is_too_long_is_refused_with_the_reason(chatml: Case) -> None:
    rows = [{"messages": [{"role": "user", "content": "a" * 1000}, {"role": "assistant", "content": "b"}]}] * 3
    for how, fix in (("drop", "increase data.sequence_length, or --set data.too_long=cut_turns"), ("cut_turns", "")):
        with pytest.raises(DataError) as caught:
            prepare(recipe(chatml, rows, too_long=how))
        (problem,) = caught.value.problems
        assert "all 3 rows of " in problem.message
        assert "are longer than a sequence of 256 tokens" in problem.message
        assert problem.fix.startswith(fix or "increase data.sequence_length")


def test_faulty_rows_are_refused_with_their_line_or_left_out(chatml: Case) -> None:
    rows = [*ROWS[:2], {"messages": [{"role": "narrator", "content": "a"}]}, {"other": 1}, *ROWS[2:]]
    with pytest.raises(DataError) as caught:
        prepare(recipe(chatml, rows))
    assert "2 of 62 rows" in str(caught.value)
    assert "rows.jsonl, line 3: message 1 has the unknown role 'narrator'" in str(caught.value)
    assert "rows.jsonl, line 4: " in str(caught.value)
    made = recipe(chatml, rows, faulty_rows="drop")
    prepared = prepare(made)
    assert "60 conversations" in "".join(notes(prepared, made))
    assert "2 faulty rows left out, such as " in "".join(notes(prepared, made))


def test_each_option_has_its_own_token_store(chatml: Case) -> None:
    plain = prepare(recipe(chatml, ROWS))
    again = prepare(recipe(chatml, ROWS))
    assert (again.made, again.key) == (False, plain.key)
    other = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    options: list[dict[str, Any]] = [{"train_on": "all"}, {"chat_template": other}, {"too_long": "cut_turns"}]
    assert len({plain.key, *(prepare(recipe(chatml, ROWS, **one)).key for one in options)}) == 4


def test_conversations_in_parquet_can_be_mixed_with_text(chatml: Case) -> None:
    import pyarrow
    import pyarrow.parquet

    folder = chatml.folder.parent
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(200)))
    sources = [{"name": str(folder / name)} for name in ("rows.parquet", "text.jsonl")]
    prepared = prepare(recipe(chatml, ROWS, sources=sources))
    streams = [source.store.streams["train"] for source in prepared.sources]
    assert streams[0].loss_mask is not None
    assert streams[1].loss_mask is None
    alone = prepare(recipe(chatml, ROWS)).sources[0].store.streams["train"]
    assert alone.tokens.tolist() == streams[0].tokens.tolist()


def test_arrow_rows_do_not_have_the_keys_of_other_rows(tmp_path: Path) -> None:
    """Every object of a column has the keys of all, most of them null, which templates would write."""
    import pyarrow
    import pyarrow.parquet

    one = case("qwen3", tmp_path / "tokenizer")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"a {name}"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": name, "arguments": {name: {name: [name]}}}}],
                },
                {"role": "tool", "content": "c"},
                {"role": "assistant", "content": "d"},
            ],
            # In alphabetical order, in which pyarrow 23 and older put the keys of objects.
            "tools": [
                {"function": {"name": name, "parameters": {"properties": {name: {"type": name}}}}, "type": "function"}
            ],
        }
        for name in ("snow", "rain", "wind", "hail")
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = prepare(recipe(one, rows, sequence_length=1024, train_on="all"))
    arrow = prepare(
        recipe(one, rows, sequence_length=1024, train_on="all", sources=[{"name": str(tmp_path / "rows.parquet")}])
    )
    expected, found = (prepared.sources[0].store.streams["train"].tokens.tolist() for prepared in (lines, arrow))
    assert sorted(found) == sorted(expected)
    text = Tokenizer.from_file(str(one.folder / "tokenizer.json")).decode(found, skip_special_tokens=False)
    assert text.count("snow") == 8
    assert "null" not in text


def test_conversations_are_not_cut_into_a_stream(chatml: Case) -> None:
    with pytest.raises(DataError, match="a conversation is never split"):
        prepare(recipe(chatml, ROWS, packing="concat"))


def test_the_fill_counts_inputs_and_not_targets(chatml: Case) -> None:
    prepared = prepare(recipe(chatml, ROWS))
    samples, stream = prepared.sources[0].train, prepared.sources[0].store.streams["train"]
    inputs = len(stream) - len(ROWS)  # the last token of each conversation is only a target
    assert fill_fraction(samples) == inputs / (len(samples) * 256)


def test_a_tokenizer_is_trained_on_texts_and_has_the_tokens_of_the_template(chatml: Case) -> None:
    """Trained on the rows' JSON, its merges would be those of keys and quotes."""
    words = "unmistakable perspicacity "
    rows = [
        {"messages": [{"role": "user", "content": words * 3}, {"role": "assistant", "content": f"{words}{n}"}]}
        for n in range(60)
    ]
    trained = {"tokenizer": {"vocab_size": 300}, "chat_template": "chatml"}
    prepared = prepare(recipe(chatml, rows, **trained))
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_dir / "tokenizer.json"))
    assert len(tokenizer.encode("perspicacity").ids) <= 2
    assert len(tokenizer.encode('"messages"').ids) > 4
    end = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[-1] == end
    assert prepared.stop_ids == sorted({prepared.eos_id, end})
    stream = prepared.sources[0].store.streams["train"]
    assert stream.loss_mask is not None
    assert (stream.tokens == end).sum() == 2 * (stream.loss_mask & (stream.tokens == end)).sum() == 120


def test_what_nothing_reads_is_counted(chatml: Case) -> None:
    made = recipe(chatml, [*({**row, "id": 5} for row in ROWS[:3]), *ROWS[3:]])
    assert "; not read: column 'id' in 3 rows" in "".join(notes(prepare(made), made))


def test_an_end_token_that_is_not_special_is_a_stop_token_with_a_note(chatml: Case, tmp_path: Path) -> None:
    about = {"special": ["<|endoftext|>"], "added": ["<|im_start|>", "<|im_end|>"], "eos": "<|endoftext|>"}
    own = chatml._replace(folder=write_chat_tokenizer(tmp_path / "own", about, chatml.source))
    for one, is_told in ((chatml, False), (own, True)):
        made = recipe(one, ROWS)
        prepared = prepare(made)
        tokenizer = Tokenizer.from_file(str(one.folder / "tokenizer.json"))
        assert tokenizer.token_to_id("<|im_end|>") in prepared.stop_ids
        told = [note for note in notes(prepared, made) if "is not a special token" in note]
        assert len(told) == is_told
        assert not told or "ends turns with <|im_end|>, which" in told[0]


def test_the_word_none_is_not_a_template(chatml: Case) -> None:
    with pytest.raises(DataError, match="chat_template=null takes that of the tokenizer"):
        prepare(recipe(chatml, ROWS, chat_template="None"))


def test_tokens_do_not_depend_on_the_day(chatml: Case) -> None:
    source = '{{ strftime_now("%d %b %Y") }}' + chatml.source
    made = recipe(chatml, ROWS[:8], chat_template=source)
    prepared = prepare(made)
    stream = prepared.sources[0].store.streams["train"]
    text = Tokenizer.from_file(str(prepared.tokenizer_dir / "tokenizer.json")).decode(stream.tokens[:12].tolist())
    assert text.startswith("26 Jul 2024")
    assert "all conversations have 2024-07-26 instead" in "".join(notes(prepared, made))


def test_unpacked_micro_batches_are_as_long_as_their_targets_need(chatml: Case) -> None:
    made = recipe(chatml, ROWS, packing="none").with_(**{"model.config": TINY})
    prepared = prepare(made)
    sizes = {"seed": 1, "global_batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4}
    whole, short = (BatchLoader(prepared, **sizes, dp_rank=0, dp_size=1, shortens=one) for one in (False, True))
    model = build_model(made, torch.float32, torch.device("cpu"))
    for all_of_it, part in zip(whole.train_batch(0).micro_batches, short.train_batch(0).micro_batches, strict=True):
        used = part.labels.shape[1]
        assert used < all_of_it.labels.shape[1]
        assert torch.equal(all_of_it.labels[:, :used], part.labels)
        assert (all_of_it.labels[:, used:] == NO_TARGET).all()
        losses = [forward(model, model, one, torch.device("cpu"))[0] for one in (all_of_it, part)]
        assert torch.isclose(*losses, rtol=FP32)


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_recurrence_trains_on_conversations_as_on_each_alone(chatml: Case, packing: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 400}
    fields: dict[str, Any] = {"model": {"architecture": "mamba", "config": sizes, "attention": "eager"}}
    made = recipe(chatml, ROWS).with_(**fields, **{"data.packing": packing})
    prepared = prepare(made)
    samples = prepared.sources[0].train
    assert (len(samples) == len(ROWS)) == (packing == "none")
    model = build_model(made, torch.float32, torch.device("cpu"))
    if packing == "best_fit":
        keep_apart(model, mixing_parts(model.config))
    rows = samples.read(np.arange(8 if packing == "none" else len(samples)))
    assert (np.diff(rows.position_ids, axis=1) == 1).all() == (packing == "none")
    batch = MicroBatch(*map(torch.from_numpy, rows[:3]))
    loss, _ = forward(model, model, batch, torch.device("cpu"))
    loss.backward()
    together = [one.clone() for one in gradients_of(model.parameters())]
    model.zero_grad()
    stream = prepared.sources[0].store.streams["train"]
    assert stream.loss_mask is not None
    alone = torch.zeros(())
    for number in range(8 if packing == "none" else len(ROWS)):
        first, end = stream.documents[number : number + 2].astype(int)
        tokens = torch.from_numpy(stream.tokens[first:end].astype(int))
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        mine = torch.from_numpy(stream.loss_mask[first + 1 : end].copy())
        alone = alone + cross_entropy(logits[mine], tokens[1:][mine], reduction="sum")
    alone.backward()
    assert torch.isclose(loss, alone, rtol=FP32)
    for one, other in zip(together, gradients_of(model.parameters()), strict=True):
        assert (one - other).norm() <= FP32 * other.norm()
