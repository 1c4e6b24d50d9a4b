"""`llmtrain generate --chat`: the input of the model, where it stops, and which messages are left out."""

from __future__ import annotations

import io

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmtrain.commands.generate import GenerateRequest, generate_text
from llmtrain.errors import RecipeError
from llmtrain.models.inference.generate import Chat
from tests.helpers.chat_tokenizers import case

POSITIONS = 64
TOKENS = 4


@pytest.fixture
def tokenizer(tmp_path):
    loaded = AutoTokenizer.from_pretrained(case("chatml", tmp_path / "model").folder, eos_token="<|endoftext|>")
    loaded.save_pretrained(tmp_path / "model")  # with another end than that of a turn
    return loaded


def save_model(tokenizer, text):
    """Writes a model that always says the same token, and whose configuration does not know the end of a turn."""
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=POSITIONS,
        eos_token_id=399,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.model.norm.weight.fill_(1)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(text)] = 1
    model.save_pretrained(tokenizer.name_or_path)
    return tokenizer.name_or_path


class Given(list):
    written = 0


@pytest.fixture
def given(monkeypatch):
    """The tokens that the model was given, question by question, and how many it wrote (`written`)."""
    seen = Given()
    original = LlamaForCausalLM.generate

    def generate(self, inputs, **options):
        seen.append(inputs[0].tolist())
        output = original(self, inputs, **options)
        seen.written = output.shape[1] - inputs.shape[1]
        return output

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    return seen


def asked(chat, *questions):
    answers = []
    for question in questions:
        pieces = []
        left_out = chat.ask(question, pieces.append)
        answers.append(("".join(pieces), left_out))
    return answers


def test_the_model_gets_the_text_of_the_template(tokenizer, given, tmp_path):
    chat = Chat(tmp_path / save_model(tokenizer, "a"), TOKENS, 0.0, 1, system="Be brief.")
    assert asked(chat, "Thanks", "Bye.") == [("aaaa", 0), ("aaaa", 0)]
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "aaaa"},
        {"role": "user", "content": "Bye."},
    ]
    expected = [tokenizer.apply_chat_template(said[:size], add_generation_prompt=True)["input_ids"] for size in (2, 4)]
    assert given == expected


def test_generation_stops_at_the_end_of_a_turn_even_if_the_model_does_not_declare_it(tokenizer, given, tmp_path):
    chat = Chat(tmp_path / save_model(tokenizer, "<|im_end|>"), TOKENS, 0.0, 1)
    assert asked(chat, "Thanks") == [("", 0)]
    assert given.written == 1


def test_special_tokens_in_a_question_stay_text(tokenizer, given, tmp_path):
    chat = Chat(tmp_path / save_model(tokenizer, "a"), TOKENS, 0.0, 1)
    asked(chat, "<|im_end|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert given[0].count(end) == 1
    assert tokenizer.decode(given[0]).count("<|im_end|>") == 2


def test_a_refused_question_is_forgotten(tokenizer, given, tmp_path):
    chat = Chat(tmp_path / save_model(tokenizer, "a"), TOKENS, 0.0, 1)
    for text in ("\U00100000", "\udcff"):  # the second one is a byte that is not UTF-8
        with pytest.raises(RecipeError, match=r"the messages: contains the character U\+\w+, which is reserved"):
            asked(chat, text)
    asked(chat, "Thanks")
    assert tokenizer.decode(given[-1]).count("<|im_start|>user") == 1


def test_old_messages_are_dropped_if_there_is_no_room(tokenizer, given, tmp_path):
    chat = Chat(tmp_path / save_model(tokenizer, "a"), TOKENS, 0.0, 1)
    found = asked(chat, *["Thanks"] * 6)
    assert {answer for answer, _ in found} == {"aaaa"}
    assert sum(left_out for _, left_out in found) > 0
    assert all(len(ids) + TOKENS <= POSITIONS for ids in given)
    with pytest.raises(RecipeError, match="the model has only 64 positions"):
        asked(chat, "x" * 200)
    assert asked(chat, "Thanks")[0][0] == "aaaa"


def test_each_line_of_a_pipe_is_a_question(tokenizer, given, tmp_path, monkeypatch, capsys):
    folder = tmp_path / save_model(tokenizer, "a")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"Thanks\n\n{'x' * 200}\nBye.\n"))
    generate_text(GenerateRequest(model=folder, chat=True, tokens=TOKENS, temperature=0.0))
    out, err = capsys.readouterr()
    assert out == "aaaa\naaaa\n"
    assert "positions" in err
    assert tokenizer.decode(given[0]).count("Thanks<|im_end|>") == 1
    with pytest.raises(RecipeError, match="--prompt: is required"):
        generate_text(GenerateRequest(model=folder))
    with pytest.raises(RecipeError, match="--system: is only supported with --chat"):
        generate_text(GenerateRequest(model=folder, prompt="a", system="b"))
