"""Verifies every kind of model under all plans that use four ranks; writes results/verify_kinds.json.

python benchmarks/verify_kinds.py [--only KIND...] [--nproc N] [--steps N]

Each kind has the structure of a published family at a small size, with random weights. `llmtrain verify` trains it
under each legal plan, on packed documents, and compares the run with plain PyTorch. Plans that were verified before
with the same versions are taken from the result, so that an interrupted measurement continues.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from llmtrain.plan.load import load_recipe
from llmtrain.plan.search.enumerate import enumerate_plans
from llmtrain.recipe.cluster import local_cluster
from llmtrain.run_dir import environment
from llmtrain.trials.verify.job import comparable

RESULT = Path(__file__).parent / "results" / "verify_kinds.json"
STEPS = 6
NUMBERS = ("loss", "grad_norm", "weights")
AT_ONCE = 16
"""Plans of one call of `llmtrain verify`."""
BYTES = {"vocab_size": 300}
COMMON: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "architecture": "gpt_oss",
        "config": COMMON | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32},
    },
    "Qwen3.5": {"architecture": "qwen3_5_text", "config": COMMON | LINEAR},
    "Qwen3.5 MoE": {
        "architecture": "qwen3_5_moe_text",
        "config": {key: value for key, value in COMMON.items() if key != "intermediate_size"}
        | LINEAR
        | EXPERTS
        | {"shared_expert_intermediate_size": 32},
    },
    "Nemotron-H": {
        "architecture": "nemotron_h",
        "config": {key: value for key, value in COMMON.items() if key != "num_hidden_layers"}
        | {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "n_groups": 4, "ssm_state_size": 16}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "chunk_size": 32},
    },
    "DeepSeek V3.2": {
        "architecture": "deepseek_v32",
        "config": {
            **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
            **{"num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16},
            **{"q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
            **{"index_n_heads": 4, "index_head_dim": 32, "index_topk": 16, "max_position_embeddings": 256},
        },
    },
    "Gemma 3, multimodal": {"pretrained": ""},
    "Qwen3 MoE, LoRA of experts": {
        "architecture": "qwen3_moe",
        "config": COMMON | EXPERTS,
        "adapter": {"rank": 4, "alpha": 8.0, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    },
}


def recipe(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the fields of a recipe; `folder` has the tokenizer, and the weights of a pretrained model."""
    return {
        "name": "kind",
        "model": model,
        "data": {"sources": [{"name": "stdlib"}], "tokenizer": str(folder), "sequence_length": 64},
        "optim": {"lr": 2e-3, "warmup_steps": 2, "clip_grad_norm": 0.5},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "train": {"max_steps": STEPS},
    }


def save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer of bytes."""
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(sorted(alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


def save_wrapper(folder: Path) -> None:
    """Saves a small multimodal Gemma 3 with random weights."""
    text = COMMON | BYTES | {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 32, "patch_size": 8})
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def verify(recipe_file: Path, plans: list[str], ranks: int, steps: int) -> dict[str, list[float] | None]:
    """Returns the largest deviations of each plan, or None for a plan that deviates too far or fails."""
    command = [sys.executable, "-m", "llmtrain", "verify", str(recipe_file), "--nproc", str(ranks)]
    command += ["--steps", str(steps), "--plans", ",".join(plans), "--json"]
    command += ["--run-dir", str(recipe_file.parent / f"run-{plans[0]}")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{plans[0]}: verify exited with {done.returncode}")
    return {
        plan["name"]: [plan["max_deviation"][number] or 0.0 for number in NUMBERS] if plan["certified"] else None
        for plan in json.loads(done.stdout)["plans"]
    }


def plans_of(recipe_file: Path, ranks: int, steps: int) -> list[str]:
    """Returns the names of the legal plans that use all ranks."""
    cluster = local_cluster(ranks)
    declared = comparable(load_recipe(str(recipe_file), [])[0], steps)
    runnable, _ = enumerate_plans(declared, cluster.world_size, cluster.device)
    return [one.name for one in runnable if one.plan.workers == ranks]


def main() -> None:
    """Verifies the plans that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    machine = environment()
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    same = known.get("environment", {}).get("packages") == machine["packages"]
    kinds: dict[str, dict[str, list[float] | None]] = known["kinds"] if same else {}
    for kind in options.only:
        results = kinds.setdefault(kind, {})
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = dict(MODELS[kind])
            if "architecture" in model:
                model["config"] = model["config"] | BYTES
            else:
                save_wrapper(folder)
                model["pretrained"] = str(folder)
            save_tokenizer(folder)
            file = folder / "kind.yaml"
            file.write_text(json.dumps(recipe(model, folder)), encoding="utf-8")
            plans = plans_of(file, options.nproc, options.steps)
            left = [plan for plan in plans if plan not in results]
            for start in range(0, len(left), AT_ONCE):
                results |= verify(file, left[start : start + AT_ONCE], options.nproc, options.steps)
                document = {"kinds": kinds, "ranks": options.nproc, "steps": options.steps, "environment": machine}
                RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        certified = sum(results[plan] is not None for plan in plans)
        print(f"{kind}: {certified} of {len(plans)} plans", file=sys.stderr)


if __name__ == "__main__":
    main()
