"""The folder in which `llmtrain generate` looks for a model, and folders that are damaged or do not fit together."""

from __future__ import annotations

import json
import os
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llmtrain.commands.generate import model_folder
from llmtrain.errors import CheckpointError, RecipeError
from llmtrain.models.inference.generate import Chat, generate, load_model


def test_a_model_is_a_folder_or_the_export_of_a_run(tmp_path):
    export = tmp_path / "run/export"
    export.mkdir(parents=True)
    (tmp_path / "run/checkpoints").mkdir()
    with pytest.raises(RecipeError) as error:
        model_folder(tmp_path / "run")
    assert error.value.problems[0].fix == f"llmtrain export {tmp_path / 'run'} OUT"
    with pytest.raises(RecipeError, match="name an exported folder or a run"):
        model_folder(tmp_path / "nothing")
    (export / "config.json").write_text("{}")
    assert model_folder(export) == model_folder(tmp_path / "run") == export


WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=4, eos_token_id=0, bos_token_id=0, **SIZES)).save_pretrained(folder)
    _save_tokenizer(folder, "abc")
    return folder


def _save_tokenizer(folder, letters) -> None:
    words = {"<|endoftext|>": 0} | {letter: number for number, letter in enumerate(letters, 1)}
    inner = Tokenizer(models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    made.save_pretrained(folder)


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def _weights(file, **changed) -> None:
    """Replaces weights of a file, or removes those that are None."""
    weights = load_file(file) | changed
    save_file({name: one for name, one in weights.items() if one is not None}, file, {"format": "pt"})


def _configure(folder, name="config.json", **fields) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (None, f"lacks 1 of its model's weights: {WEIGHT}"),
        (torch.ones(16, 8), r"1 of its weights have other shapes than its model's, .*\[16, 8\], not \[16, 16\]"),
        (torch.full((16, 16), torch.nan), f"1 of its weights contain NaN or infinity: {WEIGHT}"),
        (torch.ones(16, 16, dtype=torch.int32), f"1 of its weights are integers, .*: {WEIGHT}"),
    ],
    ids=["missing", "shape", "nan", "integers"],
)
def test_weights_that_a_model_does_not_need_are_refused(weight, words, copied):
    _weights(copied / "model.safetensors", **{WEIGHT: weight})
    with pytest.raises(CheckpointError, match=words) as error:
        load_model(copied, trust_remote_code=False)
    assert error.value.problems[0].field == str(copied)


def test_weights_of_another_configuration_are_refused(copied):
    _configure(copied, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"9 of its weights do not belong to its model: model\.layers\.1\."):
        load_model(copied, trust_remote_code=False)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("model.safetensors", "", "its model cannot be loaded: SafetensorError"),
        ("model.safetensors", None, "its model cannot be loaded: OSError"),
        ("config.json", "[]", "config.json cannot be read: TypeError"),
        ("config.json", '{"model_type": "nothing"}', "its model cannot be loaded: ValueError"),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}', "cannot be read: ZeroDivisionError"),
        ("tokenizer.json", "{", "its tokenizer or its config.json cannot be read"),
        ("tokenizer.json", "FIFO", "tokenizer.json: is not a regular file"),
        ("generation_config.json", '{"eos_token_id": "x"}', "TypeError"),
    ],
)
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_a_damaged_folder_is_refused_in_one_line(chat, file, content, words, copied):
    (copied / file).unlink()
    if content == "FIFO":
        os.mkfifo(copied / file)
    elif content is not None:
        (copied / file).write_text(content)
    with pytest.raises(CheckpointError, match=words) as error:
        Chat(copied, 2, 0, 1).ask("a", print) if chat else generate(copied, "a", 2)
    (problem,) = error.value.problems
    assert problem.field.startswith(str(copied))
    assert "\n" not in problem.message


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_tokens_without_an_embedding_are_refused(chat, copied):
    _save_tokenizer(copied, "abcdef")
    with pytest.raises(CheckpointError, match="has a token 6, but its model only has embeddings for 4"):
        Chat(copied, 2, 0, 1).ask("f", print) if chat else generate(copied, "f", 2)


def test_a_temperature_that_divides_to_infinity_takes_the_most_likely_token(whole):
    assert generate(whole, "abc", 5, temperature=1e-320) == generate(whole, "abc", 5, temperature=0)


def _adapter(base, folder):
    """An adapter beside the tokenizer of its base."""
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder)
    return folder


def test_an_adapter_is_checked_with_its_base(copied, tmp_path):
    folder = _adapter(copied, tmp_path / "adapter")
    ids = torch.tensor([[1, 2, 3]])
    expected = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(copied), folder)
    assert torch.equal(load_model(folder, trust_remote_code=False)[1](ids).logits, expected(ids).logits)
    file, first = folder / "adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    before = load_file(file)[first]
    for weight, words in ((None, "lacks 1 of its model's weights"), (before * torch.inf, "contain NaN or infinity")):
        _weights(file, **{first: weight})
        with pytest.raises(CheckpointError, match=words) as error:
            load_model(folder, trust_remote_code=False)
        assert error.value.problems[0].field == str(folder)
    _weights(file, **{first: before})
    _configure(folder, "adapter_config.json", lora_alpha=float("nan"))
    with pytest.raises(CheckpointError, match=r"its adapter has lora_alpha = nan \(Input should be a finite number\)"):
        load_model(folder, trust_remote_code=False)
    _configure(folder, "adapter_config.json", lora_alpha=2)
    _weights(copied / "model.safetensors", **{WEIGHT: None})
    with pytest.raises(CheckpointError, match="lacks 1 of its model's weights") as error:
        load_model(folder, trust_remote_code=False)
    assert error.value.problems[0].field == str(copied)
