"""The small plan of a legal plan is legal, and has every kind of parallelism of the plan."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.axes import AXES, model_parallel_size
from llmtrain.plan.draft import Draft, divisors
from llmtrain.plan.facts.families import FAMILIES
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import LEGALITY, assemble, broken, resolve
from llmtrain.recipe import ModelConfig
from llmtrain.recipe.cluster import Cluster
from llmtrain.trials.dry_run.model import tiny_model
from llmtrain.trials.dry_run.shrink import LAYERS, STEPS, layers_kept, shrink_plan

ROOT = Path(__file__).parents[3]
KEPT = ("backend", "accelerate", "zero_stage", "activation_checkpointing")
DRAWS = 400
WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
"""Sizes that many degrees divide."""


@cache
def base():
    return load_recipe(str(ROOT / "recipes/llama_1b.py"), [])[0].with_(kernels="auto")


@cache
def tiny(recipe_json: str, layers: int) -> ModelConfig:
    return tiny_model(type(base()).model_validate_json(recipe_json), layers)


def config_of(family: str) -> dict:
    aliases = FAMILIES[family].aliases
    own = {name: size for name, size in WIDE.items() if name in FAMILIES[family].keys}
    if family == "gpt2":
        own = {
            aliases.get(name, name): size
            for name, size in own.items()
            if aliases.get(name, name) in ("n_embd", "n_layer", "n_head", "vocab_size")
        }
        own["n_positions"] = 2048
    return own


def drawn(draw: random.Random):
    """A recipe and a cluster, legal or not."""
    family = draw.choice([*FAMILIES, "qwen3_moe", "mixtral", "llama"])
    nodes, per_node = draw.choice([1, 2, 3, 4, 32]), draw.choice([1, 2, 3, 4, 8])
    world = nodes * per_node
    backend = draw.choice(["deepspeed"] * 6 + ["accelerate", "data_parallel"])
    degrees = dict.fromkeys(("pipeline", "tensor", "sequence", "expert"), 1)
    for name in degrees:
        if draw.random() < 0.4:
            degrees[name] = draw.choice([size for size in divisors(world) if size <= 8])
    offloads = draw.choice(
        [("none", "none")] * 8 + [("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("nvme", "cpu")]
    )
    attention = draw.choice(["sdpa", "eager", "varlen", "flash_attention_2"])
    fields = {
        "model": {"architecture": family, "config": config_of(family), "attention": attention},
        "parallel.backend": backend,
        "parallel.accelerate": draw.choice(["ddp", "fsdp2", "deepspeed"]) if backend == "accelerate" else "ddp",
        "parallel.zero_stage": draw.choice([0, 1, 1, 1, 2, 3]),
        **{f"parallel.{name}": degree for name, degree in degrees.items()},
        "parallel.precision": draw.choice(["fp32", "bf16", "bf16", "fp16", "autocast_bf16", "autocast_fp16"]),
        "parallel.grad_accum_dtype": draw.choice(["fp32", "fp32", "fp32", "bf16", "fp16"]),
        "parallel.activation_checkpointing": draw.choice(["none", "full"]),
        "parallel.offload_optimizer": offloads[0],
        "parallel.offload_param": offloads[1],
        "parallel.nvme_path": "/nvme" if "nvme" in offloads else None,
        "optim.name": draw.choice(["adamw", "sgd"]),
        "batch.micro_batch_size": draw.choice([1, 2, 3, 8]),
        "batch.global_batch_size": draw.choice([1, 2, 3, 4]) * world * 24,
        "data.sequence_length": draw.choice([12, 24, 2048]),
        "data.mask_documents": draw.choice([True, False]),
    }  # fmt: skip
    return base().with_(**fields), Cluster(nodes=nodes, devices_per_node=per_node, device="h100")


def legal_plans():
    """Plans that the rules let pass, whatever memory there is."""
    draw = random.Random(0)
    for _ in range(30 * DRAWS):
        recipe, cluster = drawn(draw)
        draft = Draft(recipe, cluster, model_facts(recipe.model, recipe.vocab_size))
        if not broken(draft, LEGALITY)[0]:
            yield assemble(draft)


def kinds(plan) -> dict:
    found = {axis.name: plan.degree(axis) > 1 for axis in AXES}
    found["accumulation"] = plan.batch.gradient_accumulation_steps > 1
    return found


def has_replicas_of_experts(plan) -> bool:
    """Under data parallelism; those that only tensor or sequence parallel ranks make are lost."""
    holders = plan.cluster.world_size // plan.divisor("layers")
    return plan.data_parallel_size > 1 and holders > plan.parallel.expert > 1


def test_shrunk_plans_stay_legal_and_keep_their_kinds_of_parallelism():
    seen: set = set()
    for number, plan in enumerate(legal_plans(), 1):
        tiny_copy = tiny(plan.recipe.with_(name="x").model_dump_json(), layers_kept(plan))
        small = shrink_plan(plan, tiny_copy).plan  # raises where it is not legal
        case = plan.recipe.parallel
        if case.strategy == "data_parallel":
            assert small.cluster.world_size == 1
            continue
        assert kinds(small) == kinds(plan), case
        assert has_replicas_of_experts(plan) <= has_replicas_of_experts(small), case
        own, other = plan.recipe.parallel, small.recipe.parallel
        assert all(getattr(own, name) == getattr(other, name) for name in KEPT)
        assert other.precision == own.precision or (own.precision, other.precision) == ("fp16", "bf16")
        for name in ("offload_optimizer", "offload_param"):
            assert (getattr(own, name) == "none") == (getattr(other, name) == "none")
        assert plan.recipe.optim.clip_grad_norm == small.recipe.optim.clip_grad_norm
        dense = small.data_parallel_size * model_parallel_size(small.parallel)
        assert small.workers == dense <= 16
        assert small.model.layers <= LAYERS * small.parallel.pipeline
        assert small.model.parameters < 1_000_000
        seen.add((case.backend, *kinds(plan).values()))
        if number == DRAWS:
            break
    assert number == DRAWS
    assert len(seen) >= 20  # the draw is wide
    assert all(any(kind) for kind in zip(*(case[1:] for case in seen), strict=True))


NORMS = [f"model.layers.{layer}.{name}_layernorm.weight" for layer in (0, 1) for name in ("input", "post_attention")]
UP = [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_tiny_copy_has_the_sizes_that_transformers_builds(family):
    from transformers import AutoConfig

    recipe = base().with_(model={"architecture": family, "config": config_of(family)})
    copy = tiny_model(recipe, 2)
    facts = model_facts(copy, None)
    built = AutoConfig.for_model(family, **copy.config)
    assert facts.layers == built.num_hidden_layers == 2
    assert facts.hidden_size == built.hidden_size == 64
    assert facts.tied_embeddings == built.tie_word_embeddings == model_facts(recipe.model, 32000).tied_embeddings


def test_a_plan_for_256_devices_shrinks_by_the_rule():
    recipe, cluster = load_recipe(str(ROOT / "recipes/llama3_70b.py:pipeline"), [])
    plan = resolve(recipe, cluster)
    shrunk = shrink_plan(plan, tiny_model(recipe, layers_kept(plan)))
    small = shrunk.plan
    assert (small.data_parallel_size, small.parallel.pipeline, small.parallel.zero_stage) == (2, 2, 1)
    assert (small.batch.gradient_accumulation_steps, small.batch.micro_batch_size) == (4, 1)
    assert [stage.layers for stage in small.stages] == [(0, 1), (2, 3)]
    assert small.recipe.train.max_steps == STEPS
    told = {change.what: (change.plan, change.dry_run) for change in shrunk.changes}
    assert told["pipeline"] == ("16", "2")
    assert told["data parallel"] == ("16", "2")
    assert told["devices"] == ("32 × 8 h100", "1 × 4 cpu")
    assert "tensor parallel" not in told
    assert "precision" not in told
    assert all(change.untested for change in shrunk.changes)


def test_changes_of_the_small_plan_are_reported():
    recipe, cluster = load_recipe(str(ROOT / "recipes/llama3_8b.py:8gpu"), [])
    nvme = {"parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/nvme"}
    plan = resolve(
        recipe.with_(**nvme, **{"parallel.precision": "fp16", "model.attention": "flash_attention_2"}), cluster
    )
    told = {change.what: (change.plan, change.dry_run) for change in shrink_plan(plan, tiny_model(recipe, 2)).changes}
    assert told["precision"] == ("fp16", "bf16")
    assert told["optimizer states in"] == ("nvme", "cpu")
    assert told["attention"] == ("flash_attention_2", "sdpa")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"model.trainable": ["model.layers.31.mlp.*"]},
            {f"model.layers.1.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
        ),
        ({"model.trainable": ["model.layers.9.*norm.weight", "lm_head.weight"]}, {"lm_head.weight", *NORMS}),
        ({"model.adapter": {"rank": 8, "targets": ["model.layers.0.*.q_proj"]}}, {"model.layers.0.self_attn.q_proj"}),
        ({"model.adapter": {"rank": 8, "targets": ["mlp.up_proj"], "modules_to_save": ["lm_head"]}}, {*UP, "lm_head"}),
    ],
)
def test_the_tiny_copy_trains_the_same_part(fields, expected):
    recipe, _ = load_recipe(str(ROOT / "recipes/llama3_8b.py:8gpu"), [])
    copy = tiny_model(recipe.with_(**fields), 2)
    adapter = copy.adapter
    assert set(copy.trainable or (*adapter.targets, *adapter.modules_to_save)) == expected


def test_a_loss_of_ones_own_keeps_its_vocabulary():
    """It may read the logits of some tokens."""
    recipe = base().with_(objective={"name": "mine:loss"})
    assert tiny_model(recipe, 2).config["vocab_size"] == base().model.config["vocab_size"]
    assert tiny_model(base(), 2).config["vocab_size"] < 200


def test_a_model_of_its_own_code_is_refused(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(vocab_size=99).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "unheard_of"')
    (tmp_path / "config.json").write_text(text)
    recipe = base().with_(model={"pretrained": str(tmp_path)})
    with pytest.raises(RecipeError, match="unheard_of"):
        tiny_model(recipe, 2)


@pytest.mark.parametrize("name", ["compiled", "liger"])
def test_kernels_that_a_cpu_may_lack_are_replaced(name):
    recipe = base().with_(**{"kernels.blocks": name, "kernels.loss": name})
    draft = Draft(recipe, Cluster(devices_per_node=8, device="h100"), model_facts(recipe.model, recipe.vocab_size))
    plan = assemble(draft)
    shrunk = shrink_plan(plan, tiny(recipe.model_dump_json(), layers_kept(plan)))
    kernels = shrunk.plan.recipe.kernels
    assert (kernels.blocks, kernels.loss) == ("eager", "chunked")
    told = [change for change in shrunk.changes if change.what == "kernels"]
    assert [change.plan for change in told] == [f"blocks {name}, loss {name}"]


def test_what_would_judge_more_steps_is_left_out():
    """A dry run takes too few steps for it, and calls no callbacks."""
    recipe, _ = load_recipe(str(ROOT / "recipes/tiny.py"), [])
    recipe = recipe.with_(
        **{"train.max_steps": 100, "evaluation.every_steps": 10, "train.early_stopping": {"patience": 3}},
        **{"checkpoint.every_steps": 10, "checkpoint.keep_last": 1, "checkpoint.keep_best": 1},
    )
    plan = resolve(recipe, Cluster(devices_per_node=2))
    small = shrink_plan(plan, tiny_model(recipe, layers_kept(plan))).plan.recipe
    assert (small.train.early_stopping, small.checkpoint.keep_best, small.callbacks) == (None, None, ())
