"""Compares what a drawn plan does on the real engine, without the rules, with a plain PyTorch loop.

Each plan has processes of its own: DeepSpeed keeps much for the life of a process, and a refused plan may hang.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from llmtrain.data import StepBatch
from llmtrain.engines import build_engine
from llmtrain.engines.deepspeed.sequence import SequenceAxis
from llmtrain.models.stages import decoder_layers
from llmtrain.models.tensor.collectives import shard_of
from llmtrain.plan import Plan
from llmtrain.plan.draft import Draft
from llmtrain.plan.ds_config import render
from llmtrain.plan.rules import LEGALITY, assemble, broken
from llmtrain.recipe import ParallelConfig, Recipe
from llmtrain.trials.verify.compare import Trace, deviation, tolerance
from llmtrain.trials.verify.job import Deviation, worst
from llmtrain.trials.verify.train import sgd_fields
from tests.helpers.batches import global_batch, part_of
from tests.helpers.harness import run_ranks
from tests.helpers.random_plans import Case, rules_of
from tests.helpers.reference_run import ReferenceRun

STEPS = 3
HELD_OUT = 999
"""Number of the batch that is evaluated at the end."""
REFERENCES = 6
"""Plain loops with other orders, micro-batches and attention kernels; below fp32, a refused plan exceeds their
spread."""
LOWER = Deviation(loss=2**-8, grad_norm=2**-6, weights=math.sqrt(2 * 2**-6), same_lr=True)
"""What a legal plan in a lower precision may deviate. A loss by a unit in its last place, norms of rounded gradients by
four (as in `test_parity`), and so weights by what `verify.compare` derives for Adam from the error of a gradient."""
PATIENCE = 180
"""Seconds after which a plan counts as hanging."""
CPU = torch.device("cpu")

Did = dict[str, Any]
"""What an engine actually does for each field of a plan."""


def verdict(case: Case) -> str:
    """Returns how the engine deviates from the plan; empty if it trains as the plain loop does."""
    if not case.rules:
        return _probed(case.draft, LOWER)
    return _wrong(case) or _without_effect(case)


def _wrong(case: Case) -> str:
    """Returns how a refused plan goes wrong, in the first run that shows it.

    Adam hides a wrong scale, and what rounds each gradient relative to itself; SGD hides what only Adam's moments
    show; a lower precision hides what fp32 shows. So each is tried, and SGD in fp32 too.
    """
    return next(filter(None, map(_probed, _variants(case))), "")


def _variants(case: Case) -> Iterator[Draft]:
    drafts = [case.draft]
    exact = _changed(case.draft, {"parallel.precision": "fp32"})
    if exact != case.draft and rules_of(exact) == case.rules:
        drafts.append(exact)
    yield from drafts
    for draft in drafts:
        yield _changed(draft, sgd_fields(draft.recipe, _reference(_plain(draft.recipe)).grad_norms))


def _changed(draft: Draft, fields: dict[str, Any]) -> Draft:
    return Draft(draft.recipe.with_(**fields), draft.cluster, draft.facts)


def _probed(draft: Draft, least: Deviation | None = None) -> str:
    """least: what may be allowed in a lower precision at least."""
    try:
        ranks = _run(draft)
    except (AssertionError, TimeoutError) as error:
        return f"fails: {_reason(error)}"
    asked = _asked(assemble(draft))
    for did, _ in ranks:
        others = [f"{name} {value} as {did[name]}" for name, value in asked.items() if did[name] != value]
        if others:
            return f"does otherwise: {', '.join(others)}"
    return _deviates(draft.recipe, [_torch(run) for _, run in ranks], least)


def _without_effect(case: Case) -> str:
    """For a refused plan whose results are right, returns the refused field that has no effect."""
    plain = ParallelConfig()
    for field in sorted({problem.field for problem in broken(case.draft, LEGALITY)[0]}):
        name = field.removeprefix("parallel.")
        if name not in ParallelConfig.model_fields:
            continue
        other = _changed(case.draft, {field: getattr(plain, name)})
        if other.accumulation and _same(_run(case.draft), _run(other)):
            return f"ignores {field}"
    return ""


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    """Returns whether two runs agree in every bit."""
    (_, first), (_, second) = ours[0], theirs[0]
    a, b = _torch(first), _torch(second)
    numbers = (a.losses, a.grad_norms) == (b.losses, b.grad_norms)
    return numbers and all(torch.equal(a.weights[name], weight) for name, weight in b.weights.items())


def _run(draft: Draft) -> list[tuple[Did, Trace]]:
    """Returns, for every rank, what the engine did and the run. Raises the exception of the first rank that failed."""
    plan = assemble(draft)
    return run_ranks(plan.workers, _train, draft, timeout=PATIENCE)


def _train(rank: int, draft: Draft) -> tuple[Did, Trace]:
    plan = assemble(draft)
    engine = build_engine(plan, render(plan), CPU)
    calls, again = [0], _layers_again(engine, plan.parallel)
    for layer in again:
        # The layer's first module, since a selective checkpoint is within the layer's own call.
        next(layer.children()).register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    # An invalid plan may have more ranks than readers.
    reader = engine.data_parallel_rank % plan.readers
    shape = (plan.read_size, plan.batch.gradient_accumulation_steps, reader, plan.readers)
    run, passes = _trace(engine, draft.recipe, *shape, calls=calls)
    return _did(engine, plan, passes / max(len(again) * STEPS * shape[1], 1)), _numpy(run)


def _layers_again(engine: Any, parallel: ParallelConfig) -> list[torch.nn.Module]:
    """Returns the layers of this rank that are recomputed."""
    models = [one for one, _ in engine.models()] if hasattr(engine, "models") else [engine.model]
    layers = [layer for model in models for layer in list(decoder_layers(model)[1])[:: parallel.checkpoint_every]]
    return [layer for layer in layers if next(layer.parameters(), None) is not None]


def _asked(plan: Plan) -> Did:
    parallel = plan.parallel
    return {
        "devices": plan.cluster.world_size,
        "stages": parallel.pipeline,
        "tensor slices": parallel.tensor > 1,
        "sequence slices": parallel.sequence,
        "attention": plan.recipe.model.attention_kernel,
        "ring": plan.sequence_ring,
        "spread experts": parallel.expert > 1,
        "ZeRO stage": parallel.zero_stage,
        "ranks that keep parameters": parallel.hierarchical_partition,
        "offloaded states": parallel.offload_optimizer != "none",
        "offloaded parameters": parallel.offload_param != "none",
        "states on a disk": parallel.offload_optimizer == "nvme",
        "layers run again": parallel.activation_checkpointing != "none",
    }


def _did(engine: Any, plan: Plan, passes: float) -> Did:
    inner = getattr(engine, "engine", None)
    is_deepspeed = hasattr(inner, "zero_optimization_stage")
    optimizer = inner.optimizer if is_deepspeed else None
    model = engine.model
    ulysses = next((axis.ulysses for axis in getattr(engine, "axes", ()) if isinstance(axis, SequenceAxis)), None)
    # FSDP2 does not tell its two stages apart.
    sharded = plan.parallel.zero_stage if any(isinstance(one, FSDPModule) for one in model.modules()) else 0
    return {
        "devices": dist.get_world_size() * len(getattr(getattr(engine, "distribution", None), "devices", [CPU])),
        "stages": engine.module.num_stages if getattr(engine, "_pipeline", None) else 1,
        "tensor slices": any(shard_of(one) for one in model.parameters()),
        "sequence slices": ulysses.size if ulysses else 1,
        "attention": "varlen" if ulysses and ulysses.ring else plan.recipe.model.attention_kernel,
        "ring": ulysses.ring.size if ulysses and ulysses.ring else 1,
        "spread experts": any(not getattr(one, "allreduce", True) for one in model.parameters()),
        "ZeRO stage": inner.zero_optimization_stage() if is_deepspeed else sharded,
        "ranks that keep parameters": _neighbours(optimizer),
        "offloaded states": bool(getattr(optimizer, "cpu_offload", False) or _flag(optimizer, "offload_optimizer")),
        "offloaded parameters": _flag(optimizer, "offload_param"),
        "states on a disk": _flag(optimizer, "swap_optimizer"),
        # A stage may have none of every k-th layer.
        "layers run again": passes > 1 if passes else plan.parallel.activation_checkpointing != "none",
    }


def _neighbours(optimizer: Any) -> int:
    group = groups._get_zero_param_intra_parallel_group()
    is_used = group is not None and isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    return dist.get_world_size(group) if is_used else 1


def _flag(optimizer: Any, name: str) -> bool:
    return bool(getattr(optimizer, name, False))


def _deviates(recipe: Recipe, runs: list[Trace], least: Deviation | None) -> str:
    reference = _plain(recipe)
    expected, initial = _reference(reference), _initial(reference)
    precision = recipe.parallel.precision
    if precision == "autocast_fp16":
        return next(filter(None, (_scaled_wrong(run, expected) for run in runs)), "")
    allowed = least if least and precision != "fp32" else _allowed(reference)
    noise = _noise(reference) if least and precision != "fp32" else set()
    apart = [deviation(_without(noise, run), _without(noise, expected), initial) for run in runs]
    whole = Deviation(
        loss=worst(one.loss for one in apart),
        grad_norm=worst(one.grad_norm for one in apart),
        weights=worst(one.weights for one in apart),
        same_lr=all(one.same_lr for one in apart),
    )
    if whole.within(allowed):
        return ""
    numbers = [(name, getattr(whole, name), getattr(allowed, name)) for name in ("loss", "grad_norm", "weights")]
    told = ", ".join(
        f"{name} {'?' if ours is None else format(ours, '.1e')} of {most:.1e}" for name, ours, most in numbers
    )
    return f"deviates: {told}" + ("" if whole.same_lr else ", another rate")


def _scaled_wrong(run: Trace, expected: Trace) -> str:
    """The reference scales no loss, and the engine skips steps until its scale fits: only sizes can be compared."""
    for ours, theirs in zip((*run.losses, *run.grad_norms), (*expected.losses, *expected.grad_norms), strict=True):
        if math.isfinite(ours) and not 0.5 < ours / theirs < 2:
            return f"deviates: {ours:.3g} for {theirs:.3g}"
    return "" if all(map(math.isfinite, run.losses)) else "deviates: losses are not finite"


def _plain(recipe: Recipe) -> Recipe:
    """Returns the recipe with only the fields that the reference reads; runs of the reference are cached by it."""
    routed = recipe.model.config.get("output_router_logits")
    micro = recipe.batch.micro_batch_size if routed else 1
    return recipe.with_(
        **{
            "parallel": {"precision": recipe.parallel.precision},
            "batch.micro_batch_size": micro,
        }
    )


@cache
def _cached(text: str, order: int) -> Trace:
    recipe = Recipe.model_validate_json(text)
    if order % 2:
        others = {"sdpa": "eager", "eager": "sdpa", "varlen": "eager"}
        recipe = recipe.with_(**{"model.attention": others[recipe.model.attention_kernel]})
    engine = ReferenceRun(recipe, together=order > 0)
    total = recipe.batch.global_batch_size
    routed = recipe.model.config.get("output_router_logits")
    own = recipe.batch.micro_batch_size
    sizes = [own] if routed else [size for size in (1, 2, 4, total) if total % size == 0]
    micro = sizes[order % len(sizes)]
    return _trace(engine, recipe, micro, total // micro, 0, 1, order=order)[0]


def _reference(recipe: Recipe, order: int = 0) -> Trace:
    return _cached(recipe.model_dump_json(), order)


def _allowed(recipe: Recipe) -> Deviation:
    precision = recipe.parallel.precision
    orders = range(REFERENCES if precision != "fp32" else 1)
    return tolerance([_reference(recipe, order) for order in orders], _initial(recipe), recipe.optim.name)


def _noise(recipe: Recipe) -> set[str]:
    """Weights on which plain loops disagree by more than a legal plan may.

    A bias of keys shifts all scores of a query alike, so its gradient is rounding, which Adam makes whole steps of.
    """
    expected, initial = _reference(recipe), _initial(recipe)
    others = [_reference(recipe, order) for order in range(1, REFERENCES)]

    def apart(name: str, other: Trace) -> float:
        rest = expected.weights.keys() - {name}
        return deviation(_without(rest, other), _without(rest, expected), initial).weights or 0.0

    return {name for name in expected.weights if any(apart(name, other) > LOWER.weights for other in others)}


def _without(names: Set[str], run: Trace) -> Trace:
    return replace(run, weights={name: weight for name, weight in run.weights.items() if name not in names})


def _initial(recipe: Recipe) -> dict[str, torch.Tensor]:
    return {name: weight.detach().float().clone() for name, weight in ReferenceRun(recipe).named_weights()}


def _trace(
    engine: Any,
    recipe: Recipe,
    micro: int,
    accumulation: int,
    reader: int,
    readers: int,
    order: int = 0,
    calls: list[int] | None = None,
) -> tuple[Trace, int]:
    """The run, and how often `calls` was raised while it trained. order: of the samples of a step."""
    size = recipe.batch.global_batch_size
    shape = {"length": recipe.data.sequence_length, "vocab": recipe.vocab_size}

    def batch(step: int) -> StepBatch:
        samples = global_batch(step, size, **shape)
        if order:
            random.Random(order).shuffle(samples)
        return part_of(samples, step, micro, accumulation, reader, readers)

    results = [engine.train_step(batch(step)) for step in range(STEPS)]
    passes = calls[0] if calls else 0
    evaluation = engine.eval_step(batch(HELD_OUT)).item()
    run = Trace(
        losses=[result.loss.item() for result in results],
        grad_norms=[result.grad_norm.item() for result in results],
        rates=[result.lr for result in results],
        evaluation=evaluation,
        weights={name: weight.float().clone() for name, weight in engine.named_weights()},
    )
    return run, passes


def _numpy(run: Trace) -> Trace:
    """Returns an array: a tensor would be passed through shared memory, which ends with its process."""
    return Trace(run.losses, run.grad_norms, run.rates, run.evaluation, {n: w.numpy() for n, w in run.weights.items()})
    # type: ignore[misc]


def _torch(run: Any) -> Trace:
    weights = {name: torch.from_numpy(weight) for name, weight in run.weights.items()}
    return Trace(run.losses, run.grad_norms, run.rates, run.evaluation, weights)


def _reason(error: BaseException) -> str:
    """Returns the error of a rank from its traceback; our own errors have their fix in the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Refused|FamilyError)\b", line)]
    return (raised or lines or [type(error).__name__])[-1][:200]
