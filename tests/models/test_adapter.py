"""Reads pretrained adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmtrain.errors import RecipeError
from llmtrain.models.adapter import adapter_configuration, read_adapter
from llmtrain.recipe import LoraConfig


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


def test_an_unknown_kind_of_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "NEW"}')
    with pytest.raises(RecipeError, match="is not a readable adapter: KeyError: 'NEW'"):
        adapter_configuration(LoraConfig(pretrained=str(tmp_path)))
