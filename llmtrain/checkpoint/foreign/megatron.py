"""Reads distributed checkpoints of Megatron-Core (`torch_dist`), with the names of a model of transformers.

Megatron joins queries, keys and values in one weight, group by group, and gate and up projection in another. It stacks
the layers' tensors along a new first dimension. All of this only moves elements, so it holds for the states of an
optimizer as it does for the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmtrain.checkpoint.foreign.distributed import DistributedTensor, is_distributed, read_parts
from llmtrain.checkpoint.foreign.pickles import Record, fail, read_torch
from llmtrain.checkpoint.foreign.state import STEP, ForeignGroup, ForeignState, ForeignTensor, options_of, plain_number
from llmtrain.errors import format_value
from llmtrain.system.untrusted import UNREADABLE, read_text

COMMON = "common.pt"
ITERATION = "latest_checkpointed_iteration.txt"
EMBEDDING = "embedding.word_embeddings.weight"
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([A-Za-z0-9_]+)\.(.+)")
FLAT = "optimizer.distributed."
"""Beginning of the names of what the distributed optimizer saves as its ranks hold it."""
MASTER = ("param", "fp32_param")
"""Kinds of state that are the weights in fp32."""
FITTING = "set the fields of model.config in the recipe to what the folder has"
LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+?)[._](weight|bias)(_[wv])?")
FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3")
"""Families whose layers Megatron-Core has with the same mathematics."""
REFUSED = {
    "apply_layernorm_1p": "norms whose weights are stored without the 1 that is added to them",
    "rotary_interleaved": "rotary positions in neighbouring pairs",
    "multi_latent_attention": "multi-latent attention",
}
"""Settings of Megatron-LM under which the same tensors mean something else."""

Part = Callable[[Tensor], Tensor]
"""Takes the part of a tensor that is a weight of its own."""


def is_megatron(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint of Megatron-Core in torch's format."""
    return is_distributed(folder) and (folder / COMMON).is_file()


def latest_iteration(folder: Path) -> Path | None:
    """Returns the folder that Megatron's file of the last iteration names, if there is one."""
    if not (folder / ITERATION).is_file():
        return None
    try:
        text = read_text(folder / ITERATION, 64).strip()
    except UNREADABLE:
        text = ""
    found = folder / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    if not is_megatron(found):
        message = f"names {found.name}, which is no distributed checkpoint (torch_dist)"
        fail(folder / ITERATION, message, "export it with Megatron-Bridge, and train from its weights")
    return found


def read_megatron(folder: Path, model: PreTrainedModel) -> ForeignState:
    """Reads a folder for a model, which is on the meta device.

    Raises CheckpointError for what is not supported, not complete, or of another number of heads than the model.
    """
    if model.config.model_type not in FAMILIES:
        message = f"is a checkpoint of Megatron, which is imported into {', '.join(FAMILIES)}"
        fail(folder, f"{message}; the recipe's model is {model.config.model_type}", "train from its exported weights")
    tensors, objects = read_parts(folder)
    common = read_torch(folder / COMMON)
    prefix = next((name.removesuffix(EMBEDDING) for name in tensors if re.fullmatch(rf"(\w+\.)*{EMBEDDING}", name)), "")
    weights, states = dict[str, DistributedTensor](), dict[str, dict[str, DistributedTensor]]()
    for name, tensor in tensors.items():
        if match := STATE.fullmatch(name):
            states.setdefault(match[1], {})[match[2].removeprefix(prefix)] = tensor
        elif not name.startswith(FLAT):
            weights[name.removeprefix(prefix)] = tensor
    flat = any(name.startswith(FLAT) for name in tensors)
    if not states:
        held = "holds the optimizer's state as its ranks do (dp_reshardable)" if flat else "has no optimizer states"
        fix = "save it with --dist-ckpt-optim-fully-reshardable, or without the distributed optimizer"
        fail(folder, held, fix if flat else "start from its weights with model.pretrained")
    state = ForeignState("Megatron-Core", int(plain_number(common.get("iteration"))) or None)
    _compare(folder, common.get("args"), model, state)
    parts = _Parts(folder, model)
    state.weights = dict(parts.divided(weights))
    rows = weights[EMBEDDING].shape[0] if EMBEDDING in weights else 0
    if rows > (vocabulary := model.get_input_embeddings().weight.shape[0]):
        message = f"vocabulary: {rows:,} rows in the folder, {vocabulary:,} here; the others, which its loss included,"
        state.differences.append(f"{message} are cut (model.config.vocab_size={rows} keeps them)")
    for kind, of_weights in states.items():
        for name, found in parts.divided(of_weights, {name: one.shape for name, one in weights.items()}):
            if kind in MASTER:
                state.weights[name] = found
            else:
                state.states.setdefault(name, {})[kind] = found
    saved = [read() for name, read in objects.items() if re.fullmatch(rf"{FLAT}.*\.optimizer(/.*)?", name)]
    _add_options(state, [common.get("optimizer"), *saved])
    state.unread += ["the state of its schedule"] if "opt_param_scheduler" in common else []
    others = {re.sub(r".*\._extra_state.*", "extra states of layers", name.split("/")[0]) for name in objects}
    state.unread += sorted(name for name in others if not name.startswith(("rng_state", FLAT)))
    return state


def _compare(folder: Path, arguments: Any, model: PreTrainedModel, state: ForeignState) -> None:
    """Compares the settings that Megatron-LM saves with those of the model. Other programs save none of them."""
    config = model.config
    heads, groups, size = _heads_of(model)
    if not isinstance(arguments, Record):
        state.differences.append(f"heads: the folder does not tell them; here there are {heads} and {groups}")
        return
    if refused := [what for name, what in REFUSED.items() if arguments.get(name)]:
        fail(folder, f"has {' and '.join(refused)}, which no model here has", "train from its exported weights")
    theirs = (
        arguments.get("num_attention_heads"),
        arguments.get("num_query_groups") if arguments.get("group_query_attention") else None,
        arguments.get("kv_channels"),
    )
    wrong = [
        f"{what} {there}, not {here}"
        for what, there, here in zip(("heads", "groups", "size of a head"), theirs, (heads, groups, size), strict=True)
        if there not in (None, here)
    ]
    if wrong:
        message = f"has another attention than the recipe's model: {', '.join(wrong)}"
        fail(folder, message, FITTING)
    rotary = getattr(config, "rope_parameters", None) or {}
    here: dict[str, Any] = {
        "norm_epsilon": getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_epsilon", None),
        "rotary_base": rotary.get("rope_theta"),
        "rotary_percent": rotary.get("partial_rotary_factor", 1.0) if rotary else None,
        "use_rope_scaling": rotary.get("rope_type", "default") != "default" if rotary else None,
        "moe_router_topk": getattr(config, "num_experts_per_tok", None),
        "moe_router_pre_softmax": False if hasattr(config, "num_experts_per_tok") else None,
        "openai_gelu": config.activation_function == "gelu_new" if hasattr(config, "activation_function") else None,
    }
    for name, value in here.items():
        if value is not None and arguments.get(name, value) != value:
            state.differences.append(
                f"{name}: {format_value(arguments.get(name))} in the folder, {format_value(value)} here"
            )


def _heads_of(model: PreTrainedModel) -> tuple[int, int, int]:
    """Returns the numbers of heads of queries and of keys, and the size of a head."""
    config = model.config
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    return heads, groups, int(getattr(config, "head_dim", None) or config.hidden_size // heads)


class _Parts:
    """Divides Megatron's tensors into weights of a model of transformers."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._folder = folder
        self._heads, self._count = _heads_of(model), int(model.config.num_hidden_layers)
        rows = partial(_first_rows, model.get_input_embeddings().weight.shape[0])
        first, second = partial(_half, 0), partial(_half, 1)
        joined: list[Part] = [partial(self._attention, which) for which in range(3)]
        self._single: dict[str, tuple[str, Part]]
        self._layers: dict[str, list[tuple[str, Part]]]
        if model.config.model_type == "gpt2":
            self._prefix = "transformer.h."
            self._single = {
                EMBEDDING: ("transformer.wte.weight", rows),
                "embedding.position_embeddings.weight": ("transformer.wpe.weight", _same),
                **{f"decoder.final_layernorm.{one}": (f"transformer.ln_f.{one}", _same) for one in ("weight", "bias")},
            }
            self._layers = {
                "self_attention.linear_qkv.layer_norm": [("ln_1", _same)],
                "self_attention.linear_qkv": [("attn.c_attn", lambda one: torch.cat([part(one) for part in joined]))],
                "self_attention.linear_proj": [("attn.c_proj", _same)],
                "mlp.linear_fc1.layer_norm": [("ln_2", _same)],
                "mlp.linear_fc1": [("mlp.c_fc", _same)],
                "mlp.linear_fc2": [("mlp.c_proj", _same)],
            }
            for module, targets in self._layers.items():  # its layers are convolutions, with transposed weights
                self._layers[module] = [(name, partial(_transposed, part)) for name, part in targets]
            return
        self._prefix = "model.layers."
        self._single = {
            EMBEDDING: ("model.embed_tokens.weight", rows),
            "output_layer.weight": ("lm_head.weight", rows),
            "decoder.final_layernorm.weight": ("model.norm.weight", _same),
        }
        self._layers = {
            "self_attention.linear_qkv.layer_norm": [("input_layernorm", _same)],
            "self_attention.linear_qkv": [
                (f"self_attn.{name}_proj", part) for name, part in zip("qkv", joined, strict=True)
            ],
            "self_attention.q_layernorm": [("self_attn.q_norm", _same)],
            "self_attention.k_layernorm": [("self_attn.k_norm", _same)],
            "self_attention.linear_proj": [("self_attn.o_proj", _same)],
            "mlp.linear_fc1.layer_norm": [("post_attention_layernorm", _same)],
            "pre_mlp_layernorm": [("post_attention_layernorm", _same)],
            "mlp.linear_fc1": [("mlp.gate_proj", first), ("mlp.up_proj", second)],
            "mlp.linear_fc1_w": [("mlp.gate_proj", _same)],
            "mlp.linear_fc1_v": [("mlp.up_proj", _same)],
            "mlp.linear_fc2": [("mlp.down_proj", _same)],
            "mlp.router": [("mlp.gate", _same)],
            "mlp.experts.experts.linear_fc1": [("mlp.experts.gate_up_proj", _same)],
            "mlp.experts.experts.linear_fc2": [("mlp.experts.down_proj", _same)],
        }

    def divided(
        self, tensors: Mapping[str, DistributedTensor], shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> Iterator[tuple[str, ForeignTensor]]:
        """Yields weights, or states of them, by the model's names, and tensors that it has not by their own.

        shapes: of the weights whose states the tensors are, which may be flattened.
        """
        for name, tensor in tensors.items():
            shape = shapes.get(name, tensor.shape)
            match = LAYER.fullmatch(name)
            targets = self._layers.get(match[2] + (match[4] or "")) if match else None
            if match and targets:
                if not match[1] and tensor.shape[0] != self._count:
                    message = f"has {tensor.shape[0]:,} layers, and the recipe's model has {self._count:,}"
                    fail(self._folder, message, FITTING)
                layers = [(int(match[1]), tensor.whole())] if match[1] else tensor.layers()
                for number, layer in layers:
                    whole = _unflattened(layer, shape if match[1] else shape[1:])
                    for target, part in targets:
                        ending = "" if ".experts." in target else f".{match[3]}"
                        yield f"{self._prefix}{number}.{target}{ending}", self._part(name, whole, part)
            else:
                target, part = self._single.get(name, (name, _same))
                yield target, self._part(name, _unflattened(tensor.whole(), shape), part)

    def _part(self, name: str, tensor: ForeignTensor, part: Part) -> ForeignTensor:
        """Returns a part of a tensor, which is read when it is needed."""
        try:
            shape = tuple(part(torch.empty(tensor.shape, device="meta")).shape)
        except RuntimeError:
            heads, groups, size = self._heads
            message = f"has {name} of the shape {list(tensor.shape)}, which does not fit {heads} heads of {size}"
            fail(self._folder, f"{message} and {groups} of keys, as the recipe's model has them")
        return ForeignTensor(shape, tensor.dtype, lambda: part(tensor.read()).contiguous())

    def _attention(self, which: int, joined: Tensor) -> Tensor:
        """Returns queries (0), keys (1) or values (2), of which each group has its own after one another."""
        heads, groups, size = self._heads
        queries = heads // groups
        grouped = joined.view(groups, queries + 2, size, *joined.shape[1:])
        chosen = grouped[:, :queries] if which == 0 else grouped[:, queries + which - 1]
        return chosen.reshape(-1, *joined.shape[1:])


def _unflattened(tensor: ForeignTensor, shape: tuple[int, ...]) -> ForeignTensor:
    """Returns a tensor in its shape.

    Before 0.14, Megatron-Core stores a state of the distributed optimizer whose ranks have pieces [x, y] of [X, Y] in
    the shape [X/x, Y/y, x·y].
    """
    counts = tensor.shape[:-1]
    if tensor.shape == shape or len(counts) != len(shape) or any(a % b for a, b in zip(shape, counts, strict=True)):
        return tensor
    piece = [size // count for size, count in zip(shape, counts, strict=True)]
    order = list(chain.from_iterable((number, number + len(counts)) for number in range(len(counts))))
    return ForeignTensor(shape, tensor.dtype, lambda: tensor.read().view(*counts, *piece).permute(order).reshape(shape))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _first_rows(count: int, tensor: Tensor) -> Tensor:
    return tensor[:count]


def _half(which: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[which]


def _transposed(part: Part, tensor: Tensor) -> Tensor:
    found = part(tensor)
    return found.t() if found.ndim == 2 else found


def _add_options(state: ForeignState, saved: list[Any]) -> None:
    """Adds the optimizer's options, and the number of updates that all its weights share.

    The groups do not say which weights they have. By Megatron's rule, those with `wd_mult` 0 have the vectors.
    """
    groups = list(chain.from_iterable(_found(saved, "param_groups")))
    steps = [plain_number(one) for one in _found(saved, "common_step")]
    steps += [plain_number(group.get(STEP)) for group in groups]
    state.updates = dict.fromkeys(state.states, max(steps, default=0.0) or float(state.step or 0))
    by_decay = any(group.get("wd_mult") == 0 for group in groups)
    by_experts = any(group.get("is_expert_parallel") for group in groups)
    for group in groups:
        names = [
            name
            for name in state.states
            if (not by_decay or (len(state.weights[name].shape) >= 2) == (group.get("wd_mult", 1) != 0))
            and (not by_experts or (".experts." in name) == bool(group.get("is_expert_parallel")))
        ]
        state.groups.append(ForeignGroup(tuple(names), options_of(group)))


def _found(value: Any, key: str) -> Iterator[Any]:
    """Yields what containers have under a key, at any depth."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _found(one, key)
