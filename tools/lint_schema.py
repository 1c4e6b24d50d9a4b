"""What `llmtrain lint` knows about DeepSpeed's configuration: `packages/lint/llmtrain_lint/deepspeed.json`.

It is read from the installed DeepSpeed; the other releases are kept. `lint_schema:releases` reads all of them: pip
downloads their source archives, and each is imported from its unpacked archive, beside the installed torch.

The newest release is written in full. "older" has a JSON merge patch (RFC 7396) for each older one, from the release
after it. A node of "keys" is {"types": [...], "null": bool, "ge" | "gt" | "le" | "lt": bound, "choices": [...], "keys":
{name: node}, "default": value, "validated": bool, "instead": the key that replaces a deprecated one, "removed": whether
the release refuses it as removed}; an empty node accepts anything.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import types
import typing
from collections.abc import Collection, Iterator
from enum import Enum
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from llmtrain_lint.schema import REMOVED_KEYS, releases, version
from tools.page import ROOT, Files

os.environ.setdefault("DS_ACCELERATOR", "cpu")

TARGET = "packages/lint/llmtrain_lint/deepspeed.json"
OLDEST = "0.16.0"
"""The oldest release that is read, of November 2024."""
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

_BOOL: Node = {"types": ["bool"]}
_OBJECT: Node = {"types": ["object"]}
_COUNT: Node = {"types": ["int"], "gt": 0}
_INT: Node = {"types": ["int"], "ge": 0}
_DTYPE: Node = {"types": ["str"], "null": True, "choices": ["fp32", "fp16", "bf16"], "any_case": True}
_NAMED_DTYPES = [
    *("fp16", "half", "float16", "fp32", "float", "float32", "bf16", "bfloat16"),
    *("torch.float16", "torch.float32", "torch.bfloat16"),
]
_NAMED_DTYPE: Node = {"types": ["str"], "null": True, "choices": _NAMED_DTYPES}


def _block(**keys: Node) -> Node:
    return {"types": ["object"], "keys": keys}


READ_BY_KEY: dict[str, Node] = {
    "train_batch_size": {},  # the rules of `batch` check the three batch sizes
    "train_micro_batch_size_per_gpu": {},
    "gradient_accumulation_steps": {},
    "managed_gradient_accumulation": _BOOL,
    "steps_per_print": {"types": ["float"], "null": True, "gt": 0},
    "dump_state": _BOOL,
    "disable_python_gc": _BOOL,
    "disable_allgather": _BOOL,
    "communication_data_type": _DTYPE,
    "seq_parallel_communication_data_type": _DTYPE,
    "seq_parallel_comm_data_type": _DTYPE,
    "prescale_gradients": _BOOL,
    "gradient_predivide_factor": {"types": ["float"], "gt": 0},
    "gradient_allreduce_op": {"types": ["str"], "choices": ["mean", "sum"], "any_case": True},
    "gradient_clipping": {"types": ["float"], "ge": 0},
    "torch_autocast": _block(
        enabled=_BOOL,
        dtype={**_NAMED_DTYPE, "null": False},
        lower_precision_safe_modules={"types": ["list"]},
    ),
    "data_types": _block(
        grad_accum_dtype=_NAMED_DTYPE, param_dtype=_NAMED_DTYPE, buffer_dtype=_NAMED_DTYPE, keep_in_fp32_modules={}
    ),
    "optimizer": _block(type={"types": ["str"]}, params=_OBJECT, legacy_fusion=_BOOL),
    "scheduler": _block(type={"types": ["str"]}, params=_OBJECT),
    "zero_allow_untested_optimizer": _BOOL,
    "zero_force_ds_cpu_optimizer": _BOOL,
    "wall_clock_breakdown": {"types": ["bool"], "choices": [True, False]},  # a text raises a TypeError
    "memory_breakdown": _BOOL,
    "use_data_before_expert_parallelism": _BOOL,
    "pipeline": _block(
        stages={},
        partition={},
        seed_layers=_BOOL,
        activation_checkpoint_interval=_INT,
        use_reentrant=_BOOL,
        pipe_partitioned=_BOOL,
        grad_partitioned=_BOOL,
    ),
    "checkpoint": _block(
        tag_validation={"types": ["str"], "choices": ["Ignore", "Warn", "Fail"], "any_case": True},
        load_universal=_BOOL,
        use_node_local_storage=_BOOL,
        checkpoint_serialization=_BOOL,
        parallel_write=_block(pipeline_stage=_BOOL),
    ),
    "dataloader_drop_last": _BOOL,
    "log_level": {},
    "vocabulary_size": {"types": ["int"], "null": True, "gt": 0},
    "datastates_ckpt": {},
    "data_efficiency": _block(
        enabled=_BOOL,
        seed={"types": ["int"]},
        data_sampling=_block(
            enabled=_BOOL,
            num_epochs=_COUNT,
            num_workers=_INT,
            pin_memory=_BOOL,
            curriculum_learning=_OBJECT,
            dynamic_batching=_OBJECT,
        ),
        data_routing=_block(enabled=_BOOL, random_ltd=_OBJECT),
    ),
    "sequence_parallel_size": _COUNT,
    "data_parallel_size": _COUNT,
    **{name: {} for name in REMOVED_KEYS},  # of older releases, whose inner keys are not compared
}
"""The keys that DeepSpeed reads one by one. A release knows those that are strings of its sources."""
MODELS = {
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "bfloat16": "runtime.precision_config:DeepSpeedBF16Config",
    "hybrid_engine": "runtime.config:HybridEngineConfig",
    "comms_logger": "comm.config:CommsLoggerConfig",
    "compile": "compile.config:CompileConfig",
    "tensor_parallel": "runtime.tensor_parallel.config:TPTrainingConfig",
    "weight_quantization": "inference.config:WeightQuantConfig",
}
"""The blocks that DeepSpeed validates with pydantic."""


def find(name: str) -> Any:
    """Returns an object of DeepSpeed by `module:name`, or None if the release has none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(f"deepspeed.{module}"), attribute, None)
    except ModuleNotFoundError:
        return None


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


def of_constants(prefix: str) -> Node:
    """Returns the node of a block that is read key by key, from constants such as FP16_ENABLED_DEFAULT."""
    constants = vars(import_module("deepspeed.runtime.constants"))
    named = {name: value for name, value in constants.items() if f"{name}_DEFAULT" in constants}
    return of_defaults(
        {value: constants[f"{name}_DEFAULT"] for name, value in named.items() if name.startswith(f"{prefix}_")}
    )


def parameters(of: Any) -> list[str]:
    """Returns the argument names of a constructor without the first (parameters, or the optimizer)."""
    return sorted(list(inspect.signature(of).parameters)[1:])


def read_by_key(words: set[str], nodes: dict[str, Node] = READ_BY_KEY) -> dict[str, Node]:
    """Returns the nodes whose keys are strings of the sources, at every level."""
    made = {}
    for name, node in nodes.items():
        if name in words:
            made[name] = {**node, "keys": read_by_key(words, node["keys"])} if "keys" in node else dict(node)
    return made


def strings(package: Path) -> set[str]:
    """Returns the string constants of a package's sources, without those of inference."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
        if "inference" not in path.relative_to(package).parts
    )
    constants = (one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.Constant))
    return {one.value for one in constants if isinstance(one.value, str)}


def keys(package: Path) -> dict[str, Node]:
    """Returns the keys of the top level."""
    config, constants = (import_module(f"deepspeed.runtime.{name}") for name in ("config", "constants"))
    made = read_by_key(strings(package))
    made["gradient_clipping"]["default"] = constants.GRADIENT_CLIPPING_DEFAULT
    made.update({name: of_model(model) for name, path in MODELS.items() if (model := find(path))})
    if "fp16" not in made:
        made.update(fp16=of_constants("FP16"), bf16=of_constants("BFLOAT16"), bfloat16=of_constants("BFLOAT16"))
    made.update(of_model(find("monitor.config:DeepSpeedMonitorConfig"))["keys"])
    timer = of_model(find("utils.config:DeepSpeedThroughputTimerConfig"))
    made["timers"] = {"types": ["object"], "keys": {"throughput": timer}}
    activations = find("runtime.activation_checkpointing.config:ACT_CHKPT_DEFAULT")
    made["activation_checkpointing"] = of_defaults(activations)
    made["aio"] = of_defaults(find("runtime.swap_tensor.aio_config:AIO_DEFAULT_DICT"))
    made["flops_profiler"] = of_defaults(vars(find("profiling.config:DeepSpeedFlopsProfilerConfig")({})))
    made["autotuning"] = of_defaults(vars(find("autotuning.config:DeepSpeedAutotuningConfig")({})))
    if experts := find("module_inject.auto_ep_config:AutoEPConfig"):
        fields = {one.name: one.default for one in dataclasses.fields(experts) if not one.name.startswith("_")}
        made["expert_parallel"] = of_defaults(fields)
    if writer := find("runtime.model_checkpointing.config:get_checkpoint_writer_config"):
        made["checkpoint"]["keys"]["writer"] = {**of_defaults(writer({"writer": {}})), "null": True}
    for where, names in (
        (made, "_REMOVED_TOP_LEVEL_CONFIG_KEYS"),
        (made["zero_optimization"]["keys"], "_REMOVED_ZERO_CONFIG_KEYS"),
    ):
        where.update({name: {"removed": True} for name in getattr(config, names, ())})
    return made


def optimizers() -> dict[str, list[str]]:
    """Maps each optimizer to its arguments: DeepSpeed's own by lower-case name, torch's by their own names."""
    import torch

    made = {
        name: parameters(one)
        for name, one in vars(torch.optim).items()
        if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
    }
    config = import_module("deepspeed.runtime.config")
    adam = (find("ops.adam:FusedAdam"), find("ops.adam:DeepSpeedCPUAdam"), torch.optim.AdamW)
    classes = {
        "adam": adam,
        "adamw": adam,
        "adagrad": (find("ops.adagrad:DeepSpeedCPUAdagrad"), torch.optim.Adagrad),
        "lion": (find("ops.lion:FusedLion"), find("ops.lion:DeepSpeedCPULion")),
        "lamb": (find("ops.lamb:FusedLamb"),),
        "onebitadam": (find("runtime.fp16.onebit.adam:OnebitAdam"),),
        "zerooneadam": (find("runtime.fp16.onebit.zoadam:ZeroOneAdam"),),
        "onebitlamb": (find("runtime.fp16.onebit.lamb:OnebitLamb"),),
    }
    own = {
        name: {argument for one in several for argument in parameters(one)} - {"deepspeed"}
        for name, several in classes.items()
        if name in config.DEEPSPEED_OPTIMIZERS
    }
    if "muon" in config.DEEPSPEED_OPTIMIZERS:
        own["muon"] = _muon_arguments(find("runtime.engine:DeepSpeedEngine"))
    for name in {"adam", "adamw", "muon"} & own.keys():
        own[name] |= {"torch_adam", "adam_w_mode"}  # which Muon ignores
    return {**made, **{name: sorted(names) for name, names in own.items()}}


def _muon_arguments(engine: Any) -> set[str]:
    """Returns the arguments of Muon and of its half with Adam, which older releases list where they are used."""
    if hasattr(engine, "_MUON_HALF_KEYS"):
        return {*engine._MUON_HALF_KEYS, *engine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"}
    source = inspect.getsource(engine._configure_basic_optimizer)
    listed = re.findall(r"for key in (\[[^\]]*\])", source[source.index("MUON_OPTIMIZER") :])
    return {one for names in listed for one in ast.literal_eval(names)}


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


def facts() -> dict[str, Any]:
    """Returns what is known of the release that is imported."""
    import deepspeed

    package = Path(deepspeed.__file__).parent
    version = deepspeed.__version__.partition("+")[0].strip()
    return {"deepspeed": version, "keys": keys(package), "optimizers": optimizers(), "schedulers": schedulers()}


def patch(old: Any, new: Any) -> Any:
    """Returns the JSON merge patch that makes `new` of `old`."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    made = {key: None for key in old if key not in new}
    return made | {key: patch(old.get(key), value) for key, value in new.items() if old.get(key) != value}


def text(releases: list[dict[str, Any]]) -> str:
    """Returns the file for releases in falling order."""
    older = [patch(newer, one) for newer, one in pairwise(releases)]
    return json.dumps({**releases[0], "older": older}, indent=1, sort_keys=True) + "\n"


def files(which: str = "installed") -> Files:
    """Returns the file with the installed release, and the others as they are; or with all, if asked for `releases`."""
    if which == "releases":
        return {TARGET: text([found for _, found in of_each_release("tools.lint_schema")])}
    installed = facts()
    known = [one for one in releases() if one["deepspeed"] != installed["deepspeed"]]
    return {TARGET: text(sorted([installed, *known], key=lambda one: version(one["deepspeed"]), reverse=True))}


def unpacked(number: str, folder: Path) -> Path:
    """Returns the sources of a release, downloaded by pip unless the folder has them."""
    made = folder / f"deepspeed-{number}"
    if not made.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-binary", ":all:", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "--dest", str(folder), f"deepspeed=={number}"], check=True)
        with tarfile.open(folder / f"deepspeed-{number}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return made


def of_each_release(module: str, only: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yields what `facts` of a module returns with each release from OLDEST on, or with some, the newest first."""
    listed = [sys.executable, "-m", "pip", "index", "versions", "deepspeed"]
    answer = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    numbers = re.findall(r"[\d.]+", answer.partition("Available versions:")[2].partition("\n")[0])
    program = f"import json; from {module} import facts; print(json.dumps(facts()))"
    with tempfile.TemporaryDirectory() as folder:
        for number in (one for one in numbers if version(one) >= version(OLDEST) and (not only or one in only)):
            compiled = {"TORCH_EXTENSIONS_DIR": f"{folder}/extensions-{number}"}  # not those of the installed one
            path = {"PYTHONPATH": f"{unpacked(number, Path(folder))}{os.pathsep}{ROOT}"}
            command = [sys.executable, "-c", program]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | compiled | path
            )
            yield number, json.loads(done.stdout.splitlines()[-1])
            print(number, "is read", file=sys.stderr)
