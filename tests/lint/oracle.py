"""What the programs that read DeepSpeed configurations answer, found by running their own code on a file.

The Trainer's and Accelerate's steps are those of `TrainingArguments.__post_init__`, `deepspeed_init` and
`Accelerator._prepare_deepspeed`, without a model. Where a file states a value, the Trainer is given the same one:
others can be stated.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

HIDDEN, STEPS = 64, 100
"""The width of the model and the number of steps, which readers fill in."""


def answer(text: str, reader: str, world: int = 1, yaml: bool = False, arguments: Mapping[str, Any] = {}) -> str:
    """Returns "" if the reader and DeepSpeed's own check accept a file, else the exception in a line."""
    try:
        check(read(text, reader, world, yaml, arguments), world)
    except Exception as error:  # any exception is an answer
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def read(
    text: str,
    reader: str,
    world: int,
    yaml: bool = False,
    arguments: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Returns what a reader hands to DeepSpeed."""
    if yaml:
        from yaml import safe_load

        text = json.dumps(safe_load(text))
    if reader == "deepspeed":
        import hjson
        from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

        return hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    if reader == "trainer":
        return _trainer(json.loads(text), world, arguments)
    return {"accelerate": _accelerate, "lightning": _lightning}[reader](json.loads(text), world)


def build(values: dict[str, Any]) -> str:
    """Returns "" if DeepSpeed builds an engine on one CPU, and trains two steps unless in fp16; else the exception.

    The batch sizes are those of one rank. Adam is torch's, since DeepSpeed's own would be compiled first; fp16 is said
    to be supported, which it is on a GPU.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    for key in ("train_batch_size", "gradient_accumulation_steps"):
        values.pop(key, None)
    values["train_micro_batch_size_per_gpu"] = 2
    optimizer = values.setdefault("optimizer", {"type": "AdamW"})
    if str(optimizer.get("type")).lower() in ("adam", "adamw", "muon"):
        optimizer.setdefault("params", {})["torch_adam"] = True
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=values)
        dtype = next(iter(engine.module.parameters())).dtype
        for _ in range(0 if dtype == torch.float16 else 2):
            engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().square().mean())
            engine.step()
        engine.destroy()
    except Exception as error:  # whatever the engine raises is its answer
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    finally:
        del accelerator.is_fp16_supported
    return ""


def check(values: dict[str, Any], world: int = 1) -> None:
    """Raises what DeepSpeed's configuration raises for a number of ranks."""
    import deepspeed.runtime.config as config
    from deepspeed.utils import logger

    logger.setLevel(logging.CRITICAL)
    real = config.dist
    config.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: world)
    try:
        config.DeepSpeedConfig(values)
    finally:
        config.dist = real


def _get(values: dict[str, Any], path: str, default: Any) -> Any:
    value: Any = values
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return default if value is None or value == "auto" else value


def _trainer(values: dict[str, Any], world: int, stated: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = HfTrainerDeepSpeedConfig(values)
    betas = _get(values, "optimizer.params.betas", [0.9, 0.999])
    rate = _get(values, "optimizer.params.lr", _get(values, "scheduler.params.warmup_max_lr", 5e-5))
    steps = _get(values, "gradient_accumulation_steps", 1)
    total = _get(values, "train_batch_size", None)
    micro = _get(values, "train_micro_batch_size_per_gpu", total // (world * steps) if total else 8)
    arguments = SimpleNamespace(
        world_size=world,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        max_grad_norm=_get(values, "gradient_clipping", 1.0),
        learning_rate=rate,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_epsilon=_get(values, "optimizer.params.eps", 1e-8),
        weight_decay=_get(values, "optimizer.params.weight_decay", 0.0),
        save_on_each_node=False,
        fp16=_get(values, "fp16.enabled", False),
        bf16=_get(values, "bf16.enabled", False),
        fp16_full_eval=False,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: _get(values, "scheduler.params.warmup_num_steps", 10),
    )
    vars(arguments).update(stated)
    config.trainer_config_process(arguments)
    plugin = _plugin(config, "fp16" if arguments.fp16 is True else "bf16" if arguments.bf16 is True else "no")
    total_steps = _get(values, "scheduler.params.total_num_steps", STEPS)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN))
    config.mismatches = [one for one in config.mismatches if "warmup_max_lr" not in one]  # has a lint rule
    config.trainer_config_finalize(arguments, model, total_steps)
    if "optimizer" not in config.config:
        config.config["zero_allow_untested_optimizer"] = True
    return _prepared(plugin, world)


def _accelerate(values: dict[str, Any], world: int) -> dict[str, Any]:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    plugin = _plugin(HfDeepSpeedConfig(values), "no")
    return _prepared(plugin, world)


def _plugin(config: Any, precision: str) -> Any:
    from accelerate import DeepSpeedPlugin

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    plugin.set_mixed_precision(precision)
    return plugin


def _prepared(plugin: Any, world: int) -> dict[str, Any]:
    """Fills in what `Accelerator._prepare_deepspeed` does, with the optimizer and the schedule of the file."""
    micro = (
        8 if plugin.is_auto("train_micro_batch_size_per_gpu") else plugin.get_value("train_micro_batch_size_per_gpu")
    )
    plugin.fill_match("gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=1)
    filled = {
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "zero_optimization.reduce_bucket_size": HIDDEN * HIDDEN,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * HIDDEN * HIDDEN),
        "zero_optimization.stage3_param_persistence_threshold": 10 * HIDDEN,
        "optimizer.params.lr": 1e-4,
        "optimizer.params.weight_decay": 0,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": 1e-4,
        "scheduler.params.warmup_num_steps": 10,
        "scheduler.params.total_num_steps": STEPS,
    }
    if micro is not None:
        filled["train_micro_batch_size_per_gpu"] = micro
        filled["train_batch_size"] = micro * plugin.get_value("gradient_accumulation_steps") * world
    plugin.deepspeed_config_process(must_match=False, **filled)
    made: dict[str, Any] = plugin.deepspeed_config
    return made


def _lightning(values: dict[str, Any], world: int) -> dict[str, Any]:
    """Does what `DeepSpeedStrategy._format_config` of Lightning 2 does, which the tests do not install."""
    if "gradient_accumulation_steps" in values:
        raise ValueError("Do not set `gradient_accumulation_steps` in the DeepSpeed config")
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        **values,
        "gradient_accumulation_steps": 1,
    }
