"""What a DeepSpeed configuration may contain: every key, at every level, with the type and the range of its value.

The blocks that DeepSpeed validates itself are rendered from it into `deepspeed.json` (`tools/render_lint_schema.py`).
This module lists what it reads key by key, from DeepSpeed 0.19.8's `runtime/config.py` and `runtime/constants.py`; a
test looks for these keys in its sources.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from llmtrain.lint.document import Where


@dataclass(frozen=True)
class Node:
    """The values that a key accepts: any if `types` is empty, and objects with any keys if `keys` is None."""

    types: tuple[str, ...] = ()
    null: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    any_case: bool = False
    default: Any = None
    instead: str | None = None
    validated: bool = False
    """Whether DeepSpeed validates it with pydantic, which refuses other keys and reads "true" and "8" as meant."""
    keys: dict[str, Node] | None = None


_ANY = Node()
_BOOL = Node(("bool",))
_WORD = Node(("str",))
_COUNT = Node(("int",), gt=0)
_DTYPE = Node(("str",), null=True, choices=("fp32", "fp16", "bf16"), any_case=True)
_NAMED_DTYPES = tuple(
    f"{prefix}{name}"
    for prefix, names in (
        ("", "fp16 half float16 fp32 float float32 bf16 bfloat16"),
        ("torch.", "float16 float32 bfloat16"),
    )
    for name in names.split()
)
_NAMED_DTYPE = Node(("str",), null=True, choices=_NAMED_DTYPES)


def _block(**keys: Node) -> Node:
    return Node(("object",), keys=keys)


_WRITTEN: dict[str, Node] = {
    "train_batch_size": _ANY,  # the rules of `batch` check the three batch sizes
    "train_micro_batch_size_per_gpu": _ANY,
    "gradient_accumulation_steps": _ANY,
    "managed_gradient_accumulation": _BOOL,
    "steps_per_print": Node(("float",), null=True, gt=0),
    "dump_state": _BOOL,
    "disable_python_gc": _BOOL,
    "disable_allgather": _BOOL,
    "communication_data_type": _DTYPE,
    "seq_parallel_communication_data_type": _DTYPE,
    "prescale_gradients": _BOOL,
    "gradient_predivide_factor": Node(("float",), gt=0),
    "gradient_allreduce_op": Node(("str",), choices=("mean", "sum"), any_case=True),
    "gradient_clipping": Node(("float",), ge=0),
    "torch_autocast": _block(
        enabled=_BOOL, dtype=_NAMED_DTYPE, lower_precision_safe_modules=Node(("list",), null=True)
    ),
    "data_types": _block(
        grad_accum_dtype=_NAMED_DTYPE, param_dtype=_NAMED_DTYPE, buffer_dtype=_NAMED_DTYPE, keep_in_fp32_modules=_ANY
    ),
    "optimizer": _block(type=_WORD, params=Node(("object",)), legacy_fusion=_BOOL),
    "scheduler": _block(type=_WORD, params=Node(("object",))),
    "zero_allow_untested_optimizer": _BOOL,
    "zero_force_ds_cpu_optimizer": _BOOL,
    "wall_clock_breakdown": Node(("bool",), choices=(True, False)),  # a text raises a TypeError
    "memory_breakdown": _BOOL,
    "use_data_before_expert_parallelism": _BOOL,
    "pipeline": _block(
        stages=_ANY,
        partition=_ANY,
        seed_layers=_BOOL,
        activation_checkpoint_interval=Node(("int",), ge=0),
        use_reentrant=_BOOL,
        pipe_partitioned=_BOOL,
        grad_partitioned=_BOOL,
    ),
    "checkpoint": _block(
        tag_validation=Node(("str",), choices=("Ignore", "Warn", "Fail"), any_case=True),
        load_universal=_BOOL,
        use_node_local_storage=_BOOL,
        checkpoint_serialization=_BOOL,
        parallel_write=_block(pipeline_stage=_BOOL),
    ),
    "dataloader_drop_last": _BOOL,
    "log_level": _ANY,
    "vocabulary_size": Node(("int",), null=True, gt=0),
    "datastates_ckpt": _ANY,
    "data_efficiency": _block(
        enabled=_BOOL,
        seed=Node(("int",)),
        data_sampling=_block(
            enabled=_BOOL,
            num_epochs=_COUNT,
            num_workers=Node(("int",), ge=0),
            pin_memory=_BOOL,
            curriculum_learning=Node(("object",)),
            dynamic_batching=Node(("object",)),
        ),
        data_routing=_block(enabled=_BOOL, random_ltd=Node(("object",))),
    ),
    "sequence_parallel_size": _COUNT,
    "data_parallel_size": _COUNT,
}

REMOVED_KEYS = {
    "elasticity": "set train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps directly",
    "curriculum_learning": "move it to data_efficiency.data_sampling.curriculum_learning",
    "compression_training": "remove it; compress the trained model with another tool",
    "amp": "use bf16, fp16 or torch_autocast",
    "nebula": "remove it; checkpoints are written with torch.save",
    "sparse_attention": "remove it; choose an attention implementation of the model",
    "sparse_gradients": "remove it; a torch.nn.Embedding with sparse=True is reduced sparsely by itself",
    "eigenvalue": "remove it together with quantize_training",
    "quantize_training": "remove it; quantize the trained model with another tool",
    "progressive_layer_drop": "remove it",
    "graph_harvesting": "remove it; torch.compile captures graphs",
}
"""Top-level keys that DeepSpeed now rejects, and how to migrate (DeepSpeed issue 8489)."""

REMOVED_ZERO_KEYS = {
    "mics_shard_size": "use zero_hpz_partition_size (ZeRO++) to shard within a node",
    "mics_hierarchical_params_gather": "use zero_hpz_partition_size (ZeRO++) to shard within a node",
    "zeropp_loco_param": "remove it; zero_quantized_gradients works without error feedback",
}
"""Keys of `zero_optimization` that DeepSpeed now rejects."""

RENAMED = {
    ("aio", "thread_count"): "aio.intra_op_parallelism",
    ("gradient_accumulation_dtype",): "data_types.grad_accum_dtype",
    ("gradient_accumulation_step",): "gradient_accumulation_steps",
    ("micro_batch_size",): "train_micro_batch_size_per_gpu",
    ("max_grad_norm",): "gradient_clipping",
    ("gradient_checkpointing",): "the training program: model.gradient_checkpointing_enable()",
    ("zero_optimization", "find_unused_parameters"): "zero_optimization.ignore_unused_parameters",
    ("zero_optimization", "zero_stage"): "zero_optimization.stage",
}
"""Keys of older versions, other programs and old documents, and their current names."""

REMOVED_OPTIMIZERS = {name.lower(): name for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")}
"""The optimizers with compressed communication, which were removed."""


@dataclass(frozen=True)
class Schema:
    """All keys, and the arguments of optimizers and schedules."""

    deepspeed: str
    root: Node
    optimizers: dict[str, tuple[str, ...]]
    schedulers: dict[str, tuple[str, ...]]
    homes: dict[str, tuple[Where, ...]]
    """The paths at which each key is known, to recognise a misplaced one."""


@cache
def schema() -> Schema:
    """Returns the schema of the DeepSpeed version that it was rendered from."""
    data = json.loads((files("llmtrain.lint") / "deepspeed.json").read_text(encoding="utf-8"))
    rendered = {name: _node(raw) for name, raw in data["blocks"].items()}
    writer = rendered.pop("checkpoint.writer")
    checkpoint = _WRITTEN["checkpoint"].keys or {}
    keys = {
        **_WRITTEN,
        **rendered,
        "checkpoint": _block(**checkpoint, writer=Node(("object",), null=True, keys=writer.keys)),
    }
    root = Node(("object",), keys=keys)
    optimizers, schedulers = (
        {name: tuple(names) for name, names in data[kind].items()} for kind in ("optimizers", "schedulers")
    )
    return Schema(data["deepspeed"], root, optimizers, schedulers, _homes(root))


def default(*where: str) -> Any:
    """Returns DeepSpeed's default for the key at a path, or None if it is not known."""
    node = schema().root
    for key in where:
        node = (node.keys or {})[key]
    return node.default


def _node(raw: dict[str, Any]) -> Node:
    keys = {name: _node(inner) for name, inner in raw["keys"].items()} if "keys" in raw else None
    lists = {name: tuple(raw.get(name, ())) for name in ("types", "choices")}
    return Node(**{**raw, **lists, "keys": keys})


def _homes(root: Node) -> dict[str, tuple[Where, ...]]:
    homes: dict[str, tuple[Where, ...]] = {}
    open_: list[tuple[Where, Node]] = [((), root)]
    while open_:
        where, node = open_.pop()
        for key, inner in (node.keys or {}).items():
            homes[key] = (*homes.get(key, ()), (*where, key))
            open_.append(((*where, key), inner))
    return homes
