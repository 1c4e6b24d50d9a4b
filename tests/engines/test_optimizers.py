"""The optimizers that torch does not have: by themselves, and under every division of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from llmtrain.engines.optim import averaged_weights, know_matrices, torch_optimizer
from llmtrain.engines.optimizers.muon import Muon
from llmtrain.engines.state.held import held
from llmtrain.engines.state.pieces import Region
from llmtrain.predict.traffic import volumes
from llmtrain.verify import compare
from llmtrain.verify.reference_optimizers import PlainScheduleFree, reference_optimizer
from tests.helpers.batches import MIXTRAL, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, engine_of, plain_run, plan_of, trace

CPU = torch.device("cpu")
STEPS = 4
SHAPES = ((6, 4), (4, 6), (5, 5))


FREE = [{"name": "schedule_free_adamw", "warmup_steps": warmup} for warmup in (0, 3)]


def _gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _own_muon(weights: list[nn.Parameter], precision: str, **fields) -> Muon:
    """Muon as an engine builds it, in one process."""
    recipe = tiny_recipe(**{"optim.name": "muon", "parallel.precision": precision, **fields})
    optimizer = torch_optimizer([{"params": weights, "muon": True, "weight_decay": 0.1}], recipe.optim)
    names = {one: f"layers.0.{index}.weight" for index, one in enumerate(weights)}

    def place(one):
        return names[one], Region.whole(one.shape), (0, 1)

    know_matrices(optimizer, optimizer, held(optimizer), place, recipe, CPU)
    return optimizer


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.8}, {"ns_steps": 3, "adjust_lr_fn": "original"}], ids=str
)
def test_muon_is_that_of_torch(options):
    """Torch computes in bf16 only."""
    ours, theirs = ([nn.Parameter(one) for one in _gradients(0)] for _ in range(2))
    own = _own_muon(ours, "bf16", **{"optim.options": options, "optim.lr": 0.1})
    torchs = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, **{"adjust_lr_fn": "match_rms_adamw", **options})
    for step in range(1, 4):
        for weights in (ours, theirs):
            for weight, gradient in zip(weights, _gradients(step), strict=True):
                weight.grad = gradient.clone()
        own.step()
        torchs.step()
    assert all((a - b).abs().max() < _rounded(0.1) for a, b in zip(ours, theirs, strict=True))


def _rounded(rate: float) -> float:
    """How far two runs of three steps differ if five iterations of two products are rounded to 8 bits in each step."""
    return 3 * 10 * 2**-8 * rate * 0.2 * 6**0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_muon_of_the_reference_is_ours(precision):
    recipe = tiny_recipe(**{"optim.name": "muon", "parallel.precision": precision, "optim.weight_decay": 0.1})
    ours, theirs = ([nn.Parameter(one) for one in _gradients(0)] for _ in range(2))
    own = _own_muon(ours, precision, **{"optim.lr": 1e-3})
    plain = reference_optimizer({f"layers.{index}.weight": one for index, one in enumerate(theirs)}, recipe)
    for step in range(1, 4):
        for weights in (ours, theirs):
            for weight, gradient in zip(weights, _gradients(step), strict=True):
                weight.grad = gradient.clone()
        own.step()
        plain.step()
    # In fp32, each run stores weights below 4 twice a step.
    error = _rounded(1e-3) if precision == "bf16" else 12 * 2**-23
    assert all((a - b).abs().max() < error for a, b in zip(ours, theirs, strict=True))


def test_a_verdict_leaves_a_matrix_and_its_momentum_alone():
    weights = [nn.Parameter(one) for one in _gradients(0)]
    optimizer = _own_muon(weights, "fp32")
    for bad in (False, True):
        before = [(one.detach().clone(), optimizer.state[one]["momentum_buffer"].clone()) for one in weights]
        for weight, gradient in zip(weights, _gradients(1), strict=True):
            weight.grad = torch.full_like(gradient, float("nan")) if bad else gradient
        optimizer.found_inf = torch.tensor(float(bad))
        optimizer.step()
        for (weight, momentum), one in zip(before, weights, strict=True):
            assert torch.equal(weight, one) is bad
            assert torch.equal(momentum, optimizer.state[one]["momentum_buffer"]) is bad


@pytest.mark.parametrize("fields", [{"name": "lion"}, *FREE], ids=str)
def test_elementwise_optimizers_equal_the_reference(fields):
    ours, theirs = ([nn.Parameter(one) for one in _gradients(0)] for _ in range(2))
    recipe = tiny_recipe(**{"optim": {"weight_decay": 0.1, "lr": 1e-2, **fields}})
    own = torch_optimizer([{"params": ours, "weight_decay": 0.1}], recipe.optim)
    plain = reference_optimizer({str(index): one for index, one in enumerate(theirs)}, recipe)
    for step in range(1, 6):
        for weights in (ours, theirs):
            for weight, gradient in zip(weights, _gradients(step), strict=True):
                weight.grad = gradient.clone()
        own.step()
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    if isinstance(plain, PlainScheduleFree):
        trained = [one.detach().clone() for one in ours]
        plain.eval()
        with averaged_weights(own, own, lambda: None):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6)
        assert all(map(torch.equal, ours, trained))


LAYERS = {"model.config.num_hidden_layers": 3}
"""Of two layers, ZeRO 1 and 2 would give each of two ranks one: no matrix would be divided."""
ZERO = [{**LAYERS, "parallel.zero_stage": stage} for stage in range(4)]
FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
PIPELINE = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
SIZES = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 = {"model.architecture": "gpt2", "model.config": SIZES | NO_DROPOUT}
EXPERTS = MIXTRAL | {"parallel.expert": 2}
OTHERS = [
    {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"},
    {"parallel.backend": "accelerate", "parallel.accelerate": "deepspeed", "parallel.zero_stage": 2},
    FSDP2,
    {"parallel.pipeline": 2, "optim.clip_grad_norm": 0.0},
    PIPELINE,
    {"parallel.tensor": 2},
    {"parallel.tensor": 2, "parallel.zero_stage": 3},
    {"parallel.sequence": 2, "parallel.zero_stage": 2},
    {"parallel.zero_stage": 2, "parallel.offload_optimizer": "cpu"},
    {"parallel.zero_stage": 3, "parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"},
    {**EXPERTS, "parallel.zero_stage": 1},
    {**EXPERTS, "parallel.zero_stage": 3},
]
FOUR = [
    {**PIPELINE, "parallel.tensor": 2},
    PIPELINE,
    {"parallel.tensor": 2, "parallel.zero_stage": 2},
    {**GPT2, "parallel.zero_stage": 3},
    {**EXPERTS, "parallel.tensor": 2, "parallel.zero_stage": 1},
]


def _train(rank: int, recipes: list, ranks: int) -> list[Trace]:
    found = []
    for recipe in recipes:
        plan = plan_of(recipe, ranks)
        engine, batch = engine_of(plan), plan.batch
        own = (engine.data_parallel_rank, plan.data_parallel_size)
        found.append(trace(engine, range(STEPS), batch.micro_batch_size, batch.gradient_accumulation_steps, *own))
        engine.close()
    return found


def _torched(run: Trace) -> compare.Trace:
    weights = {name: torch.from_numpy(value) for name, value in run.weights.items()}
    return compare.Trace(run.losses, run.grad_norms, run.rates, run.evaluation, weights)


@pytest.mark.parametrize(
    ("name", "ranks", "cases"),
    [
        ("muon", 2, [ZERO[1], ZERO[3]]),
        ("lion", 2, [ZERO[2]]),
        ("schedule_free_adamw", 2, [ZERO[2]]),
        pytest.param("muon", 4, [FOUR[0]], marks=pytest.mark.slow),
        pytest.param("muon", 2, [ZERO[0], ZERO[2], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("muon", 2, OTHERS[5:-2], marks=pytest.mark.breadth),
        pytest.param("lion", 2, [ZERO[0], ZERO[1], ZERO[3], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("lion", 2, OTHERS[5:], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 2, [ZERO[0], ZERO[1], ZERO[3], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 2, OTHERS[5:], marks=pytest.mark.breadth),
        pytest.param("muon", 4, FOUR[1:-1], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 4, FOUR[:2], marks=pytest.mark.breadth),
        pytest.param("lion", 4, FOUR, marks=pytest.mark.breadth),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_every_division_gives_the_run_of_the_plain_loop(name, ranks, cases):
    recipes = [tiny_recipe(**{"optim.name": name, "batch.micro_batch_size": 2, **case}) for case in cases]
    for runs in run_ranks(ranks, _train, recipes, ranks):
        for recipe, run in zip(recipes, runs, strict=True):
            alone = recipe.with_(**{"parallel": {}})
            expected, initial = _torched(plain_run(alone, STEPS, 2)), _torched(plain_run(alone, 0, 2)).weights
            deviation = compare.deviation(_torched(run), expected, initial)
            allowed = compare.tolerance([expected], initial, name, "fp32")
            assert deviation.within(allowed), (recipe.parallel, deviation, allowed)


def _exchanged(rank: int, recipe) -> int:
    """Bytes that the second step sends other ranks for whole matrices."""
    from llmtrain.engines.optimizers import matrices

    plan = plan_of(recipe, 2)
    engine, batch, sent, own = engine_of(plan), plan.batch, [], matrices.dist.all_to_all_single

    def noted(received, out, expected, sizes, group):
        sent.append(out.element_size() * (sum(sizes) - sizes[rank]))
        return own(received, out, expected, sizes, group=group)

    matrices.dist.all_to_all_single = noted
    trace(engine, range(1), batch.micro_batch_size, batch.gradient_accumulation_steps, rank, 2)
    matrices.dist.all_to_all_single = own
    return sum(sent)


@pytest.mark.breadth
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "fp32"), (1, "bf16"), (3, "bf16")])
def test_muon_sends_no_more_than_is_counted(stage, precision):
    fields = {**LAYERS, "parallel.zero_stage": stage, "parallel.precision": precision, "batch.micro_batch_size": 2}
    recipe = tiny_recipe(**{"optim.name": "muon", **fields})
    counted, without = (
        sum(volumes(plan_of(recipe.with_(**{"optim.name": name}), 2))[0].values()) for name in ("muon", "adamw")
    )
    sent = run_ranks(2, _exchanged, recipe)
    # What an owner has of its own matrices is not sent. The layers' norms are counted, which are one in 290 here.
    assert 0 < sum(sent) / 2 < 1.01 * (counted - without)
