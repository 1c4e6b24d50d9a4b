"""Continues a text with an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from llmtrain.errors import Problem, RecipeError
from llmtrain.run_dir import RunDir
from llmtrain.system.untrusted import utf8_name


def model_folder(path: Path) -> Path:
    """Returns the folder of a model: `path`, or the export in the run directory `path`.

    Raises RecipeError if there is no model.
    """
    for folder in (path, RunDir(path).export):
        if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            return folder
    fix = f"llmtrain export {path} OUT" if RunDir(path).checkpoints.is_dir() else "name an exported folder or a run"
    raise RecipeError(Problem("generate.folder", str(path), "contains no model (no config.json, no export/)", fix))


def sampling(temperature: float) -> dict[str, Any]:
    """Returns the arguments of `transformers` that sample from the 50 most likely tokens; 0 takes the most likely."""
    return {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature else {"do_sample": False}


def generate(folder: Path, prompt: str, max_new_tokens: int = 48, temperature: float = 0.8, seed: int = 1) -> str:
    """Returns a continuation of `prompt`, sampled from the 50 most likely tokens; temperature 0 takes the most likely.

    folder: of a model, or a run directory. Raises RecipeError if it contains no model.
    """
    folder = model_folder(folder)
    with utf8_name(folder) as named:
        tokenizer = AutoTokenizer.from_pretrained(named)
        model = AutoModelForCausalLM.from_pretrained(named)
    device = device_for(model)
    model = model.to(device).eval()
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=True).to(device)
    with torch.random.fork_rng(devices=[device] if device == "cuda" else []):
        torch.manual_seed(seed)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling(temperature))
    continuation: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return continuation


def device_for(model: PreTrainedModel) -> str:
    """Returns `cuda` if the free memory of the GPU suffices for the model and half as much again."""
    if not torch.cuda.is_available():
        return "cpu"
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return "cuda" if 1.5 * size < torch.cuda.mem_get_info()[0] else "cpu"
