"""The optimizers that torch does not have: by themselves, and under every division of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from llmtrain.cluster import Cluster
from llmtrain.engines.optim import averaged_weights, know_matrices, torch_optimizer
from llmtrain.engines.optimizers.adafactor import Adafactor
from llmtrain.engines.optimizers.muon import Muon
from llmtrain.engines.optimizers.sums import SharedSums
from llmtrain.engines.state.held import held
from llmtrain.engines.state.pieces import Region
from llmtrain.plan import Plan
from llmtrain.plan.draft import Draft
from llmtrain.plan.model_facts import model_facts
from llmtrain.predict.traffic import volumes
from llmtrain.rules import assemble
from llmtrain.verify import compare
from llmtrain.verify.job import Deviation
from llmtrain.verify.reference_optimizers import PlainScheduleFree, reference_optimizer
from tests.helpers.batches import MIXTRAL, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, engine_of, plain_run, plan_of, trace

CPU = torch.device("cpu")
STEPS = 4
SHAPES = ((6, 4), (4, 6), (5, 5))


FREE = [{"name": "schedule_free_adamw", "warmup_steps": warmup} for warmup in (0, 3)]


def _gradients(seed: int) -> list[Tensor]:
    return _random(SHAPES, seed)


def _random(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _known(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], recipe) -> None:
    """Lets an optimizer know that this process holds all weights of a layer."""
    names = {one: f"layers.0.{index}.weight" for index, one in enumerate(weights)}

    def place(one):
        return names[one], Region.whole(one.shape), (0, 1)

    know_matrices(optimizer, optimizer, held(optimizer), place, recipe, CPU)


def _own_muon(weights: list[nn.Parameter], precision: str, **fields) -> Muon:
    """Muon as an engine builds it, in one process."""
    recipe = tiny_recipe(**{"optim.name": "muon", "parallel.precision": precision, **fields})
    optimizer = torch_optimizer([{"params": weights, "muon": True, "weight_decay": 0.1}], recipe.optim)
    _known(optimizer, weights, recipe)
    return optimizer


def _own_adafactor(weights: list[nn.Parameter], **fields) -> Adafactor:
    """Adafactor as an engine builds it, in one process."""
    recipe = tiny_recipe(**{"optim": {"name": "adafactor", "lr": 1e-2, "weight_decay": 0.1, **fields}})
    groups = [[one for one in weights if (one.ndim > 1) is is_matrix] for is_matrix in (True, False)]
    flagged = [{"params": group, "weight_decay": 0.1, "factored": group[0].ndim > 1} for group in groups if group]
    optimizer = torch_optimizer(flagged, recipe.optim)
    _known(optimizer, weights, recipe)
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


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_verdict_leaves_matrices_and_their_states_alone(name):
    weights = [nn.Parameter(one) for one in _gradients(0)]
    optimizer = _own_muon(weights, "fp32") if name == "muon" else _own_adafactor(weights)

    def everything() -> list[Tensor]:
        states = [value for one in weights for value in (optimizer.state[one] | optimizer.factors(one)).values()]
        return [one.detach().clone() for one in (*weights, *states)]

    for bad in (False, True):
        before = everything()
        for weight, gradient in zip(weights, _gradients(1), strict=True):
            weight.grad = torch.full_like(gradient, float("nan")) if bad else gradient
        optimizer.found_inf = torch.tensor(float(bad))
        optimizer.step()
        assert all(torch.equal(old, new) is bad for old, new in zip(before, everything(), strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"beta2_decay": -0.5, "eps1": 1e-3, "eps2": 0.5, "d": 2.0}], ids=["default", "all"]
)
@pytest.mark.parametrize("rate", [1e-2, 1.0])
def test_adafactor_is_that_of_torch(options, rate):
    """Of matrices, a stack of them, and vectors; a rate of 1 is above what the number of updates allows."""
    shapes = [*SHAPES, (3, 4, 5), (7,), (1, 6), (6, 1)]
    ours, theirs = ([nn.Parameter(one) for one in _random(shapes, 0)] for _ in range(2))
    own = _own_adafactor(ours, lr=rate, options=options)
    eps = options.get("eps1"), options.get("eps2", 1e-3)
    others = {key: value for key, value in options.items() if "eps" not in key}
    torchs = torch.optim.Adafactor(theirs, lr=rate, weight_decay=0.1, eps=eps, **others)
    for step in range(1, 6):
        for weights in (ours, theirs):
            for weight, gradient in zip(weights, _random(shapes, step), strict=True):
                weight.grad = gradient * 10.0**-step
        own.step()
        torchs.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        state = own.state[one] | own.factors(one)
        assert state.keys() == torchs.state[other].keys()
        for key, value in torchs.state[other].items():
            torch.testing.assert_close(state[key].view(-1), value.view(-1), rtol=1e-5, atol=0)


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
STACKS = [MIXTRAL, {**MIXTRAL, "parallel.zero_stage": 1}, {**MIXTRAL, "parallel.zero_stage": 3}]
"""All experts of a layer are one weight on each rank."""
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
    return [_run(plan_of(recipe, ranks)) for recipe in recipes]


def _run(plan: Plan, steps: int = STEPS) -> Trace:
    engine, batch = engine_of(plan), plan.batch
    own = (engine.data_parallel_rank, plan.data_parallel_size)
    run = trace(engine, range(steps), batch.micro_batch_size, batch.gradient_accumulation_steps, *own)
    engine.close()
    return run


def _refused(rank: int, recipe, ranks: int) -> Trace:
    """The run of a plan in spite of the rules."""
    return _run(assemble(Draft(recipe, Cluster(devices_per_node=ranks), model_facts(recipe.model, recipe.vocab_size))))


def _torched(run: Trace) -> compare.Trace:
    weights = {name: torch.from_numpy(value) for name, value in run.weights.items()}
    return compare.Trace(run.losses, run.grad_norms, run.rates, run.evaluation, weights)


@pytest.mark.parametrize(
    ("name", "ranks", "cases"),
    [
        ("muon", 2, [ZERO[1], ZERO[3]]),
        ("lion", 2, [ZERO[2]]),
        ("schedule_free_adamw", 2, [ZERO[2]]),
        ("adafactor", 2, [ZERO[1], ZERO[3]]),
        pytest.param("muon", 4, [FOUR[0]], marks=pytest.mark.slow),
        pytest.param("muon", 2, [ZERO[0], ZERO[2], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("muon", 2, OTHERS[5:-2], marks=pytest.mark.breadth),
        pytest.param("lion", 2, [ZERO[0], ZERO[1], ZERO[3], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("lion", 2, OTHERS[5:], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 2, [ZERO[0], ZERO[1], ZERO[3], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 2, OTHERS[5:], marks=pytest.mark.breadth),
        pytest.param("muon", 4, FOUR[1:-1], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 4, FOUR[:2], marks=pytest.mark.breadth),
        # Not GPT-2: the gradient of its keys' biases is 0 but for rounding, and Lion moves by its sign.
        pytest.param("lion", 4, [*FOUR[:3], *FOUR[4:]], marks=pytest.mark.breadth),
        pytest.param("adafactor", 4, [FOUR[0]], marks=pytest.mark.slow),
        pytest.param("adafactor", 2, [ZERO[0], ZERO[2], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("adafactor", 2, [*OTHERS[5:-2], *STACKS], marks=pytest.mark.breadth),
        pytest.param("adafactor", 4, FOUR[1:-1], marks=pytest.mark.breadth),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_every_division_gives_the_run_of_the_plain_loop(name, ranks, cases):
    recipes = [tiny_recipe(**{"optim.name": name, "batch.micro_batch_size": 2, **case}) for case in cases]
    for runs in run_ranks(ranks, _train, recipes, ranks):
        for recipe, run in zip(recipes, runs, strict=True):
            deviation, allowed = _compared(recipe, run)
            assert deviation.within(allowed), (recipe.parallel, deviation, allowed)


def _compared(recipe, run: Trace) -> tuple[Deviation, Deviation]:
    """How far a run differs from that of the plain loop, and how far it may."""
    alone = recipe.with_(**{"parallel": {}})
    expected, initial = _torched(plain_run(alone, STEPS, 2)), _torched(plain_run(alone, 0, 2)).weights
    allowed = compare.tolerance([expected], initial, recipe.optim.name, "fp32")
    return compare.deviation(_torched(run), expected, initial), allowed


@pytest.mark.breadth
@pytest.mark.parametrize("stage", [1, 3])
def test_adafactor_trains_something_else_if_experts_are_distributed(stage):
    fields = {"optim.name": "adafactor", "batch.micro_batch_size": 2, "parallel.zero_stage": stage}
    recipe = tiny_recipe(**fields, **EXPERTS)
    for run in run_ranks(2, _refused, recipe, 2):
        deviation, allowed = _compared(recipe, run)
        assert not deviation.within(allowed)


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


def _summed(rank: int, recipe) -> int:
    """Bytes of the sums of a step that ranks exchange."""
    plan, exchanged, own = plan_of(recipe, 2), [], SharedSums.over_ranks

    def noted(*arguments, **fields):
        found = own(*arguments, **fields)
        exchanged.extend(4 * one.numel() for one in found.values())
        return found

    SharedSums.over_ranks = noted
    _run(plan, steps=1)
    SharedSums.over_ranks = own
    return sum(exchanged)


@pytest.mark.breadth
@pytest.mark.parametrize("fields", [{}, {"parallel.zero_stage": 3}, {"parallel.tensor": 2}], ids=str)
def test_adafactor_sends_what_is_counted(fields):
    recipe = tiny_recipe(**{"optim.name": "adafactor", "batch.micro_batch_size": 2, **fields})
    counted, without = (
        sum(volumes(plan_of(recipe.with_(**{"optim.name": name}), 2))[0].values()) for name in ("adafactor", "adamw")
    )
    # Of two ranks in a ring, each sends half of a tensor twice.
    assert run_ranks(2, _summed, recipe) == [counted - without] * 2
