"""The optimizers that torch does not have: by themselves, and under every division of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmtrain.engines.optim import averaged_weights, groups_for, locate_shards, torch_optimizer
from llmtrain.engines.optimizers import adamw_8bit, sums
from llmtrain.engines.optimizers.adamw_8bit import CODES, SCALES
from llmtrain.engines.optimizers.guarded import GuardedOptimizer
from llmtrain.engines.optimizers.muon import Muon
from llmtrain.engines.optimizers.sums import SharedSums
from llmtrain.engines.state.optimizer_shards import OptimizerShard, optimizer_shards
from llmtrain.engines.state.shards import ReplicaIndex, ShardLocation, WeightSlice
from llmtrain.plan import Plan
from llmtrain.plan.predict.traffic import volumes
from llmtrain.trials.verify import compare
from llmtrain.trials.verify.job import Deviation
from llmtrain.trials.verify.reference_optimizers import PlainScheduleFree, reference_optimizer
from tests.helpers.batches import MIXTRAL, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.own_optimizer import AVERAGING
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

    def locate(parameter):
        return ShardLocation(names[parameter], WeightSlice.whole(parameter.shape), ReplicaIndex())

    locate_shards(optimizer, optimizer, optimizer_shards(optimizer), locate, recipe, CPU)


def _own_muon(weights: list[nn.Parameter], precision: str, **fields) -> Muon:
    """Muon as an engine builds it, in one process."""
    recipe = tiny_recipe(**{"optim.name": "muon", "parallel.precision": precision, **fields})
    optimizer = torch_optimizer([{"params": weights, "muon": True, "weight_decay": 0.1}], recipe.optim)
    _known(optimizer, weights, recipe)
    return optimizer


def _own(name: str, weights: list[nn.Parameter], **fields) -> GuardedOptimizer:
    """Adafactor or 8-bit AdamW as an engine builds it, in one process."""
    recipe = tiny_recipe(**{"optim": {"name": name, "lr": 1e-2, "weight_decay": 0.1, **fields}})
    groups = [[one for one in weights if (one.ndim > 1) is is_matrix] for is_matrix in (True, False)]
    split = groups_for(recipe.optim, [], [{"params": group, "weight_decay": 0.1} for group in groups if group])
    optimizer = torch_optimizer(split, recipe.optim)
    _known(optimizer, weights, recipe)
    return optimizer


def _states(optimizer: GuardedOptimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    return optimizer.state[weight] | {kind: one.values for kind, one in optimizer.factors(weight).items()}


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


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw_8bit"])
def test_a_verdict_leaves_matrices_and_their_states_alone(name):
    weights = [nn.Parameter(one) for one in _gradients(0)]
    optimizer = _own_muon(weights, "fp32") if name == "muon" else _own(name, weights)

    def everything() -> list[Tensor]:
        states = [value for one in weights for value in _states(optimizer, one).values()]
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
    own = _own("adafactor", ours, lr=rate, options=options)
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
        state = _states(own, one)
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


@pytest.mark.parametrize("at_once", [adamw_8bit.STRETCH, 100])
@pytest.mark.parametrize("options", [{}, {"block_size": 16}], ids=str)
def test_8_bit_adamw_equals_the_reference(options, at_once, monkeypatch):
    """Of matrices with rows of one block and of several, of a stack, and of a vector; whole, or some rows at a time."""
    monkeypatch.setattr(adamw_8bit, "STRETCH", at_once)
    shapes = [(6, 40), (3, 700), (2, 3, 50), (7,)]
    ours, theirs = ([nn.Parameter(one) for one in _random(shapes, 0)] for _ in range(2))
    own = _own("adamw_8bit", ours, options=options)
    recipe = tiny_recipe(**{"optim": {"name": "adamw_8bit", "lr": 1e-2, "weight_decay": 0.1, "options": options}})
    plain = reference_optimizer({str(index): one for index, one in enumerate(theirs)}, recipe)
    plain.param_groups[-1]["weight_decay"] = 0.1
    for step in range(1, 6):
        for weights in (ours, theirs):
            for weight, gradient in zip(weights, _random(shapes, step), strict=True):
                weight.grad = gradient * 10.0**-step
        own.step()
        plain.step()
    # The same values are rounded: weights below 4 are stored twice a step, and no code differs.
    assert all((a - b).abs().max() < 10 * 2**-23 for a, b in zip(ours, theirs, strict=True))


def test_8_bit_adamw_keeps_two_bytes_of_each_element_and_two_scales_of_each_block():
    weight = nn.Parameter(torch.zeros(3, 1000))
    states = _states(_own("adamw_8bit", [weight]), weight)
    counted = sum(one.numel() * one.element_size() for kind, one in states.items() if kind != "step")
    assert counted == 2 * 3 * 1000 + 2 * 4 * 3 * 4
    assert all(states[kind].dtype is torch.uint8 for kind in CODES)


def test_a_second_moment_that_is_not_0_never_becomes_0():
    """Beside a gradient of 1, one of 1e-9: without its second moment, the next step without gradient would be huge."""
    weight = nn.Parameter(torch.zeros(1, 3))
    optimizer = _own("adamw_8bit", [weight], eps=1e-30)
    weight.grad = torch.tensor([[1.0, 1e-9, 0.0]])
    optimizer.step()
    codes = optimizer.state[weight][CODES[1]].tolist()
    assert codes == [[254, 1, 0]]
    before = weight.detach().clone()
    weight.grad = torch.zeros(1, 3)
    optimizer.step()
    assert (weight - before).abs().max() < 1e-2  # the learning rate


Held = tuple[str, WeightSlice, int, int]
"""A range of a slice of a matrix: its name, the slice, the first element, and the end."""
MATRICES = {"a.weight": (6, 40), "b.weight": (2, 3, 50)}


def _eight_bit(own: list[Held], steps: int = 4) -> list[dict[str, tuple[WeightSlice, int, NDArray]]]:
    """What a rank that holds ranges of matrices in one flat tensor, as under ZeRO, has after some steps.

    Of each range, by kind: its slice, the first index, and the values of weights, codes and scales. Gradients are
    those of the whole matrices.
    """

    def parts(seed: int) -> Tensor:
        whole = dict(zip(MATRICES, _random(list(MATRICES.values()), seed), strict=True))
        ranges = [weight_slice.take(whole[name])[first:end] for name, weight_slice, first, end in own]
        return torch.cat([*ranges, torch.zeros(3)])

    trained = nn.Parameter(parts(0))
    recipe = tiny_recipe(**{"optim": {"name": "adamw_8bit", "lr": 1e-2, "options": {"block_size": 16}}})
    group = {"params": [trained], "weight_decay": 0.1, "quantized": True}
    optimizer = torch_optimizer([group], recipe.optim)
    state = optimizer.state[trained]
    state.update(optimizer.first_state(optimizer.param_groups[0], trained))
    listed, locations, offset = [], {}, 0
    for name, weight_slice, first, end in own:
        parameter, last = nn.Parameter(torch.empty(weight_slice.shape, device="meta")), offset + end - first
        locations[parameter] = ShardLocation(name, weight_slice, ReplicaIndex())
        tensors = {"weight": trained.detach()[offset:last]} | {kind: state[kind][offset:last] for kind in CODES}
        listed.append(OptimizerShard(parameter, first, tensors, state, trained, offset))
        offset = last
    optimizer.locate_shards([trained], [listed], locations.__getitem__, CPU)
    for step in range(1, steps + 1):
        trained.grad = parts(step)
        optimizer.step()
    found = []
    for one, (_, weight_slice, first, _) in zip(listed, own, strict=True):
        states = {kind: (weight_slice, first, values) for kind, values in one.tensors.items()}
        states |= optimizer.factors(one.parameter)
        found.append({kind: (*place, values.numpy().copy()) for kind, (*place, values) in states.items()})
    return found


def _eight_bit_of_rank(rank: int, ranks: list[list[Held]]) -> list[dict[str, tuple[WeightSlice, int, NDArray]]]:
    return _eight_bit(ranks[rank])


def _slice(name: str, dim: int, *ranges: tuple[int, int]) -> WeightSlice:
    return WeightSlice.ranges(MATRICES[name], dim, ranges)


WHOLE = {name: WeightSlice.whole(shape) for name, shape in MATRICES.items()}
LEFT, RIGHT = _slice("a.weight", 1, (0, 20)), _slice("a.weight", 1, (20, 20))
DIVISIONS = {
    "flat": [
        [("a.weight", WHOLE["a.weight"], 0, 71)],
        [("a.weight", WHOLE["a.weight"], 71, 240), ("b.weight", WHOLE["b.weight"], 0, 131)],
        [("b.weight", WHOLE["b.weight"], 131, 135)],
        [("b.weight", WHOLE["b.weight"], 135, 300)],
    ],
    "columns": [
        [("a.weight", LEFT, 0, 120), ("b.weight", _slice("b.weight", 2, (0, 5), (25, 5)), 0, 60)],
        [("a.weight", RIGHT, 0, 120), ("b.weight", _slice("b.weight", 2, (5, 20), (30, 20)), 0, 240)],
    ],
    "columns, then flat": [
        [("a.weight", LEFT, 0, 47)],
        [("a.weight", RIGHT, 0, 55)],
        [("a.weight", LEFT, 47, 120)],
        [("a.weight", RIGHT, 55, 120)],
    ],
    "rows": [
        [
            ("a.weight", _slice("a.weight", 0, (0, 1), (3, 1)), 0, 80),
            ("b.weight", _slice("b.weight", 1, (0, 1)), 0, 99),
        ],
        [
            ("a.weight", _slice("a.weight", 0, (1, 2), (4, 2)), 0, 160),
            ("b.weight", _slice("b.weight", 1, (0, 1)), 99, 100),
        ],
    ],
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_ranks_with_parts_of_blocks_round_as_one_rank_does(name):
    """With the same gradients, bit for bit: weights, codes and scales."""
    ranges = [(name, weight_slice, 0, weight_slice.numel) for name, weight_slice in WHOLE.items()]
    whole = dict(zip(WHOLE, _eight_bit(ranges), strict=True))
    ranks = DIVISIONS[name]
    for own, found in zip(ranks, run_ranks(len(ranks), _eight_bit_of_rank, ranks), strict=True):
        for (weight, *_), states in zip(own, found, strict=True):
            assert states.keys() == {"weight", *CODES, *SCALES}
            for kind, (weight_slice, start, values) in states.items():
                expected = weight_slice.take(torch.from_numpy(whole[weight][kind][2]))[start : start + len(values)]
                assert np.array_equal(values, expected), (weight, kind)


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


CUT = {"optim.options": {"block_size": 48}, "model.config.vocab_size": 257}
"""Rows of 64 and 128 elements are several blocks, and neither partitions nor slices end with one."""


def _train(rank: int, recipes: list, ranks: int) -> list[Trace]:
    return [_run(plan_of(recipe, ranks)) for recipe in recipes]


def _run(plan: Plan, steps: int = STEPS) -> Trace:
    engine, batch = engine_of(plan), plan.batch
    own = (engine.data_parallel_rank, plan.data_parallel_size)
    run = trace(engine, range(steps), batch.micro_batch_size, batch.gradient_accumulation_steps, *own)
    engine.close()
    return run


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
        ("adamw_8bit", 2, [ZERO[1], ZERO[3]]),
        pytest.param("torch.optim:NAdam", 2, [ZERO[1], ZERO[3]], marks=pytest.mark.slow),
        pytest.param(AVERAGING["optim.name"], 2, [ZERO[3], PIPELINE], marks=pytest.mark.slow),
        pytest.param(AVERAGING["optim.name"], 2, [ZERO[1], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param(AVERAGING["optim.name"], 2, OTHERS[5:], marks=pytest.mark.breadth),
        pytest.param("torch.optim:NAdam", 2, [ZERO[0], ZERO[2], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("torch.optim:NAdam", 2, OTHERS[5:], marks=pytest.mark.breadth),
        pytest.param("muon", 4, [FOUR[0]], marks=pytest.mark.slow),
        pytest.param("muon", 2, [ZERO[0], ZERO[2], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("muon", 2, [*OTHERS[5:], *STACKS], marks=pytest.mark.breadth),
        pytest.param("lion", 2, [ZERO[0], ZERO[1], ZERO[3], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("lion", 2, OTHERS[5:], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 2, [ZERO[0], ZERO[1], ZERO[3], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 2, OTHERS[5:], marks=pytest.mark.breadth),
        pytest.param("muon", 4, FOUR[1:], marks=pytest.mark.breadth),
        pytest.param("schedule_free_adamw", 4, FOUR[:2], marks=pytest.mark.breadth),
        # Not GPT-2: the gradient of its keys' biases is 0 but for rounding, and Lion moves by its sign.
        pytest.param("lion", 4, [*FOUR[:3], *FOUR[4:]], marks=pytest.mark.breadth),
        pytest.param("adafactor", 4, [FOUR[0]], marks=pytest.mark.slow),
        pytest.param("adafactor", 2, [ZERO[0], ZERO[2], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("adafactor", 2, [*OTHERS[5:], *STACKS], marks=pytest.mark.breadth),
        pytest.param("adafactor", 4, FOUR[1:], marks=pytest.mark.breadth),
        pytest.param("adamw_8bit", 4, [FOUR[0]], marks=pytest.mark.slow),
        pytest.param("adamw_8bit", 2, [ZERO[0], ZERO[2], *OTHERS[:5]], marks=pytest.mark.breadth),
        pytest.param("adamw_8bit", 2, [*OTHERS[5:], *STACKS], marks=pytest.mark.breadth),
        pytest.param("adamw_8bit", 4, FOUR[1:], marks=pytest.mark.breadth),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_every_division_gives_the_run_of_the_plain_loop(name, ranks, cases):
    others = {"adamw_8bit": CUT, AVERAGING["optim.name"]: AVERAGING}
    fields = {"optim.name": name, "batch.micro_batch_size": 2} | others.get(name, {})
    recipes = [tiny_recipe(**fields, **case) for case in cases]
    for runs in run_ranks(ranks, _train, recipes, ranks):
        for recipe, run in zip(recipes, runs, strict=True):
            deviation, allowed = _compared(recipe, run)
            assert deviation.within(allowed), (recipe.parallel, deviation, allowed)


def _compared(recipe, run: Trace) -> tuple[Deviation, Deviation]:
    """How far a run differs from that of the plain loop, and how far it may."""
    alone = recipe.with_(**{"parallel": {}})
    expected, initial = _torched(plain_run(alone, STEPS, 2)), _torched(plain_run(alone, 0, 2)).weights
    allowed = compare.tolerance([expected], initial, recipe.optim.name)
    return compare.deviation(_torched(run), expected, initial), allowed


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
@pytest.mark.parametrize(
    ("stage", "precision", "model"),
    [(0, "fp32", {}), (2, "fp32", {}), (1, "bf16", {}), (3, "bf16", {}), (1, "fp32", EXPERTS), (3, "bf16", EXPERTS)],
)
def test_muon_sends_no_more_than_is_counted(stage, precision, model):
    fields = {**LAYERS, "parallel.zero_stage": stage, "parallel.precision": precision, "batch.micro_batch_size": 2}
    recipe = tiny_recipe(**{"optim.name": "muon", **fields, **model})
    counted, without = (
        sum(volumes(plan_of(recipe.with_(**{"optim.name": name}), 2))[0].values()) for name in ("muon", "adamw")
    )
    sent = run_ranks(2, _exchanged, recipe)
    # What an owner has of its own matrices is not sent. The layers' norms are counted, which are one in 290 here.
    assert 0 < sum(sent) / 2 < 1.01 * (counted - without)


def _summed(rank: int, recipe) -> int:
    """Bytes of the messages of a step between ranks that hold parts of the same weights."""
    plan, exchanged, own, reduce = plan_of(recipe, 2), [], SharedSums.reduce, sums.dist.all_reduce

    def noted(total, *arguments, **fields):
        exchanged.append(4 * total.numel())
        return reduce(total, *arguments, **fields)

    def watched(*arguments, **fields):
        sums.dist.all_reduce = noted
        found = own(*arguments, **fields)
        sums.dist.all_reduce = reduce
        return found

    SharedSums.reduce = watched
    _run(plan, steps=1)
    SharedSums.reduce = own
    return sum(exchanged)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(("adafactor", fields) for fields in ({}, {"parallel.zero_stage": 3}, {"parallel.tensor": 2}, EXPERTS)),
        *(("adamw_8bit", ZERO[stage]) for stage in range(4)),
        ("adamw_8bit", {"parallel.tensor": 2}),
    ],
    ids=str,
)
def test_what_is_sent_of_parts_of_weights_is_counted(name, fields):
    cut = CUT if name == "adamw_8bit" else {}
    recipe = tiny_recipe(**{"optim.name": name, "batch.micro_batch_size": 2, **fields, **cut})
    counted, without = (
        sum(volumes(plan_of(recipe.with_(**{"optim.name": one, "optim.options": options}), 2))[0].values())
        for one, options in ((name, recipe.optim.options), ("adamw", {}))
    )
    # Of two ranks in a ring, each sends half of a tensor twice.
    assert run_ranks(2, _summed, recipe) == [counted - without] * 2
    assert (counted == without) is (fields == ZERO[0])  # where no block is cut
