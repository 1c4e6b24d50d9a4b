"""Runs axolotl or LLaMA-Factory on a few rows, and records the losses of five steps.

    VENV/bin/python tests/helpers/originals.py axolotl        # in an environment that has axolotl and no llmtrain
    VENV/bin/python tests/helpers/originals.py llama_factory

The losses are written to `originals/losses.json`, with the versions. `tests/plan/migrate/test_original_losses.py`
translates the same configurations, trains them here, and compares. Every step reads all rows, so their order has no
effect.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_suffix("")
LOSSES = FOLDER / "losses.json"
STEPS = 5
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
VOCABULARY = 256 + len(SPECIAL)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYER = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}
"""Linear layers of a decoder layer → their shapes."""
CHATS = [
    [("user", "What is two and two?"), ("assistant", "It is four.")],
    [("user", "Hello"), ("assistant", "Good day."), ("user", "And now?"), ("assistant", "We add numbers, all day.")],
]
PAIRS = [("Add two and two.", "It is four.", "Five, I think."), ("Say good day.", "Good day to you.", "No.")]


def write_inputs(folder: Path) -> None:
    """Writes the model, a tokenizer with one token for each byte, an adapter, and the rows."""
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    for name, end in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>")):
        bos = {}
        if name == "llama3":  # Llama's tokenizers write it before each text
            bos = {"bos_token": "<|begin|>"}
            begin = [("<|begin|>", VOCABULARY - len(SPECIAL) + SPECIAL.index("<|begin|>"))]
            tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=begin)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<|endoftext|>", **bos)
        fast.save_pretrained(folder / name)
        weights = {f"model.layers.{layer}.{part}.weight": shape for layer in range(2) for part, shape in LAYER.items()}
        tensors = {key: _values(number, shape, 0.05) for number, (key, shape) in enumerate(weights.items())}
        ones = (
            "model.norm",
            *(f"model.layers.{n}.{p}_layernorm" for n in range(2) for p in ("input", "post_attention")),
        )
        tensors |= {f"{key}.weight": _values(0, (32,), 0.0) + 1 for key in ones}
        tensors |= {"model.embed_tokens.weight": _values(98, (VOCABULARY, 32), 0.1)}
        tensors |= {"lm_head.weight": _values(99, (VOCABULARY, 32), 0.1)}
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        config = {
            **SIZES,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 512,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": SPECIAL.index("<|begin|>") + 256,
            "eos_token_id": SPECIAL.index(end) + 256,
            "pad_token_id": 256,
        }
        (folder / name / "config.json").write_text(json.dumps(config))
    _write_adapter(folder / "adapter")
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    _write_rows(folder / "chats.jsonl", chats)
    questions = [{"instruction": prompt, "output": chosen} for prompt, chosen, _ in PAIRS]
    _write_rows(folder / "questions.jsonl", questions)
    talks = [
        {"conversations": [{"from": {"user": "human"}.get(role, "gpt"), "value": text} for role, text in chat]}
        for chat in CHATS
    ]
    (folder / "talks.json").write_text(json.dumps(talks))
    turn = [
        [{"from": name, "value": text} for name, text in zip(("human", "gpt", "gpt"), pair, strict=True)]
        for pair in PAIRS
    ]
    pairs = [{"conversations": [one], "chosen": two, "rejected": three} for one, two, three in turn]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    asked = [
        {
            "messages": [{"role": "user", "content": prompt}],
            "chosen": {"role": "assistant", "content": chosen},
            "rejected": {"role": "assistant", "content": rejected},
        }
        for prompt, chosen, rejected in PAIRS
    ]
    _write_rows(folder / "asked.jsonl", asked)
    labelled = [
        {"prompt": one, "completion": text, "label": text == two} for one, two, three in PAIRS for text in (two, three)
    ]
    _write_rows(folder / "labelled.jsonl", labelled)
    _write_rows(folder / "texts.jsonl", [{"text": " ".join(text for _, text in chat) * 9} for chat in CHATS])
    sharegpt = {"formatting": "sharegpt"}
    judged = {"prompt": "prompt", "response": "completion", "kto_tag": "label", "query": None}
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "talks": {**sharegpt, "file_name": "talks.json", "columns": {"messages": "conversations"}},
        "questions": {"file_name": "questions.jsonl"},
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}},
        "labelled": {"file_name": "labelled.jsonl", "columns": judged},
        "pairs": {**sharegpt, "file_name": "pairs.json", "ranking": True, "columns": columns},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))


def _values(number: int, shape: tuple[int, ...], scale: float) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(number)) * scale


def _write_adapter(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for number, (part, (rows, columns)) in enumerate((*LAYER.items(), *LAYER.items())):
        layer = f"base_model.model.model.layers.{number // len(LAYER)}.{part}"
        tensors[f"{layer}.lora_A.weight"] = _values(200 + number, (4, columns), 0.1)
        tensors[f"{layer}.lora_B.weight"] = _values(300 + number, (rows, 4), 0.1)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = [part.rpartition(".")[2] for part in LAYER]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "chatml"}))


def _write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def configurations(program: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the configurations of a program by name, with the paths of the inputs in a folder."""
    text = (FOLDER / f"{program}.json").read_text().replace("FOLDER", str(folder))
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def run_axolotl(config: Mapping[str, Any], folder: Path) -> list[float]:
    """Returns the losses of axolotl."""
    import yaml
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets, load_preference_datasets
    from axolotl.train import train

    path = folder / "axolotl.yaml"
    path.write_text(yaml.safe_dump({**config, "output_dir": str(folder / "out")}))
    settings = load_cfg(str(path))
    load = load_preference_datasets if settings.rl else load_datasets
    _, _, trainer = train(cfg=settings, dataset_meta=load(cfg=settings))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def run_llama_factory(config: Mapping[str, Any], folder: Path) -> list[float]:
    """Returns the losses of LLaMA-Factory."""
    from llamafactory.train.tuner import run_exp

    run_exp({**config, "output_dir": str(folder / "out")})
    lines = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    return [line["loss"] for line in lines if "loss" in line]


RUN = {"axolotl": run_axolotl, "llama_factory": run_llama_factory}
PACKAGES = {"axolotl": "axolotl", "llama_factory": "llamafactory"}


def run_one(program: str, name: str) -> None:
    """Runs one configuration, and prints its losses as JSON in the last line."""
    import transformers.trainer

    transformers.trainer.round = lambda value, digits=0: value  # type: ignore[attr-defined]  # logs round losses
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        losses = RUN[program](configurations(program, folder)[name], folder)
    print(json.dumps(losses))


def main(program: str, name: str = "") -> None:
    """Records the losses of all configurations of a program, each in a process of its own."""
    if name:
        run_one(program, name)
        return
    recorded = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    names = ("torch", "transformers", "trl", "peft", "accelerate")
    versions = {package: version(package) for package in (PACKAGES[program], *names)}
    losses = {}
    for one in configurations(program, FOLDER):
        command = [sys.executable, __file__, program, one]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        losses[one] = json.loads(output.splitlines()[-1])[:STEPS]
        print(one, losses[one], flush=True)
    recorded[program] = {"versions": versions, "losses": losses}
    LOSSES.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
