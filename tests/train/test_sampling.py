"""Samples end at the right token, and all ranks agree on each token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from llmtrain.data import encode_prompts
from llmtrain.data.chat.template import load_template
from llmtrain.errors import DataError
from llmtrain.plan.facts import template_limits as limits
from llmtrain.train.sampling import COLUMNS, Sampler
from tests.helpers.commands import forked_llmtrain
from tests.helpers.harness import run_ranks
from tests.helpers.small_plan import small_plan
from tests.helpers.word_tokenizer import write_word_tokenizer

VOCAB = 256
STOP = 20


class Counting:
    """Continues with the next number; `step` 0 repeats the last one. The shapes of its batches are kept."""

    device = torch.device("cpu")

    def __init__(self, step: int = 1, likely: float = 10.0) -> None:
        self.step, self.likely, self.shapes, self.first = step, likely, [], None

    def next_logits(self, batch):
        self.first = self.first or batch
        self.shapes.append(tuple(batch.input_ids.shape))
        found = {}
        for row, column in (batch.labels >= 0).nonzero().tolist():
            logits = torch.zeros(VOCAB)
            logits[int(batch.input_ids[row, column]) + self.step] = self.likely
            found[row] = logits
        return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = write_word_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)
    return SimpleNamespace(
        tokenizer_dir=folder, sequence_length=128, vocab_size=VOCAB, stop_ids=[STOP], eos_id=STOP, chat_template=None
    )


def sampler_of(prepared, *prompts: str, **fields: object) -> Sampler:
    asked = {"samples.every_steps": 1, "samples.prompts": list(prompts), "samples.tokens": 6}
    plan = small_plan(**asked | fields)
    return Sampler(plan, prepared, encode_prompts(plan.recipe, prepared))


def texts(prepared, engine, *prompts: str, **fields: object) -> list[str]:
    found = sampler_of(prepared, *prompts, **fields).continued(engine)
    assert [prompt for prompt, _ in found] == list(prompts)
    return [text for _, text in found]


def test_a_text_ends_at_its_length_at_a_stop_and_at_the_end_of_a_sequence(prepared):
    long = " ".join(["7"] * 125)
    beats: list[int] = []
    found = sampler_of(prepared, "1 2", "17", long).continued(Counting(), lambda: beats.append(1))
    assert [text for _, text in found] == ["3 4 5 6 7 8", "18 19", "8 9 10"]
    assert len(beats) == 6 + 3  # the third prompt is in a micro-batch of its own


def test_sampling_passes_are_as_small_as_the_plan_allows(prepared):
    free, fixed = Counting(), Counting()
    texts(prepared, free, "1")
    texts(prepared, fixed, "1", **{"kernels.blocks": "compiled"})
    assert set(free.shapes) == {(1, COLUMNS)}
    assert set(fixed.shapes) == {(2, 128)}


def test_sampling_with_a_temperature_is_reproducible_and_keeps_the_generator(prepared):
    state = torch.get_rng_state()
    drawn = [texts(prepared, Counting(likely=1.0), "1", "1", **{"samples.temperature": 1.0}) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1] != "2 3 4 5 6 7"
    assert texts(prepared, Counting(), "1", **{"samples.temperature": 0.01}) == ["2 3 4 5 6 7"]
    assert torch.equal(state, torch.get_rng_state())


TEMPLATE = "{% for one in messages %}{{ '8 ' if one.role == 'user' else '9 ' }}{{ one.content }} {% endfor %}{{ '9' }}"


def test_prompts_of_a_conversation_model_are_questions(prepared):
    template = load_template(TEMPLATE, prepared.tokenizer_dir)
    chats = SimpleNamespace(**vars(prepared) | {"chat_template": template})
    engine = Counting()
    assert texts(chats, engine, "1 2") == ["10 11 12 13 14 15"]
    assert engine.first.input_ids[0, :4].tolist() == [8, 1, 2, 9]


def test_a_prompt_without_room_is_refused(prepared):
    with pytest.raises(DataError, match=r"samples\.prompts\.1.*128 tokens"):
        sampler_of(prepared, "1", " ".join(["7"] * 128))


FAULTY = {
    "{{ raise_exception('no questions') }}": r"samples\.prompts\.0.*no questions",
    "{% set found = namespace(n=0) %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% set found.n = found.n + 1 %}{% endfor %}{% endfor %}": "does not end within",
}


@pytest.mark.parametrize("template", FAULTY)
def test_a_template_that_cannot_render_a_prompt_is_refused(prepared, monkeypatch, template):
    monkeypatch.setattr(limits, "CPU_S", 0)
    chats = SimpleNamespace(**vars(prepared) | {"chat_template": load_template(template, prepared.tokenizer_dir)})
    with pytest.raises(DataError, match=FAULTY[template]):
        sampler_of(chats, "1", "2")


def test_a_prompt_without_room_is_refused_before_a_run_begins(small_recipe, tmp_path):
    changes = ["--set", "samples.every_steps=5", "--set", f'samples.prompts=["{"word " * 900}"]']
    done = forked_llmtrain("train", small_recipe, "--run-dir", tmp_path / "run", "--nproc", "1", *changes)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: samples.prompts.0: it has 2,701 tokens, which leave no room")
    assert not (tmp_path / "run").exists()


def _of_rank(rank: int, prepared) -> list[str]:
    return texts(prepared, Counting(step=rank), "15", "1 2")


def test_ranks_that_compute_different_tokens_agree(prepared):
    """As devices with other kernels may; otherwise one would wait for passes that the other does not make."""
    first, second = run_ranks(2, _of_rank, prepared)
    assert first == second == ["16 17 18 19", "3 4 5 6 7 8"]
