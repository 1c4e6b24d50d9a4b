"""Draws plans over every field that the rules of legality use: legal plans and their illegal neighbours.

Pure: what a plan does on the engine is asked in `plans_on_engine`. A draw depends on its seed and number alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from typing import Any

from llmtrain.errors import RecipeError
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.installed import is_installed
from llmtrain.plan.rules import LEGALITY, broken
from llmtrain.plan.search.variants import changed
from llmtrain.recipe import BatchConfig, DataConfig, ModelConfig, OptimConfig, Recipe, Source, TrainConfig
from llmtrain.recipe.cluster import Cluster

Fields = dict[str, Any]

BACKENDS = [
    *[("deepspeed", "ddp")] * 9,
    *[("accelerate", one) for one in ("ddp", "fsdp2", "deepspeed")],
    ("data_parallel", "ddp"),
    *[("horovod", "ddp")] * is_installed("horovod"),
]
CLIP = 0.3
"""Clipping is active at every step."""
CHOICES: dict[str, Sequence[Any]] = {
    "parallel.zero_stage": (0, 1, 2, 3),
    "parallel.hierarchical_partition": (1, 1, 1, 2, 3, 4),
    "parallel.pipeline": (1, 1, 2, 4),
    "parallel.pipeline_schedule": ("1f1b", "1f1b", "interleaved", "zero_bubble"),
    "parallel.pipeline_chunks": (1, 1, 2, 4),
    "parallel.tensor": (1, 1, 2, 4),
    "parallel.sequence": (1, 1, 2, 4),
    "parallel.expert": (1, 1, 2, 4),
    "parallel.precision": ("fp32", "fp32", "fp32", "bf16", "autocast_bf16", "fp16", "autocast_fp16"),
    "parallel.grad_accum_dtype": ("fp32", "fp32", "fp32", "bf16", "fp16"),
    "parallel.activation_checkpointing": ("none", "none", "selective", "full"),
    "parallel.checkpoint_every": (1, 1, 2),
    "parallel.offload_activations": (False, False, False, True),
    "parallel.offload_optimizer": ("none", "none", "none", "cpu", "nvme"),
    "parallel.offload_param": ("none", "none", "none", "cpu", "nvme"),
    "parallel.nvme_path": (None, None, None, "/tmp/llmtrain-nvme"),
    "batch.global_batch_size": (4, 8, 12),
    "batch.micro_batch_size": (1, 1, 2, 4),
    "optim.name": ("adamw", "adam", "sgd"),
    "optim.clip_grad_norm": (CLIP, CLIP, 0.0),
    "data.sequence_length": (32, 24, 18),
    "model.attention": ("sdpa", "varlen", "eager"),
}
"""Field → its values; likelier values are listed several times."""
SIZES: dict[str, Sequence[Any]] = {
    "num_hidden_layers": (1, 2, 3, 4),
    "heads": ((2, 1), (2, 2), (4, 2), (4, 4), (6, 2), (6, 3), (4, 1)),
    "intermediate_size": (64, 48, 54, 33),
    "vocab_size": (256, 250, 255),
    "tie_word_embeddings": (True, False),
    "architecture": ("llama", "llama", "llama", "qwen3", "gpt2", "mixtral", "qwen3_moe"),
    "router": (None, "output_router_logits"),
}
"""The same for the model; `heads`: of queries, and of keys and values; `router`: whether the router's loss is
trained."""
HEAD_DIM = 8
HAS_AIO = find_library("aio") is not None
NEIGHBOURS = 60
"""Number of neighbours of a legal plan that are tried to find a refused one."""
LONGEST = max(CHOICES["data.sequence_length"])


@dataclass(frozen=True)
class Case:
    """A plan that can be constructed, legal or not."""

    name: str
    """Seed and number of the draw."""
    draft: Draft
    rules: frozenset[str]
    """Rules that refuse it; none for a legal plan."""

    @property
    def told(self) -> str:
        """Returns the plan in one line: the fields that differ from their defaults."""
        recipe, parallel = self.draft.recipe, self.draft.parallel
        plain = type(parallel)()
        values = {name: value for name, value in parallel.model_dump().items() if value != getattr(plain, name)}
        model = {key: value for key, value in recipe.model.config.items() if key != "head_dim"}
        batch, optim = recipe.batch, recipe.optim
        words = [f"{name}={value}" for name, value in values.items()]
        words += [f"batch={batch.global_batch_size}/{batch.micro_batch_size}", optim.name]
        words += [f"clip={optim.clip_grad_norm:g}", f"T={recipe.data.sequence_length}", recipe.model.attention_kernel]
        return f"{self.name}: {self.draft.cluster.world_size} × {' '.join(words)} {recipe.model.architecture} {model}"


def cases(seed: int, count: int, worlds: Sequence[int]) -> list[Case]:
    """Returns `count` plans, alternating between legal and refused ones."""
    return [case(seed, number, worlds) for number in range(count)]


def case(seed: int, number: int, worlds: Sequence[int]) -> Case:
    """Returns one case: a legal plan, or one that differs from a legal plan in one field."""
    draw = random.Random(f"{seed}:{number}")
    while True:
        world = draw.choice(worlds)
        fields, sizes = _drawn(draw, world)
        base = _draft(fields, sizes, world)
        if _refusals(base) != frozenset() or not _is_runnable(base):
            continue
        if number % 2 == 0:
            return _case(f"{seed}:{number}", base)
        neighbours: dict[frozenset[str], Draft] = {}
        for _ in range(NEIGHBOURS):
            other, others = dict(fields), dict(sizes)
            _change(draw, other, others)
            neighbour = _draft(other, others, world)
            if neighbour is not None and (refusals := _refusals(neighbour)):
                neighbours.setdefault(refusals, neighbour)
        if neighbours:
            # By rules, since some are broken by many values, and others by one.
            rules = draw.choice(sorted(neighbours, key=sorted))
            return _case(f"{seed}:{number}", neighbours[rules])


def plan_of(fields: Fields, sizes: Fields, world: int) -> Case:
    """Returns a drawn plan, legal or not, with defaults for all other fields."""
    plain = {field: values[0] for field, values in CHOICES.items()} | {"optim.clip_grad_norm": CLIP}
    plain |= {"parallel.backend": "deepspeed", "parallel.accelerate": "ddp"}
    model = {name: values[0] for name, values in SIZES.items()} | {"num_hidden_layers": 2, "heads": (4, 2)}
    return _case("own", _draft(plain | fields, model | sizes, world))


def _case(name: str, draft: Draft | None) -> Case:
    rules = _refusals(draft)
    assert draft is not None, name
    assert rules is not None, name
    return Case(name, draft, rules)


def _drawn(draw: random.Random, world: int) -> tuple[Fields, Fields]:
    fields = {field: draw.choice(values) for field, values in CHOICES.items()}
    fields["parallel.backend"], fields["parallel.accelerate"] = draw.choice(BACKENDS)
    if world > 1 and fields["parallel.backend"] == "deepspeed" and draw.random() < 0.8:
        # Else most plans would have no degree at all, as few draws of all four divide a few devices.
        degrees = [f"parallel.{name}" for name in ("pipeline", "tensor", "sequence", "expert")]
        fields |= dict.fromkeys(degrees, 1)
        for field in draw.sample(degrees, draw.choice((1, 1, 2))):
            fields[field] = draw.choice((2, 2, world))
    if fields["parallel.pipeline"] == 1:
        fields |= {"parallel.pipeline_schedule": "1f1b", "parallel.pipeline_chunks": 1}
    return fields, {name: draw.choice(values) for name, values in SIZES.items()}


def _change(draw: random.Random, fields: Fields, sizes: Fields) -> None:
    """Gives one field another value."""
    field = draw.choice([*CHOICES, *SIZES, "parallel.backend"])
    if field == "parallel.backend":
        fields["parallel.backend"], fields["parallel.accelerate"] = draw.choice(BACKENDS)
    elif field in CHOICES:
        fields[field] = draw.choice(CHOICES[field])
    else:
        sizes[field] = draw.choice(SIZES[field])


def _refusals(draft: Draft | None) -> frozenset[str] | None:
    """Returns the rules that refuse a draft; None if no plan can be constructed from it, whatever the rules are."""
    if draft is None or draft.accumulation is None:
        return None
    if draft.facts is not None and draft.parallel.stages > draft.facts.layers:
        return None
    return rules_of(draft)


def rules_of(draft: Draft) -> frozenset[str]:
    """Returns the rules that refuse a draft."""
    return frozenset(problem.rule for problem in broken(draft, LEGALITY)[0])


def _is_runnable(draft: Draft | None) -> bool:
    """Returns whether DeepSpeed's operator for disks can be built here, if the plan needs it."""
    swaps = draft is not None and "nvme" in (draft.parallel.offload_optimizer, draft.parallel.offload_param)
    return HAS_AIO or not swaps


def _draft(fields: Fields, sizes: Fields, world: int) -> Draft | None:
    """Returns a draft; None if the model's own sizes are invalid."""
    recipe = changed(_recipe(sizes), fields)
    try:
        facts = model_facts(recipe.model, recipe.vocab_size)
    except RecipeError:
        return None
    return Draft(recipe, Cluster(devices_per_node=world), facts)


def _recipe(sizes: Fields) -> Recipe:
    architecture = sizes["architecture"]
    return Recipe(
        name="drawn",
        model=ModelConfig(architecture=architecture, config=_config(architecture, sizes)),
        data=DataConfig(sources=[Source("stdlib")], tokenizer="none", sequence_length=LONGEST),
        # A decay that shows and a schedule that moves: each is a way to differ.
        optim=OptimConfig(lr=1e-3, weight_decay=0.5, warmup_steps=2, schedule="cosine"),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=1),
        train=TrainConfig(max_steps=20, seed=7),
    )


def _config(architecture: str, sizes: Fields) -> Fields:
    heads, kv_heads = sizes["heads"]
    config = {
        "vocab_size": sizes["vocab_size"],
        "hidden_size": heads * HEAD_DIM,
        "num_hidden_layers": sizes["num_hidden_layers"],
        "num_attention_heads": heads,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": sizes["tie_word_embeddings"],
    }
    inner = sizes["intermediate_size"]
    if architecture == "gpt2":
        return config | {"n_inner": inner} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config |= {"num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "intermediate_size": inner}
    if architecture == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if architecture == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": inner, "norm_topk_prob": True}
    if architecture in ("mixtral", "qwen3_moe") and sizes["router"] == "output_router_logits":
        config |= {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    return config
