"""Pairs of completions from rows to batches: found, validated, and packed as a unit."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.data import BatchLoader, Completions, Prepared, notes, prepare
from llmtrain.data.chat.conversation import RowError, find_layout
from llmtrain.data.samples import NO_TARGET, PackedSamples
from llmtrain.errors import DataError, RecipeError
from llmtrain.recipe import Recipe, parse_recipe
from tests.helpers.chat_tokenizers import Case, case

ASKED = {"role": "user", "content": "a"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
LENGTH = 256


def read(row: dict[str, Any]) -> list[list[tuple[str, str, bool]]]:
    """Role, text and whether it is trained on, of each message of both conversations."""
    found = find_layout(row, "data.sources.0", format="preference", named={}).read(row)
    return [
        [(turn["role"], turn["content"], trained) for turn, trained in zip(one.messages, one.trained, strict=True)]
        for one in found
    ]


def test_prompts_are_columns_or_the_common_beginning_of_both() -> None:
    expected = [[("user", "a", False), ("assistant", text, True)] for text in ("good", "bad")]
    assert read({"prompt": "a", "chosen": "good", "rejected": "bad"}) == expected
    assert read({"question": "a", "chosen": "good", "rejected": "bad"}) == expected
    assert read({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}) == expected
    assert read({"prompt": [ASKED], "chosen": GOOD, "rejected": BAD}) == expected
    assert read({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}) == expected
    assert read({"prompt": "a", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}) == expected
    assert read({"prompt": None, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}) == expected


def test_only_completions_are_trained_on() -> None:
    before = [ASKED, {"role": "assistant", "content": "b"}, ASKED]
    row = {"system": "s", "chosen": [*before, GOOD, ASKED, GOOD], "rejected": [*before, {**BAD, "train": True}]}
    chosen, rejected = read(row)
    assert [trained for _, _, trained in chosen] == [False] * 4 + [True] * 3
    assert [trained for _, _, trained in rejected] == [False] * 4 + [True]
    assert chosen[:4] == rejected[:4]
    assert chosen[0] == ("system", "s", False)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"chosen": "good", "rejected": "bad"}, "has no prompt"),
        ({"chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "other"}, BAD]}, "has no prompt"),
        ({"prompt": "a", "chosen": "same", "rejected": "same"}, "are the same"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "are the same"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]}, "chosen does not continue the prompt"),
        ({"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, GOOD]}, "chosen does not continue the prompt"),
        ({"prompt": "a", "chosen": "good", "rejected": []}, "rejected does not continue the prompt"),
        ({"prompt": "b", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "the prompt differs from the messages"),
        ({"prompt": "a", "chosen": "good", "rejected": None}, "message 2 (assistant) is empty"),
        ({"prompt": "a", "chosen": "good", "rejected": 3}, "not text"),
    ],
)
def test_faults_of_pairs_are_described(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(RowError) as caught:
        read(row)
    assert fault in str(caught.value)


@pytest.fixture
def chatml(tmp_path: Any) -> Case:
    return case("chatml", tmp_path / "tokenizer")


def pair(number: int) -> dict[str, str]:
    draw = random.Random(number)
    chosen, rejected = ("".join(draw.choices("abc ", k=draw.randrange(1, 20))).strip() for _ in range(2))
    return {"prompt": f"question {number}", "chosen": f"yes {chosen}", "rejected": f"no {rejected}"}


PAIRS = [pair(number) for number in range(80)]


def recipe(one: Case, rows: list[Any], **fields: Any) -> Recipe:
    path = one.folder.parent / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"tokenizer": str(one.folder), "sequence_length": LENGTH, "cache_dir": str(one.folder.parent / "cache")}
    values = {
        "name": "test",
        "model": {"architecture": "llama", "config": {"vocab_size": 400}},
        "data": {"sources": [{"name": str(path)}], "eval_fraction": 0.0, **data},
        "objective": {"name": "dpo"},
        "optim": {"lr": 1e-3},
        "batch": {"global_batch_size": 4, "micro_batch_size": 2},
        "train": {"max_steps": 10},
    }
    return parse_recipe(values).with_(**fields)


def texts(prepared: Prepared, one: Case) -> list[list[tuple[str, str]]]:
    """For each sequence, the decoded targets of the chosen and of the rejected conversation of each pair."""
    samples: Any = prepared.sources[0].train
    rows = samples.read(np.arange(len(samples)))
    decode = one.encoder()._plain.decode
    return [
        [
            tuple(decode(labels[(segments == 2 * number + role) & (labels != NO_TARGET)].tolist()) for role in (0, 1))
            for number in range(pairs)
        ]
        for labels, segments, pairs in zip(
            rows.labels, rows.segment_ids, samples.count_examples(np.arange(len(samples))), strict=True
        )
    ]


def test_a_pair_lies_in_one_sequence_in_its_order(chatml: Case) -> None:
    made = recipe(chatml, PAIRS)
    prepared = prepare(made)
    found = texts(prepared, chatml)
    assert sorted(two for row in found for two in row) == sorted((one["chosen"], one["rejected"]) for one in PAIRS)
    assert max(len(row) for row in found) > 1
    samples = prepared.sources[0].train
    assert isinstance(samples, PackedSamples)
    rows = samples.read(np.arange(len(samples)))
    assert (rows.position_ids == 0).sum() == 2 * len(PAIRS) + _paddings(samples)
    assert "80 pairs (chosen from 'chosen', rejected from 'rejected', prompt from 'prompt')" in "".join(
        notes(prepared, made)
    )


def _paddings(samples: PackedSamples) -> int:
    """How many sequences end in padding, whose positions begin at 0 again."""
    filled = np.add.reduceat(samples.lengths.astype(int), samples.offsets[:-1].astype(int))
    return int((filled < samples.sequence_length).sum())


def test_batches_carry_segments_lengths_and_references(chatml: Case) -> None:
    prepared = prepare(recipe(chatml, PAIRS))
    samples = prepared.sources[0].train
    assert isinstance(samples, PackedSamples)
    sizes: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "gradient_accumulation_steps": 1}
    parts = [BatchLoader(prepared, seed=1, dp_rank=rank, dp_size=2, **sizes).train_batch(4) for rank in (0, 1)]
    held = 0
    for part in parts:
        for one in part.micro_batches:
            assert one.completions is not None
            exists = one.completions.lengths > 0
            assert (exists[:, 0::2] == exists[:, 1::2]).all()
            assert int(one.completions.lengths.sum()) == int((one.labels != NO_TARGET).sum())
            assert one.completions.references.isnan().equal(exists)  # unknown until they are computed
            held += int(exists.sum()) // 2
    assert {part.examples for part in parts} == {held}
    assert {part.num_items for part in parts} == {held}


def test_pairs_that_do_not_fit_are_dropped_and_counted(chatml: Case) -> None:
    long = {"prompt": "q", "chosen": "ab" * (LENGTH // 2), "rejected": "b" * (LENGTH // 2)}
    prepared = prepare(recipe(chatml, [*PAIRS, long]))
    found = prepared.sources[0].store.meta["conversations"]
    assert (found["kept"], found["dropped"], found["cut"]) == (80, 1, 0)


def test_a_faulty_completion_leaves_out_the_pair(chatml: Case) -> None:
    rows = [*PAIRS[:3], {**PAIRS[3], "rejected": ""}, *PAIRS[4:]]
    with pytest.raises(DataError, match=r"pairs.jsonl, line 4: message 2 \(assistant\) is empty"):
        prepare(recipe(chatml, rows))
    prepared = prepare(recipe(chatml, rows, **{"data.faulty_rows": "drop"}))
    assert len([two for row in texts(prepared, chatml) for two in row]) == 79


def test_pairs_and_their_objective_go_together(chatml: Case) -> None:
    made = recipe(chatml, PAIRS)
    with pytest.raises(RecipeError, match=r"the format preference, but objective.name=language_model reads auto, text"):
        made.with_(**{"objective.name": "language_model", "data.sources.0.format": "preference"})
    with pytest.raises(RecipeError, match=r"the format messages, but objective.name=dpo reads auto, preference"):
        made.with_(**{"data.sources.0.format": "messages"})
    with pytest.raises(RecipeError, match=r"^objective: sft_weight would have no effect on 'orpo', which uses beta "):
        made.with_(**{"objective.name": "orpo", "objective.sft_weight": 1.0})
    with pytest.raises(DataError, match="no conversations were found in the columns prompt, completion"):
        prepare(recipe(chatml, [{"prompt": "a", "completion": "b"}]))


def test_lengths_count_the_targets_of_each_conversation() -> None:
    labels = torch.tensor([[5, -100, 6, 7, -100], [8, 9, -100, -100, -100]])
    segments = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 0, 0]])
    made = Completions.of(segments, labels, torch.zeros(2, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.bool))
    assert made.lengths.tolist() == [[1, 2, 0, 0], [1, 1, 0, 0]]


def labelled(number: int) -> dict[str, Any]:
    one = pair(number)
    return {"prompt": one["prompt"], "completion": one["chosen" if number % 3 else "rejected"], "label": number % 3 > 0}


def completions(prepared: Prepared, one: Case) -> list[tuple[str, str, bool]]:
    """For each labelled completion: its text, that of its mismatched one, and its label; in the order of packing."""
    samples: Any = prepared.sources[0].train
    index = np.arange(len(samples))
    own, others = samples.read(index), samples.mismatched.read(index)
    decode = one.encoder()._plain.decode

    def text(rows: Any, row: int, number: int) -> str:
        labels = rows.labels[row]
        return str(decode(labels[(rows.segment_ids[row] == number) & (labels != NO_TARGET)].tolist()))

    return [
        (text(own, row, number), text(others, row, number), bool(own.desirable[row, number]))
        for row, count in enumerate(samples.count_examples(index))
        for number in range(count)
    ]


def test_each_completion_has_that_of_the_previous_row_as_mismatched(chatml: Case) -> None:
    rows = [labelled(number) for number in range(60)]
    made = recipe(chatml, rows, **{"objective.name": "kto"})
    prepared = prepare(made)
    texts = [row["completion"] for row in rows]
    expected = zip(texts, [texts[1], *texts], (row["label"] for row in rows), strict=False)
    assert sorted(completions(prepared, chatml)) == sorted(expected)
    (note,) = (line for line in notes(prepared, made) if "desirable" in line)
    assert "60 completions, 67% of them desirable (prompt from 'prompt', completion from 'completion', label" in note


def test_a_pair_is_two_labelled_completions_that_are_not_mismatched_for_each_other(chatml: Case) -> None:
    prepared = prepare(recipe(chatml, PAIRS, **{"objective.name": "kto"}))
    found = completions(prepared, chatml)
    before = [PAIRS[1], *PAIRS]
    assert sorted(found) == sorted(
        (own[part], other[part], part == "chosen")
        for own, other in zip(PAIRS, before, strict=False)
        for part in ("chosen", "rejected")
    )
    # The same completions as separate rows, of which each two have the same prompt.
    rows = [
        {"prompt": one["prompt"], "completion": one[part], "label": part == "chosen"}
        for one in PAIRS
        for part in ("chosen", "rejected")
    ]
    found = completions(prepare(recipe(chatml, rows, **{"objective.name": "kto"})), chatml)
    last_before = [PAIRS[1]["chosen"], *(one["rejected"] for one in PAIRS)]
    assert sorted(found) == sorted(
        (one[part], other, part == "chosen")
        for one, other in zip(PAIRS, last_before, strict=False)
        for part in ("chosen", "rejected")
    )


def test_a_mismatched_completion_is_cut_and_packs_with_the_longer_one(chatml: Case) -> None:
    rows = [labelled(number) for number in range(30)]
    rows[11] = {"prompt": "p" * (LENGTH - 40), "completion": "c", "label": 1}
    rows[10] = {"prompt": "q", "completion": "d" * (LENGTH // 2), "label": 0}
    prepared = prepare(recipe(chatml, rows, **{"objective.name": "kto"}))
    found = prepared.sources[0].store.meta["conversations"]
    assert (found["kept"], found["dropped"], found["cut"]) == (30, 0, 0)
    (cut,) = (other for own, other, _ in completions(prepared, chatml) if own == "c")
    assert 0 < len(cut) < LENGTH // 2
    assert set(cut) == {"d"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"label": "good"}, "the label is 'good'; it must be true"),
        ({"label": None}, "the label is None; it must be true"),
        ({"label": 2}, "the label is 2; it must be true"),
        ({"completion": []}, "does not continue the prompt with a turn of the assistant"),
        ({"completion": ""}, "message 2 (assistant) is empty"),
        ({"prompt": None}, "has no prompt"),
    ],
)
def test_faults_of_labelled_completions_are_described(change: dict[str, Any], fault: str, chatml: Case) -> None:
    rows = [labelled(number) for number in range(6)]
    rows[4] |= change
    with pytest.raises(DataError) as caught:
        prepare(recipe(chatml, rows, **{"objective.name": "kto"}))
    assert "1 of 6 rows" in str(caught.value)
    assert "pairs.jsonl, line 5: " in str(caught.value)
    assert fault in str(caught.value)


def test_a_label_may_be_a_text_as_in_a_csv_file(chatml: Case) -> None:
    rows = [labelled(number) for number in range(6)]
    known = prepare(recipe(chatml, rows, **{"objective.name": "kto"})).sources[0].store
    written = {True: ["TRUE", "true", "1"], False: ["False", "false", "0"]}
    rows = [{**row, "label": written[bool(row["label"])][number // 2]} for number, row in enumerate(rows)]
    found = prepare(recipe(chatml, rows, **{"objective.name": "kto"})).sources[0].store
    assert (found.streams["train"].desirable == known.streams["train"].desirable).all()


@pytest.mark.parametrize(("objective", "make"), [("dpo", pair), ("kto", labelled)])
def test_the_examples_of_a_step_are_reported(objective: str, make: Any, chatml: Case) -> None:
    made = recipe(chatml, [make(number) for number in range(40)], **{"objective.name": objective})
    prepared = prepare(made)
    count = len(prepared.sources[0].train)
    what = "pairs" if objective == "dpo" else "completions"
    mean = 40 / count
    assert mean > 1.5
    expected = f"; {mean:.3g} {what} in a sequence and {4 * mean:.3g} in a step, on average"
    assert any(note.endswith(expected) for note in notes(prepared, made))


def test_rows_with_two_labelled_completions_count_once(chatml: Case) -> None:
    rows = [pair(number) for number in range(6)]
    made = recipe(chatml, rows, **{"objective.name": "kto"})
    found = prepare(made).sources[0].store.meta
    assert (found["conversations"]["rows"], found["conversations"]["kept"]) == (6, 12)
    assert found["characters"] == sum(len(json.dumps(row)) for row in rows)
    rows = [{**row, "prompt": "a"} for row in rows]
    with pytest.raises(DataError, match=r"6 of 6 rows of (.*\n)*.*line 5: no row near it.*\n *and 1 more"):
        prepare(recipe(chatml, rows, **{"objective.name": "kto"}))


def test_one_prompt_alone_has_no_mismatched_completion(chatml: Case) -> None:
    rows = [{**labelled(number), "prompt": "a"} for number in range(6)]
    with pytest.raises(DataError, match="no row near it has another prompt"):
        prepare(recipe(chatml, rows, **{"objective.name": "kto"}))


def test_completions_for_kto_need_a_label(chatml: Case) -> None:
    with pytest.raises(DataError, match="unpaired_preference: prompt, completion, label; preference: chosen, rejected"):
        prepare(recipe(chatml, [{"prompt": "a", "completion": "b"}], **{"objective.name": "kto"}))


def test_batches_of_labelled_completions_have_their_mismatched_ones(chatml: Case) -> None:
    prepared = prepare(recipe(chatml, [labelled(number) for number in range(60)], **{"objective.name": "kto"}))
    sizes: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "gradient_accumulation_steps": 1}
    parts = [BatchLoader(prepared, seed=1, dp_rank=rank, dp_size=2, **sizes).train_batch(4) for rank in (0, 1)]
    held = 0
    for part in parts:
        for one, other in zip(part.micro_batches, part.mismatched, strict=True):
            assert one.completions is not None
            assert other.completions is not None
            exists = one.completions.lengths > 0
            assert (other.completions.lengths > 0).equal(exists)
            assert other.completions.desirable.equal(one.completions.desirable)
            held += int(exists.sum())
    assert {part.examples for part in parts} == {held}
