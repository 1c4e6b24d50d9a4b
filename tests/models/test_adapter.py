"""Reads pretrained adapters."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file

from llmtrain.errors import RecipeError
from llmtrain.models import build_model, check_trained
from llmtrain.models.adapter import adapter_configuration, weight_name
from llmtrain.models.adapter_files import ADAPTER_FILE, FILE_PREFIX, read_adapter
from llmtrain.recipe import LoraConfig
from tests.helpers.batches import tiny_recipe


def write_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 3)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("offline", [False, True])
def test_an_adapter_of_the_hub_is_read_from_its_cache(
    offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    commit, kept = "0" * 40, tmp_path / "models--me--adapter"
    write_adapter(kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    assert list(read_adapter(LoraConfig(pretrained="me/adapter"))) == ["x.lora_A.weight"]


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("adapter_model.safetensors", b"", "SafetensorError: Error while deserializing header"),
        ("adapter_model.bin", b"", "EOFError: it gives no reason"),
        (
            "adapter_model.bin",
            b"version https://git-lfs.github.com/spec/v1\n",
            "UnpicklingError: Weights only load failed",
        ),
        ("adapter_config.json", b'{"peft_type": "NEW"}', "neither adapter_model.safetensors nor adapter_model.bin"),
    ],
)
def test_damaged_adapters_are_refused(file: str, content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(RecipeError, match=f"is not a readable adapter: .*{why}"):
        read_adapter(LoraConfig(pretrained=str(tmp_path)))


FAULTS = {
    "contains weights that the model does not have: more": lambda values: values.update(more=torch.zeros(1)),
    r"has no weight 'model\.layers\.1\.self_attn\.v_proj\.lora_B\.weight'": lambda values: values.popitem(),
    r"self_attn\.q_proj\.lora_A\.weight' is \[5, 64\], not \[4, 64\]": lambda values: values.update(
        {next(name for name in values if "q_proj.lora_A" in name): torch.zeros(5, 64)}
    ),
    "is not of finite floating point numbers": lambda values: next(iter(values.values())).fill_(torch.nan),
}
"""What is wrong with the weights of an adapter → a change that makes it so."""


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_weights_of_a_pretrained_adapter_are_compared_with_the_model_before_a_run(fault: str, tmp_path: Path) -> None:
    """On every plan: a stage of a pipeline does not know the weights of the others."""
    lora = {"rank": 4, "targets": ["q_proj", "v_proj"]}
    model = build_model(tiny_recipe(**{"model.adapter": lora}), torch.float32, torch.device("cpu"))
    values = {
        FILE_PREFIX + weight_name(name): one.detach().clone()
        for name, one in sorted(model.named_parameters())
        if one.requires_grad
    }
    FAULTS.get(fault, lambda values: None)(values)
    save_file(values, tmp_path / ADAPTER_FILE)
    peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]).save_pretrained(str(tmp_path))
    recipe = tiny_recipe(**{"model.adapter": {"pretrained": str(tmp_path)}})
    with pytest.raises(RecipeError, match=fault) if fault else nullcontext():
        check_trained(recipe)


def test_an_unknown_kind_of_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "NEW"}')
    with pytest.raises(RecipeError, match="is not a readable adapter: KeyError: 'NEW'"):
        adapter_configuration(LoraConfig(pretrained=str(tmp_path)))
