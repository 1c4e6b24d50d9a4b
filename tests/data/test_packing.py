"""Packed sequences have each target once, labels within their document, and positions that restart in each document."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from llmtrain.data.samples import NO_TARGET, ConcatSamples, PackedSamples, Samples, best_fit, cut_documents
from llmtrain.data.store import Stream
from llmtrain.data.synthetic import synthetic
from llmtrain.recipe import MAX_SEQUENCE_LENGTH
from tests.helpers.small_pairs import small_pairs

PAD = 9999


def make_stream(lengths: list[int]) -> Stream:
    """Documents whose tokens are all different, so that each can be traced."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return Stream(np.arange(bounds[-1], dtype=np.uint32) + 10_000, bounds.astype(np.uint64))


def pack(stream: Stream, length: int, mask: bool = True) -> PackedSamples:
    pieces = cut_documents(stream.documents.astype(np.int64), length)
    order, sizes = best_fit(pieces.lengths, length)
    ends = np.cumsum(sizes)
    return PackedSamples(
        stream,
        length,
        mask,
        PAD,
        starts=pieces.starts[order].astype(np.uint64),
        lengths=pieces.lengths[order].astype(np.uint32),
        offsets=np.concatenate([[0], ends]).astype(np.uint64),
        target_counts=np.add.reduceat(pieces.lengths[order], ends - sizes).astype(np.uint32),
    )


@pytest.fixture(params=[1, 2, 16, 64])
def length(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def stream() -> Stream:
    rng = np.random.default_rng(0)
    return make_stream([2, 17, 16, 18, 33, *rng.integers(2, 150, 300).tolist()])


def everything(samples: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs, positions, labels, *_ = samples.read(np.arange(len(samples)))
    return inputs, positions, labels


def test_every_token_but_the_first_of_a_document_is_a_target_exactly_once(stream: Stream, length: int) -> None:
    _, _, labels = everything(pack(stream, length))
    firsts = stream.tokens[stream.documents[:-1].astype(int)]
    assert Counter(labels[labels != NO_TARGET].tolist()) == Counter(set(stream.tokens.tolist()) - set(firsts.tolist()))


def test_a_label_is_the_token_after_its_input_in_the_same_document(stream: Stream, length: int) -> None:
    inputs, _, labels = everything(pack(stream, length))
    real = labels != NO_TARGET
    assert (labels[real] == inputs[real] + 1).all()
    assert (inputs[~real] == PAD).all()


def test_no_document_that_fits_is_split(stream: Stream, length: int) -> None:
    inputs, _, _ = everything(pack(stream, length))
    row_of = {int(token): row for row in range(len(inputs)) for token in inputs[row]}
    bounds = stream.documents.astype(int)
    for start, end in itertools.pairwise(bounds):
        if end - start - 1 <= length:
            assert len({row_of[10_000 + token] for token in range(start, end - 1)}) == 1


def test_positions_restart_at_each_piece_and_in_the_padding(stream: Stream) -> None:
    inputs, positions, labels = everything(pack(stream, 64))
    follows = (inputs[:, 1:] == inputs[:, :-1] + 1) | (labels[:, :-1] == NO_TARGET)
    assert (positions[:, 0] == 0).all()
    assert (positions[:, 1:][follows] == positions[:, :-1][follows] + 1).all()
    assert (positions[:, 1:][~follows] == 0).all()
    assert (~follows).any()
    assert (labels == NO_TARGET).any()


def test_positions_are_consecutive_if_documents_are_not_masked(stream: Stream) -> None:
    _, positions, _ = everything(pack(stream, 64, mask=False))
    assert (positions == np.arange(64)).all()


def test_the_number_of_targets_is_known_without_reading(stream: Stream, length: int) -> None:
    samples = pack(stream, length)
    for index in ([0], [1, 1, 0], list(range(len(samples)))):
        _, _, labels, *_ = samples.read(np.array(index))
        assert samples.count_targets(np.array(index)).tolist() == (labels != NO_TARGET).sum(axis=1).tolist()


def test_best_fit_takes_the_fullest_bin_with_room() -> None:
    order, sizes = best_fit(np.array([3, 6, 2, 7, 10, 4]), 10)
    bins = np.split(order, np.cumsum(sizes)[:-1])
    # 7 opens a bin, 6 another, 4 fills the second, 3 fills the first (room 3, not a new one), 2 opens one.
    assert [sorted(pieces.tolist()) for pieces in bins] == [[4], [0, 3], [1, 5], [2]]


def test_many_documents_fill_their_sequences() -> None:
    lengths = np.random.default_rng(1).lognormal(5, 1, 50_000).astype(int).clip(1, 1024)
    order, sizes = best_fit(lengths, 1024)
    assert np.array_equal(np.sort(order), np.arange(len(lengths)))
    assert np.add.reduceat(lengths[order], np.cumsum(sizes) - sizes).max() <= 1024
    assert lengths.sum() / (len(sizes) * 1024) > 0.999


def test_concat_is_the_stream_cut_every_t(stream: Stream, length: int) -> None:
    samples = ConcatSamples(stream, length, mask_documents=True)
    inputs, _, labels = everything(samples)
    used = len(samples) * length
    assert np.array_equal(inputs.ravel(), stream.tokens[:used])
    assert np.array_equal(labels.ravel(), stream.tokens[1 : used + 1])
    assert samples.unused() == len(stream) - used - 1 < length
    assert samples.count_targets(np.array([0, 1])).tolist() == [length, length]


def test_concat_positions_restart_at_each_document(stream: Stream, length: int) -> None:
    inputs, positions, _ = everything(ConcatSamples(stream, length, mask_documents=True))
    starts = np.isin(inputs - 10_000, stream.documents.astype(int))
    assert (positions[:, 0] == 0).all()
    assert (positions[starts] == 0).all()
    inside = ~starts[:, 1:]
    assert (positions[:, 1:][inside] == positions[:, :-1][inside] + 1).all()
    _, plain, _ = everything(ConcatSamples(stream, length, mask_documents=False))
    assert (plain == np.arange(length)).all()


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_a_stream_shorter_than_one_sequence_has_no_sequences(tokens: int) -> None:
    assert len(ConcatSamples(make_stream([tokens] if tokens else []), 8, True)) == 0


def test_packing_takes_no_longer_for_a_long_sequence() -> None:
    """Neither memory nor time goes with the room of a sequence: the longest that a recipe may ask for is packed."""
    lengths = np.arange(1, 2000)
    order, sizes = best_fit(lengths, MAX_SEQUENCE_LENGTH)
    assert sizes.tolist() == [len(lengths)]
    assert sorted(order.tolist()) == list(range(len(lengths)))


@pytest.mark.parametrize(("objective", "labelled"), [("language_model", False), ("dpo", False), ("kto", True)])
def test_random_documents_have_what_the_objective_reads(objective: str, labelled: bool, tmp_path: Path) -> None:
    recipe = small_pairs(tmp_path / "pairs.jsonl", **{"objective.name": objective})
    stream = synthetic(recipe, tmp_path / "random").sources[0].store.streams["train"]
    assert (stream.holds_pairs, stream.desirable is not None) == (objective == "dpo", labelled)
