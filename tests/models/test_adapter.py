"""Reads pretrained adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmtrain.models.adapter import read_adapter
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
