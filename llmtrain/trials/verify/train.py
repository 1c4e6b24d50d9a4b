"""Trains the reference and the plans of one world size, one after another in one process group, and compares."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist

from llmtrain.data import StepBatch, prepare
from llmtrain.engines import Engine, build_engine
from llmtrain.engines.divergence import estimate_divergence
from llmtrain.engines.runtime.agree import gather
from llmtrain.engines.runtime.distributed import barrier
from llmtrain.models import build_model
from llmtrain.models.adapter import weight_name
from llmtrain.models.adapter_files import is_adapter
from llmtrain.models.precision import weight_dtype
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.facts.classifier import HEAD
from llmtrain.plan.facts.families import MIXING_PARTS
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.search.variants import has_mean_loss
from llmtrain.recipe import Recipe
from llmtrain.system.durable import write_atomically
from llmtrain.train.callbacks import Callbacks
from llmtrain.trials.jobs import Say
from llmtrain.trials.verify.batches import Batches
from llmtrain.trials.verify.compare import FP32, Trace, Weights, amplifying, clone, deviation, tolerance
from llmtrain.trials.verify.job import (
    CURRENT_FILE,
    METRICS,
    PROBES,
    Deviation,
    Reference,
    Verdict,
    VerifyJob,
    add_verdict,
    certified,
    read_references,
    read_verdicts,
    reference_file,
    worst_of,
)
from llmtrain.trials.verify.reference import ReferenceLoop
from llmtrain.trials.verify.round_trip import check_checkpoint_round_trip

SGD_STEP = 0.05
"""Learning rate times the (clipped) gradient norm in the SGD probe: the length of its first full step.

The norm of a matrix in a small model is a few units, so it moves by a few percent and remains trainable.
"""
PLANS_OF_A_WORKER = 16
"""Number of plans that a worker compares before a new worker replaces it. Each engine leaves process groups behind, and
each group has threads: without this limit, a worker had a thousand of them after a hundred plans."""
ORDERS = 8
"""Number of references in other orders and micro-batches, to measure the spread of a low precision."""
RUNS = 3
"""Number of references with other last bits of the weights, to measure how recurrences amplify roundings in fp32."""


def verify_rank(job: VerifyJob, folder: Path, device: torch.device, say: Say) -> None:
    """Trains the reference if it does not exist; compares the next plans of a world size that have no verdict yet."""
    batches = Batches(job.recipe, prepare(job.recipe), job.steps)
    if not reference_file(folder, PROBES[-1]).is_file():
        make_references(job.recipe, batches, folder, device, say)
    gc.collect()
    gc.freeze()  # scanning the libraries' objects after each engine took a third of a plan's time
    judged = {verdict.name for verdict in read_verdicts(folder)}
    numbers = {name: number for number, name in enumerate(job.plans, start=1)}
    remaining = [(name, plan) for name, plan in job.of_size(dist.get_world_size()) if name not in judged]
    for name, plan in remaining[:PLANS_OF_A_WORKER]:
        if dist.get_rank() == 0:
            write_atomically(folder / CURRENT_FILE, name)
        barrier()  # no rank may be so far ahead that its failure would be attributed to another plan
        minutes, seconds = divmod(int(time.time() - job.started), 60)
        say(f"{minutes:2}:{seconds:02}  {numbers[name]}/{len(numbers)}  {name}  ")
        verdict = compare_plan(name, plan, batches, folder, device)
        if dist.get_rank() == 0:
            add_verdict(folder, verdict)
        say("certified\n" if certified(verdict, read_references(folder)) else "DEVIATES\n")


def make_references(recipe: Recipe, batches: Batches, folder: Path, device: torch.device, say: Say) -> None:
    """Trains every probe with plain PyTorch, and writes its numbers, its tolerance and its weights."""
    initial = clone(dict(_reference(recipe, device).named_weights()))
    save_file(initial, folder / "initial.safetensors")
    fields: dict[str, Any] = {}
    for probe in PROBES:
        say(f"reference: {probe}\n")
        changed = recipe.with_(**fields)
        orders = range(ORDERS + 1 if recipe.parallel.precision != "fp32" else 1)
        traces = [_trace_reference(changed, batches, order, device) for order in orders]
        if recipe.parallel.precision != "fp32":
            traces.append(_trace_reference(changed, batches, 0, device, rounds=False))
        elif _has_recurrences(recipe):
            traces += [_trace_reference(changed, batches, 0, device, last_bits=seed) for seed in range(1, RUNS + 1)]
            if changed.optim.name != "sgd":
                amplified = amplifying(traces, initial, changed.optim.name)
                traces = [replace(trace, rounding=trace.rounding | amplified) for trace in traces]
        first = traces[0]
        save_file(first.weights, folder / f"reference-{probe}.safetensors")
        reference = Reference(
            fields=fields,
            tolerance=tolerance(traces, initial, changed.optim.name),
            loss=tuple(first.losses),
            grad_norm=tuple(first.grad_norms),
            lr=tuple(first.rates),
            evaluation=first.evaluation,
            rounding=tuple(sorted(first.rounding)),
        )
        write_atomically(reference_file(folder, probe), reference.model_dump_json(indent=2) + "\n")
        fields = sgd_fields(recipe, first.grad_norms)


def sgd_fields(recipe: Recipe, grad_norms: Any) -> dict[str, Any]:
    """Returns the fields of the SGD probe: clipped to half of the smallest norm, and always with weight decay.

    If the recipe does not clip, neither does the probe: some plans are only legal without clipping.
    """
    clip = min(grad_norms) / 2 or 1.0
    longest = max(grad_norms) or 1.0
    is_clipped = recipe.optim.clip_grad_norm > 0
    return {
        "optim.name": "sgd",
        "optim.lr": SGD_STEP / (clip if is_clipped else longest),
        "optim.clip_grad_norm": clip if is_clipped else 0.0,
        "optim.weight_decay": recipe.optim.weight_decay or 0.1,
    }


def compare_plan(name: str, plan: Plan, batches: Batches, folder: Path, device: torch.device) -> Verdict:
    """Trains every probe of a plan; returns the worst deviations of all ranks."""
    started = time.perf_counter()
    initial = load_file(folder / "initial.safetensors")
    deviations = {}
    for probe, reference in read_references(folder).items():
        changed = plan.model_copy(update={"recipe": plan.recipe.with_(**reference.fields)})
        theirs = Trace(
            losses=reference.loss,
            grad_norms=reference.grad_norm,
            rates=reference.lr,
            evaluation=reference.evaluation,
            weights=load_file(folder / f"reference-{probe}.safetensors"),
            rounding=frozenset(reference.rounding),
        )
        saved_in = folder / "saved" if probe == PROBES[0] else None
        deviations[probe] = _compare_probe(changed, batches, device, theirs, initial, reference.tolerance, saved_in)
    seconds = round(time.perf_counter() - started, 2)
    return Verdict(name=name, layout=plan.layout(), deviations=deviations, seconds=seconds)


def _compare_probe(
    plan: Plan,
    batches: Batches,
    device: torch.device,
    theirs: Trace,
    initial: Weights,
    allowed: Deviation,
    saved_in: Path | None,
) -> Deviation:
    """Returns the worst deviation of a plan from `theirs` over all ranks.

    saved_in: where the final state is saved, loaded and exported, if that is to be checked. It is not checked for a
    plan that deviates: the plan is not certified, and its ranks may disagree about what they save. Raises as
    `check_checkpoint_round_trip` does.
    """
    engine = build_engine(plan, render(plan), device)
    replica, batches = engine.data_parallel_rank, batches.referenced(engine, plan)
    callbacks = Callbacks(plan.recipe, only_gradients=True)
    parts = batches.part(plan, replica), batches.eval_batches(plan, replica)
    ours = _trace(engine, plan.recipe, callbacks, *parts)
    worst = _worst_rank(deviation(ours, theirs, initial, plan.recipe.optim.name))
    if saved_in is not None and worst.within(allowed):
        check_checkpoint_round_trip(engine, plan, ours.weights, saved_in)
    del engine
    gc.collect()  # an engine and its hooks refer to each other
    return worst


def _has_recurrences(recipe: Recipe) -> bool:
    """Whether a layer has a recurrence or a convolution, whose states or decays may amplify roundings."""
    return model_facts(recipe.model, recipe.vocab_size, recipe.code_dir).text_type in MIXING_PARTS


def _trace_reference(
    recipe: Recipe,
    batches: Batches,
    order: int,
    device: torch.device,
    rounds: bool = True,
    last_bits: int | None = None,
) -> Trace:
    """Trains the reference; plans are compared with order 0.

    The other orders show the effect of rounding: they process samples in other orders, and the documents of a
    micro-batch together. So does a reference that does not round between operations, and one that starts with other
    last bits of its weights. last_bits: the seed of these.
    """
    micro, total = recipe.batch.micro_batch_size, recipe.batch.global_batch_size
    # A router's loss is a mean within a micro-batch, so the size is part of the run.
    is_mean = has_mean_loss(model_facts(recipe.model, recipe.vocab_size, recipe.code_dir))
    sizes = (micro,) if is_mean else (micro, 1, total)
    loop = _reference(recipe, device, sizes[order % len(sizes)], together=order > 0, rounds=rounds)
    if last_bits is not None:
        loop.change_last_bits(last_bits)
    steps = [loop.train_step(sequences) for sequences in batches.whole(order or None)]
    held_out = batches.held_out()
    return Trace(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        rates=[step.lr for step in steps],
        evaluation=loop.evaluate(held_out) if held_out else None,
        weights=clone(dict(loop.named_weights())),
        rounding=frozenset(name for name, share in loop.gradient_shares.items() if 0 < share < FP32),
    )


def _reference(
    recipe: Recipe,
    device: torch.device,
    micro_batch_size: int | None = None,
    together: bool = False,
    rounds: bool = True,
) -> ReferenceLoop:
    return ReferenceLoop(recipe, drawn_weights(recipe, device), device, micro_batch_size, together, rounds)


def drawn_weights(recipe: Recipe, device: torch.device) -> Weights:
    """Returns the initial weights that no file holds: of a new model, adapter or head, as engines draw them."""
    model = recipe.model
    has_new_adapter = model.adapter is not None and model.adapter.pretrained is None
    if model.pretrained is not None and not has_new_adapter and model.num_labels is None:
        return {}
    built = build_model(recipe, weight_dtype(recipe.parallel.precision), device).state_dict()
    named = {weight_name(name): weight for name, weight in built.items()}
    drawn = [name for name in named if model.pretrained is None or is_adapter(name) or name == HEAD]
    return {name: named[name] for name in drawn}


def _trace(
    engine: Engine, recipe: Recipe, callbacks: Callbacks, steps: Iterator[StepBatch], held_out: Iterable[StepBatch]
) -> Trace:
    results = [engine.train_step(batch, callbacks.gradient_hook(step)) for step, batch in enumerate(steps, start=1)]
    callbacks.check_gradients(len(results))
    total, targets = 0.0, 0
    held_out = list(held_out)
    if engine.objective and engine.objective.needs_divergence:
        estimate_divergence(engine, held_out)
    own = engine.own_metrics if recipe.evaluation.metrics == METRICS else None
    metric_sums = torch.zeros(2, dtype=torch.float64)
    for batch in held_out:
        total += engine.eval_step(batch).item() * batch.num_items
        targets += batch.num_items
        if own:
            metric_sums += engine.own_metric_sums().cpu()
    return Trace(
        losses=[result.loss.item() for result in results],
        grad_norms=[result.grad_norm.item() for result in results],
        rates=[result.lr for result in results],
        evaluation=total / targets if targets else None,
        weights=clone(dict(engine.named_weights())),
        metric=next(iter(own.means(metric_sums.tolist()).values())) if own else None,
    )


def _worst_rank(deviation_here: Deviation) -> Deviation:
    """Returns the worst deviations of all ranks, since replicas may drift apart."""
    of_all_ranks = gather(deviation_here)
    return Deviation(**worst_of(of_all_ranks), same_lr=all(deviation.same_lr for deviation in of_all_ranks))
