"""The estimated activations, compared with the tensors that autograd saves in one real layer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch
from llmtrain.engines.deepspeed import ring, ulysses
from llmtrain.errors import RecipeError
from llmtrain.models import build_model, model_configuration
from llmtrain.models.activation_bytes import traced_layers
from llmtrain.models.build import build_sharded
from llmtrain.models.compiled import compile_layers
from llmtrain.models.documents import document_masks
from llmtrain.models.recompute import checkpoints
from llmtrain.models.recompute.checkpoints import use_recomputation
from llmtrain.models.stages import decoder_layers
from llmtrain.models.tensor.split import TensorParallel
from llmtrain.models.tiny.tensor_check import check_tensor_split
from llmtrain.plan import Plan
from llmtrain.plan.predict import memory_of
from llmtrain.plan.predict.activations import kept_bytes, layer_bytes
from llmtrain.plan.rules import resolve
from llmtrain.recipe import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
)
from llmtrain.recipe.cluster import Cluster

T, SEQUENCES = 64, 2
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": T,
}
LLAMA_3 = SIZES | {"hidden_size": 512, "intermediate_size": 1792, "num_key_value_heads": 2}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
GPT2 = {"n_embd": 64, "n_inner": 160, "n_layer": 2, "n_head": 8, "n_positions": T, "vocab_size": 64}
FAMILIES = {
    "llama": SIZES,
    "llama_3": LLAMA_3,
    "mistral": SIZES | {"sliding_window": None},
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 8},
    "gemma": SIZES | {"head_dim": 8},
    "olmo2": SIZES,
    "gpt2": GPT2 | {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SIZES | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
UNDER, OVER = 0.01, 0.03
"""Of what is saved, how much less and more the estimate may be."""


def plan_for(
    family: str, attention: str, precision: str, mask: bool, ranks: int = 1, tensor: int = 1, **fields: object
) -> Plan:
    """ranks: among which a sequence is shared."""
    recipe = Recipe(
        name="saved",
        model=ModelConfig(architecture=family.partition("_3")[0], config=FAMILIES[family], attention=attention),
        data=DataConfig(sources=[Source("stdlib")], tokenizer="none", sequence_length=T, mask_documents=mask),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES),
        parallel=ParallelConfig(precision=precision, zero_stage=1, sequence=ranks, tensor=tensor),
        train=TrainConfig(max_steps=1),
    )
    return resolve(recipe.with_(**fields), Cluster(devices_per_node=ranks * tensor))


class FirstOf:
    """The first of some tensor parallel ranks, of which the others hold and send the same."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    def reduce_scatter(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return values[0].clone()

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value.clone() for _ in range(self.size)]


def model_of(plan: Plan) -> PreTrainedModel:
    dtype = torch.bfloat16 if plan.recipe.parallel.precision == "bf16" else torch.float32
    if plan.parallel.tensor == 1:
        return build_model(plan.recipe, dtype, torch.device("cpu"))
    recipe, ranks = plan.recipe, FirstOf(plan.parallel.tensor)
    split = check_tensor_split(model_configuration(recipe), ranks.size, sequence_parallel=plan.megatron_sp_ranks > 1)
    return build_sharded(recipe, dtype, torch.device("cpu"), [TensorParallel(split, ranks)])


class Saved:
    """A tensor that autograd saves."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(plan: Plan, index: int = 0) -> int:
    """Bytes of storages that a layer saves, without weights and without what all layers share."""
    precision = plan.recipe.parallel.precision
    model = model_of(plan).train()
    cached: list[list[torch.Tensor]] = []
    with caches(cached):
        use_recomputation(model, plan.recipe.parallel, plan.sequence_ring > 1)
    known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: weakref.WeakSet[Saved] = weakref.WeakSet()
    inside = False

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        if inside:
            kept.add(saved)
        return saved

    def enter(_, arguments, named) -> None:
        nonlocal inside
        inside = True
        for one in (*arguments[1:], *named.values()):
            for tensor in one if isinstance(one, tuple) else (one,):
                if isinstance(tensor, torch.Tensor):
                    known.add(tensor.untyped_storage().data_ptr())

    def leave(*_) -> None:
        nonlocal inside
        inside = False

    layer = decoder_layers(model)[1][index]
    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave)
    documents = 2 if plan.recipe.data.mask_documents else 1
    positions = torch.arange(T // documents).repeat(documents).expand(SEQUENCES, T)
    tokens = torch.randint(0, 64, (SEQUENCES, T))
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast_bf16" else nullcontext()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor),
        autocast,
        document_masks(whole := MicroBatch(tokens, positions, tokens)),
        sliced(model, plan, whole) as batch,
    ):
        output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    storages = [saved.tensor.untyped_storage() for saved in kept]  # of graphs that are still there
    storages += [tensor.untyped_storage() for tensor in itertools.chain(*cached[index : index + 1])]
    del output
    return sum(
        size for address, size in {one.data_ptr(): one.nbytes() for one in storages}.items() if address not in known
    )


@contextmanager
def sliced(model: PreTrainedModel, plan: Plan, batch: MicroBatch) -> Iterator[MicroBatch]:
    """The batch of the first of the ranks that share a sequence; what it receives is what it sends."""
    ranks, of_ring = plan.parallel.sequence, plan.sequence_ring
    if ranks == 1:
        yield batch
        return
    with pytest.MonkeyPatch.context() as patch:
        groups = SimpleNamespace(get_world_size=lambda size: size, get_rank=lambda _: 0)
        for module in (ulysses, ring):
            patch.setattr(module, "dist", groups)
        patch.setattr(ring.Ring, "pass_on", lambda self, *sent: lambda: tuple(each.clone() for each in sent))
        patch.setattr(ulysses, "register_all_to_all_group", lambda _: "")
        patch.setattr(torch.ops.deepspeed, "dim_zero_all_to_all", lambda parts, _: parts.clone(), raising=False)
        shared = ulysses.Ulysses(model, ranks, plan.head_ranks, of_ring if of_ring > 1 else None)
        with shared.active():
            yield shared.slice(batch)


@contextmanager
def caches(found: list[list[torch.Tensor]]) -> Iterator[None]:
    """Notes what the selective checkpoint of each layer keeps, which no hook of autograd sees."""
    policy = checkpoints._policy

    def contexts() -> tuple[object, object]:
        own: list[torch.Tensor] = []
        found.append(own)

        def noted(context, operation, *args, **named):
            chosen = policy(context, operation, *args, **named)
            if chosen is CheckpointPolicy.MUST_SAVE:
                outputs = context.op_output if isinstance(context.op_output, tuple) else (context.op_output,)
                own.extend(one for one in outputs if isinstance(one, torch.Tensor))
            return chosen

        return create_selective_checkpoint_contexts(noted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "_contexts", contexts)
        yield


def cases():
    families = [family for family in FAMILIES if family != "llama_3"]
    yield from itertools.product(families, ["sdpa"], ["fp32", "bf16"], [True])
    yield from itertools.product(["llama", "qwen3"], ["eager"], ["fp32", "bf16"], [True])
    yield from itertools.product(["llama", "gpt2"], ["sdpa"], ["fp32", "bf16", "autocast_bf16"], [False])


@pytest.mark.parametrize(("family", "attention", "precision", "mask"), list(cases()))
def test_a_layer_saves_the_estimated_bytes(family, attention, precision, mask):
    plan = plan_for(family, attention, precision, mask)
    estimate = layer_bytes(plan, plan.model.weights, 0, SEQUENCES * T)
    saved = saved_bytes(plan)
    assert (1 - UNDER) * saved <= estimate <= (1 + OVER) * saved, f"estimate / saved = {estimate / saved:.4f}"


COMPILED = {"kernels.blocks": "compiled"}
FUSED = [
    pytest.param(family, precision, {}, marks=pytest.mark.slow if family == "llama" else pytest.mark.breadth)
    for family in ("llama", "llama_3", "qwen3", "gemma", "gpt2")
    for precision in ("fp32", "bf16", "autocast_bf16")
]
FUSED += [pytest.param("llama", precision, SELECTIVE, marks=pytest.mark.breadth) for precision in ("fp32", "bf16")]


@pytest.mark.parametrize(("family", "precision", "fields"), FUSED)
def test_a_compiled_layer_saves_the_estimated_bytes(family, precision, fields, monkeypatch):
    """The compiler decides what is computed again. On an H100, it and Liger save the same."""
    plan = plan_for(family, "sdpa", precision, False, **COMPILED, **fields)
    estimate, tokens = (kept_bytes if fields else layer_bytes), SEQUENCES * T
    counted = estimate(plan, plan.model.weights, 0, tokens)
    own = model_of

    def compiled(plan: Plan) -> PreTrainedModel:
        model = own(plan)
        compile_layers(model, "sdpa")
        return model

    monkeypatch.setitem(globals(), "model_of", compiled)
    saved, counted = saved_bytes(plan), counted.size if fields else counted
    assert (1 - UNDER) * saved <= counted <= (1 + OVER) * saved, f"estimate / saved = {counted / saved:.4f}"


@pytest.mark.parametrize(("family", "attention", "precision", "mask"), list(cases()))
def test_a_selective_checkpoint_keeps_the_estimated_bytes(family, attention, precision, mask):
    plan = plan_for(family, attention, precision, mask, **SELECTIVE)
    estimate = kept_bytes(plan, plan.model.weights, 0, SEQUENCES * T).size
    kept = saved_bytes(plan)
    assert (1 - UNDER) * kept <= estimate <= (1 + OVER) * kept, f"estimate / kept = {estimate / kept:.4f}"


def shared_cases():
    """Two and four ranks, so that one has as many heads of keys as there are, or copies of them; one head for all."""
    yield from itertools.product(["llama", "gpt2"], ["sdpa"], ["fp32", "bf16"], [True, False], [2, 4])
    yield from itertools.product(["llama", "qwen3"], ["eager"], ["fp32", "bf16"], [True], [4])
    yield from itertools.product(["gemma"], ["sdpa"], ["bf16"], [True], [1, 2])


@pytest.mark.parametrize(("family", "attention", "precision", "mask", "ranks"), list(shared_cases()))
def test_sequence_parallel_ranks_save_the_estimated_bytes(family, attention, precision, mask, ranks):
    fields = {"model.config.num_key_value_heads": 1} if family == "gemma" else {}
    plan = plan_for(family, attention, precision, mask, ranks, **fields)
    estimate = layer_bytes(plan, plan.model.weights, 0, SEQUENCES * T // ranks)
    saved = saved_bytes(plan)
    assert (1 - UNDER) * saved <= estimate <= (1 + OVER) * saved, f"estimate / saved = {estimate / saved:.4f}"


@pytest.mark.parametrize("again", [{}, SELECTIVE], ids=["none", "selective"])
@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 2), ("fp32", 4), ("bf16", 4)])
def test_ranks_of_a_ring_save_the_estimated_bytes(precision, ranks, again):
    """Two of four ranks divide the heads."""
    plan = plan_for("llama", "varlen", precision, True, ranks, **{"parallel.sequence_ring": 2}, **again)
    one = plan, plan.model.weights, 0, SEQUENCES * T // ranks
    estimated = kept_bytes(*one).size if again else layer_bytes(*one)
    saved = saved_bytes(plan)
    assert (1 - UNDER) * saved <= estimated <= (1 + OVER) * saved, f"estimate / saved = {estimated / saved:.4f}"


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa")])
def test_selective_checkpoints_of_sequence_parallel_ranks_keep_the_estimated_bytes(family, attention):
    plan = plan_for(family, attention, "fp32", True, 2, **SELECTIVE)
    estimate = kept_bytes(plan, plan.model.weights, 0, SEQUENCES * T // 2).size
    kept = saved_bytes(plan)
    assert (1 - UNDER) * kept <= estimate <= (1 + OVER) * kept, f"estimate / kept = {estimate / kept:.4f}"


TENSOR = [
    *itertools.product(["llama", "qwen3"], ["fp32", "bf16"], [False], [{}, {"model.adapter": {"rank": 4}}]),
    ("llama", "fp32", True, {}),
    *itertools.product(["mixtral", "qwen3_moe"], ["fp32", "bf16"], [False], [{}]),
]


@pytest.mark.parametrize(("family", "precision", "mask", "fields"), TENSOR)
@pytest.mark.parametrize("again", ["none", "selective"])
def test_tensor_ranks_save_slices_of_the_residual(family, precision, mask, fields, again):
    fields = fields | {"parallel.activation_checkpointing": again}
    plan = plan_for(family, "sdpa", precision, mask, tensor=2, **fields)
    assert plan.megatron_sp_ranks == 2
    weights, tokens = plan.model.weights, SEQUENCES * T
    estimate = layer_bytes(plan, weights, 1, tokens) if again == "none" else kept_bytes(plan, weights, 1, tokens).size
    saved = saved_bytes(plan, 1)
    assert (1 - UNDER) * saved <= estimate <= (1 + OVER) * saved, f"estimate / saved = {estimate / saved:.4f}"


def test_selective_checkpoints_of_llama_keep_at_most_three_fifths():
    """For the widths of Llama 3 8B: measured on a layer of an eighth of them, and as the plan counts them in full."""
    for mask in (False, True):
        plain, again = (plan_for("llama_3", "sdpa", "bf16", mask, **fields) for fields in ({}, SELECTIVE))
        assert saved_bytes(again) <= 0.6 * saved_bytes(plain)
        large = {"model.config.hidden_size": 4096, "model.config.intermediate_size": 14336}
        large |= {"model.config.num_attention_heads": 32, "model.config.num_key_value_heads": 8}
        large |= {"data.sequence_length": 8192, "model.config.max_position_embeddings": 8192}
        plan = resolve(again.recipe.with_(**large), Cluster())
        assert plan.model.weights is not None
        kept = kept_bytes(plan, plan.model.weights, 0, 8192).size
        assert kept <= 0.6 * layer_bytes(plan, plan.model.weights, 0, 8192)


TUNED = {
    "all-linear": {"model.adapter": {"rank": 4}},
    "dora": {"model.adapter": {"rank": 4, "dora": True}},
    "below": {"model.trainable": ["*.0.*"]},
    "queries": {"model.adapter": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
    "mlp": {"model.adapter": {"rank": 4, "targets": ["mlp.*_proj"]}},
    "norms": {"model.trainable": ["*norm.weight"]},
    "experts": {"model.adapter": {"rank": 8, "target_parameters": ["experts.*", "mlp.gate.weight"]}},
    "up": {"model.adapter": {"rank": 8, "targets": [], "target_parameters": ["gate_up_proj"]}},
    "down": {"model.adapter": {"rank": 8, "targets": ["q_proj"], "target_parameters": ["down_proj"]}},
    "c_attn": {"model.adapter": {"rank": 4, "targets": ["c_attn"]}},
    "c_proj": {"model.adapter": {"rank": 4, "targets": ["mlp.c_proj"]}},
}


def tuned_cases():
    yield from itertools.product(["llama", "qwen3"], ["sdpa"], ["fp32", "bf16"], list(TUNED)[:-5])
    yield from itertools.product(["mixtral"], ["sdpa"], ["fp32", "bf16"], ["all-linear", "experts", "up", "down"])
    yield from itertools.product(["qwen3_moe"], ["sdpa"], ["bf16"], ["experts"])
    yield from itertools.product(["llama"], ["eager"], ["fp32"], ["queries", "mlp"])
    yield from itertools.product(["gpt2"], ["sdpa"], ["fp32"], ["all-linear", "c_attn", "c_proj", "below"])
    yield from itertools.product(["llama"], ["sdpa"], ["autocast_bf16"], ["all-linear", "queries", "below"])


@pytest.mark.parametrize(("family", "attention", "precision", "tuned"), list(tuned_cases()))
def test_a_partly_frozen_layer_saves_the_estimated_bytes(family, attention, precision, tuned):
    plan = plan_for(family, attention, precision, mask=False, **TUNED[tuned])
    estimate = layer_bytes(plan, plan.model.weights, 1, SEQUENCES * T)
    saved = saved_bytes(plan, 1)
    assert (1 - UNDER) * saved <= estimate <= (1 + OVER) * saved, f"estimate / saved = {estimate / saved:.4f}"


@pytest.mark.parametrize(
    ("family", "attention", "precision"),
    [
        ("llama", "sdpa", "bf16"),
        ("llama", "eager", "fp32"),
        ("qwen3", "sdpa", "autocast_bf16"),
        ("mixtral", "sdpa", "bf16"),
    ],
)
def test_a_trace_equals_the_saved_bytes(family, attention, precision):
    plan = plan_for(family, attention, precision, mask=True)
    traced = traced_layers(plan)
    assert traced == (saved_bytes(plan),) * 2
    doubled = memory_of(plan, tuple(2 * size for size in traced)).stages[0].forward.activations
    assert doubled - memory_of(plan, traced).stages[0].forward.activations == pytest.approx(sum(traced), abs=2)


def test_untraceable_models_are_reported(monkeypatch):
    with pytest.raises(RecipeError, match=r"memory\.trace"):
        traced_layers(plan_for("llama", "sdpa", "bf16", mask=False))
