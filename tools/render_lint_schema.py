"""Writes what `llmtrain lint` knows about DeepSpeed's configuration, read from the installed DeepSpeed and torch.

Run `python tools/render_lint_schema.py` after an update of DeepSpeed. A test renders the file again and compares. A
node is {"types": [...], "null": bool, "ge" | "gt" | "le" | "lt": bound, "choices": [...], "keys": {name: node},
"default": value, "validated": bool, "instead": the key that replaces a deprecated one}; an empty node accepts anything.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

os.environ.setdefault("DS_ACCELERATOR", "cpu")

TARGET = Path(__file__).parents[1] / "llmtrain" / "lint" / "deepspeed.json"
Node = dict[str, Any]
_PLAIN = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    Path: "str",
    list: "list",
    tuple: "list",
    dict: "object",
}


def of_model(model: type[BaseModel]) -> Node:
    """Returns the node of one of DeepSpeed's pydantic models, whose fields can be set by name or by alias."""
    keys = {}
    for name, field in model.model_fields.items():
        node = of_annotation(field.annotation)
        for bound in field.metadata:
            node.update({key: getattr(bound, key) for key in ("ge", "gt", "le", "lt") if hasattr(bound, key)})
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if extra.get("deprecated"):
            node["instead"] = extra.get("new_param", "")
        if isinstance(field.default, bool | int | float | str):
            node["default"] = field.default
        keys[name] = node = {**node, "validated": True}
        if field.alias and field.alias != name:
            keys[field.alias] = node
    return {"types": ["object"], "keys": keys, "validated": True}


def of_annotation(annotation: Any) -> Node:
    """Returns the node of a type annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        nodes = [of_annotation(one) for one in arguments if one is not type(None)]
        node = nodes[0] if len(nodes) == 1 else {"types": sorted({kind for one in nodes for kind in one["types"]})}
        return {**node, "null": True} if type(None) in arguments else node
    if origin is typing.Literal:
        return {"types": ["str"], "choices": list(arguments)}
    if origin is not None:
        return {"types": [_PLAIN[origin]]}
    if annotation in _PLAIN:
        return {"types": [_PLAIN[annotation]]}
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        values = list(dict.fromkeys(one.value for one in annotation))
        return {"types": [_PLAIN[type(values[0])]], "choices": values}
    return of_model(annotation) if hasattr(annotation, "model_fields") else {}


def of_defaults(defaults: dict[str, Any]) -> Node:
    """Returns the node of a block that DeepSpeed reads key by key, with the types of its defaults."""
    keys = {}
    for name, value in defaults.items():
        known = type(value) in _PLAIN and value != "auto"
        keys[name] = {"types": [_PLAIN[type(value)]]} if known else {}
    return {"types": ["object"], "keys": keys}


def parameters(of: Any) -> list[str]:
    """Returns the argument names of a constructor without the first (parameters, or the optimizer)."""
    return sorted(list(inspect.signature(of).parameters)[1:])


def blocks() -> dict[str, Node]:
    """Returns the blocks of the top level."""
    from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    bf16 = of_model(DeepSpeedBF16Config)
    experts = {one.name: one.default for one in dataclasses.fields(AutoEPConfig) if not one.name.startswith("_")}
    return {
        "zero_optimization": of_model(DeepSpeedZeroConfig),
        "fp16": of_model(DeepSpeedFP16Config),
        "bf16": bf16,
        "bfloat16": bf16,
        "hybrid_engine": of_model(HybridEngineConfig),
        "comms_logger": of_model(CommsLoggerConfig),
        "compile": of_model(CompileConfig),
        "tensor_parallel": of_model(TPTrainingConfig),
        "weight_quantization": of_model(WeightQuantConfig),
        **of_model(DeepSpeedMonitorConfig)["keys"],
        "timers": {"types": ["object"], "keys": {"throughput": of_model(DeepSpeedThroughputTimerConfig)}},
        "activation_checkpointing": of_defaults(ACT_CHKPT_DEFAULT),
        "aio": of_defaults(AIO_DEFAULT_DICT),
        "flops_profiler": of_defaults(vars(DeepSpeedFlopsProfilerConfig({}))),
        "autotuning": of_defaults(vars(DeepSpeedAutotuningConfig({}))),
        "expert_parallel": of_defaults(experts),
        "checkpoint.writer": of_defaults(get_checkpoint_writer_config({"writer": {}})),
    }


def optimizers() -> dict[str, list[str]]:
    """Maps each optimizer to its arguments: DeepSpeed's own by lower-case name, torch's by their own names."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.engine import DeepSpeedEngine

    made = {
        name: parameters(one)
        for name, one in vars(torch.optim).items()
        if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
    }
    adam = {*parameters(FusedAdam), *parameters(DeepSpeedCPUAdam), *parameters(torch.optim.AdamW), "torch_adam"}
    muon = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, "muon_lr", "adam_lr", "torch_adam"}
    lion = {*parameters(FusedLion), *parameters(DeepSpeedCPULion)}
    adagrad = {*parameters(DeepSpeedCPUAdagrad), *parameters(torch.optim.Adagrad)}
    own = {"adam": adam, "adamw": adam, "muon": {*muon, "adam_w_mode"}, "lion": lion, "adagrad": adagrad}
    own["lamb"] = set(parameters(FusedLamb))
    return {**made, **{name: sorted(names) for name, names in own.items()}}


def schedulers() -> dict[str, list[str]]:
    """Maps each learning rate schedule of DeepSpeed and torch to its arguments."""
    import torch
    from deepspeed.runtime import lr_schedules

    base = torch.optim.lr_scheduler.LRScheduler
    made = {
        name: parameters(one)
        for name, one in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(one) and issubclass(one, base) and one is not base and not name.startswith("_")
    }
    return {**made, **{name: parameters(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}}


def rendered() -> str:
    """Returns the whole file."""
    import deepspeed

    data = {
        "deepspeed": deepspeed.__version__.partition("+")[0],
        "blocks": blocks(),
        "optimizers": optimizers(),
        "schedulers": schedulers(),
    }
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(rendered())
