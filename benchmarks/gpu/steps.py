"""Times training steps of a plan on the first device, and compares time and memory with the predictions.

Tokens are random, so that nothing is read or downloaded: the time of a step does not depend on the text.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.case import FailedError, Numbers, Situation
from llmtrain.errors import RecipeError
from llmtrain.recipe import Recipe, parse_recipe

if TYPE_CHECKING:
    import torch

    from llmtrain.data import StepBatch
    from llmtrain.plan import Plan

WARM_UP, LEAST_STEPS, MOST_STEPS = 2, 4, 20
LEAST_S = 4.0
"""Seconds of timed steps after which a case ends, once it has taken `LEAST_STEPS`."""
BATCHES = 4
"""Number of batches of random tokens, which steps repeat."""

Fields = dict[str, Any]
COMPILED: Fields = {"model.attention": "varlen", "kernels.blocks": "compiled", "kernels.loss": "compiled"}
LIGER: Fields = {"model.attention": "varlen", "kernels.blocks": "liger", "kernels.loss": "liger"}
PLAIN: Fields = {"model.attention": "sdpa", "kernels.blocks": "eager", "kernels.loss": "whole"}

RANDOM, PRETRAINED, CHATS = "random", "pretrained", "chats"
"""Where weights and tokens are from: both random; weights from a folder; tokens of packed conversations."""


def _llama(
    width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, is_tied: bool = False
) -> dict[str, Any]:
    return {
        "architecture": "llama",
        "config": {
            **{"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers},
            **{"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": width // heads},
            **{"vocab_size": vocabulary, "max_position_embeddings": 8192, "tie_word_embeddings": is_tied},
        },
    }


MODELS: Mapping[str, dict[str, Any]] = {
    "1b": _llama(2048, 5632, 22, 32, 4, 32000),  # as recipes/llama_1b.py
    "3b": _llama(3072, 8192, 28, 24, 8, 128256, is_tied=True),  # as recipes/llama_3b.py
    "8b": _llama(4096, 14336, 32, 32, 8, 128256),  # as recipes/llama3_8b.py
    "gpt2": {
        "architecture": "gpt2",
        "config": {
            **{"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
            **{"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
        },
    },
    "experts": {
        "architecture": "mixtral",
        "config": _llama(768, 2048, 6, 12, 4, 32000)["config"] | {"num_local_experts": 8, "num_experts_per_tok": 2},
    },
}
SMALL_LLAMA: dict[str, Any] = _llama(256, 512, 2, 4, 2, 512)["config"]
SMALL: Mapping[str, dict[str, Any]] = {"gpt2": {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 2}}
SMALL_LENGTH = 128


@dataclass(frozen=True)
class TimedPlan:
    """A plan whose steps are timed on one device, by default ZeRO-1 in bf16."""

    model: str = "1b"
    """Key in `MODELS`."""
    kernels: Fields = field(default_factory=lambda: COMPILED)
    micro: int = 8
    """Sequences in a micro-batch."""
    length: int = 2048
    accumulation: int = 1
    documents: int = 1
    """Number of documents in a sequence."""
    source: str = RANDOM
    fields: Fields = field(default_factory=dict)
    """Fields of the recipe."""

    def recipe(self, small: bool = False, work: Path | None = None) -> Recipe:
        """Returns the recipe. small: of two narrow layers. work: the folder in which `PRETRAINED` weights are."""
        declared = MODELS[self.model]
        config = declared["config"] | (SMALL.get(self.model, SMALL_LLAMA) if small else {})
        model: dict[str, Any] = {"architecture": declared["architecture"], "config": config}
        if self.source == PRETRAINED and work is not None:
            model = {"pretrained": str(_weights_folder(self.model, work))}
        data: dict[str, Any] = {"sources": [{"name": "stdlib"}], "tokenizer": "none"}
        if self.source == CHATS:
            from benchmarks.gpu.peers import chat_data, chat_vocabulary

            model["config"] = config | {"vocab_size": chat_vocabulary(small)}
            if work is not None:
                data = chat_data(work, small)
        micro, length = (2, SMALL_LENGTH) if small else (self.micro, self.length)
        recipe = parse_recipe(
            {
                "name": "gpu",
                "model": model,
                "data": {
                    **data,
                    "sequence_length": length,
                    "mask_documents": self.documents > 1 or self.source == CHATS,
                },
                "optim": {"lr": 1e-4, "weight_decay": 0.1},
                "batch": {"global_batch_size": micro * self.accumulation, "micro_batch_size": micro},
                "parallel": {"zero_stage": 1, "precision": "bf16"},
                "train": {"max_steps": 100},
            }
        )
        return recipe.with_(**self.kernels, **self.fields)


def measure(timed: TimedPlan, given: Situation) -> Numbers:
    """Takes steps of a plan, and returns what was measured beside what was predicted.

    Raises RecipeError if the plan is refused on this device, and whatever building or training raises.
    """
    with _first_device() as (device, name):
        return _measure_small(timed, given, device, name) if given.small else _measure(timed, given, device, name)


def try_all(plans: Mapping[str, TimedPlan], given: Situation) -> Numbers:
    """Takes steps of all plans with small models, one after another. Raises FailedError if some of them fail."""
    small = Situation(small=True, work=given.work, rates=None)
    if given.small:  # the cases of this call do the same
        plans = dict(itertools.islice(plans.items(), 2))
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    with _first_device() as (device, name):
        for plan_name, timed in plans.items():
            try:
                _measure_small(timed, small, device, name)
            except RecipeError as error:
                refused[plan_name] = told(error)
            except Exception as error:  # of any library
                traceback.print_exc()
                failed[plan_name] = told(error)
            gc.collect()
    found: Numbers = {"plans": len(plans) - len(failed) - len(refused), "refused": refused, "failed": failed}
    if failed:
        raise FailedError(f"{len(failed)} of {len(plans)} plans: {', '.join(failed)}", found)
    return found


def told(error: BaseException) -> str:
    """Returns an error in a line."""
    if isinstance(error, RecipeError):
        return "; ".join(f"{problem.field}: {problem.message}" for problem in error.problems)[:600]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


@contextmanager
def _first_device() -> Iterator[tuple[torch.device, str]]:
    """Makes the process group of one rank; yields its device, and the name of that in the catalogue."""
    from llmtrain.engines.runtime.distributed import init_process_group
    from llmtrain.launch.discovery.rank import Rank
    from llmtrain.launch.rendezvous import reserved_port
    from llmtrain.recipe.cluster import device_of, visible_gpus

    gpus = visible_gpus()
    with reserved_port() as port:
        device = init_process_group(Rank(0, 0, 1, 1, "127.0.0.1", port, "benchmark"), on_cpu=not gpus)
    yield device, device_of(gpus[0]) if gpus else "cpu"


def _measure_small(timed: TimedPlan, given: Situation, device: torch.device, name: str) -> Numbers:
    """Does so with PyTorch's kernels if the plan's are refused, since an emulated GPU or a CPU may lack them."""
    try:
        return _measure(timed, given, device, name)
    except RecipeError as error:
        return _measure(replace(timed, kernels=PLAIN), given, device, name) | {"refused_kernels": told(error)}


def _measure(timed: TimedPlan, given: Situation, device: torch.device, name: str) -> Numbers:
    import torch

    from llmtrain.engines import build_engine
    from llmtrain.plan.ds_config import render
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import Cluster

    is_gpu = device.type == "cuda"
    if timed.source == PRETRAINED:
        _write_weights(replace(timed, fields={}).recipe(given.small), _weights_folder(timed.model, given.work), device)
    # On a device of unknown memory, so that a plan is measured even if it is predicted not to fit.
    plan = resolve(timed.recipe(given.small, given.work), Cluster(device="gpu" if is_gpu else "cpu"))
    found = _predicted(plan, name, given.rates)
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(1)
    batches = _batches(timed, plan)
    started = time.perf_counter()
    engine = build_engine(plan, render(plan), device)
    found["build_s"] = round(time.perf_counter() - started, 2)
    seconds: list[float] = []
    losses: list[float] = []
    trained: list[int] = []
    for batch in itertools.islice(itertools.cycle(batches), 2 * WARM_UP if given.small else WARM_UP + MOST_STEPS):
        if len(seconds) >= WARM_UP + LEAST_STEPS and sum(seconds[WARM_UP:]) >= LEAST_S:
            break
        _wait(device)
        started = time.perf_counter()
        result = engine.train_step(batch)
        losses.append(result.loss.item())  # waits for the device
        _wait(device)
        seconds.append(time.perf_counter() - started)
        trained.append(batch.target_tokens)
    engine.close()
    step_s = statistics.median(seconds[WARM_UP:])
    tokens = plan.batch.tokens_per_step
    found |= {
        "first_step_s": round(seconds[0], 2),
        "steps": len(seconds) - WARM_UP,
        "step_ms": round(1000 * step_s, 3),
        "tokens_per_second": round(tokens / step_s, 1),
        "trained_per_second": round(sum(trained[WARM_UP:]) / sum(seconds[WARM_UP:]), 1),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "grad_norm": float(result.grad_norm),
    }
    if peak := Cluster(device=name).spec.peak_flops.get("bf16"):
        found["mfu"] = round(plan.flops_per_token * tokens / step_s / peak, 4)
    if is_gpu:
        found["measured_bytes"] = torch.cuda.max_memory_allocated(device)
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    if not all(map(math.isfinite, losses)):
        raise FailedError("a loss is not finite", found)
    return found


def _predicted(plan: Plan, device: str, rates: Path | None) -> Numbers:
    """Returns the predicted bytes that torch allocates, and step times by datasheet and by the self-test's rates."""
    from llmtrain.plan.predict import memory_of
    from llmtrain.plan.predict.time import predict
    from llmtrain.recipe.cluster import Cluster, MeasuredRates

    memory = memory_of(plan)
    found: Numbers = {"predicted_bytes": memory.allocated if memory else None}
    clusters = {"predicted_ms": Cluster(device=device)}
    if rates is not None:
        measured = MeasuredRates.model_validate(json.loads(rates.read_text(encoding="utf-8")))
        if measured.device == device:
            clusters["calibrated_ms"] = Cluster(device=device, measured=measured)
    for number, cluster in clusters.items():
        if time_of := predict(plan.model_copy(update={"cluster": cluster})):
            found[number] = round(1000 * time_of.step_s, 3)
    return found


def _batches(timed: TimedPlan, plan: Plan) -> list[StepBatch]:
    if timed.source != CHATS:
        return [random_batch(plan, timed.documents) for _ in range(BATCHES)]
    from llmtrain.data import BatchLoader, prepare

    schedule = BatchLoader.of(plan, prepare(plan.recipe), dp_rank=0)
    size = plan.batch.global_batch_size
    return [schedule.train_batch(number * size) for number in range(WARM_UP + MOST_STEPS)]


def predicted_bytes(timed: TimedPlan) -> int | None:
    """Returns the bytes that torch allocates in steps of a plan, by prediction. No weights are read."""
    from llmtrain.plan.predict import memory_of
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import Cluster

    if timed.source == PRETRAINED:
        return None
    memory = memory_of(resolve(timed.recipe(), Cluster(device="gpu")))
    return memory.allocated if memory else None


def random_batch(plan: Plan, documents: int) -> StepBatch:
    """Returns a batch of random tokens, with as many equally long documents in each sequence."""
    import torch

    from llmtrain.data import MicroBatch, StepBatch

    rows, length = plan.batch.micro_batch_size, plan.recipe.data.sequence_length
    positions = torch.arange(length // documents).repeat(documents).expand(rows, length)
    micro_batches = []
    for _ in range(plan.batch.gradient_accumulation_steps):
        tokens = torch.randint(plan.model.vocab_size, (rows, length))
        micro_batches.append(MicroBatch(tokens, positions, tokens))
    samples = plan.batch.global_batch_size
    return StepBatch(micro_batches, target_tokens=samples * length, samples=samples, first_sample=0)


def _weights_folder(model: str, work: Path) -> Path:
    return work / f"weights-{model}"


def _write_weights(recipe: Recipe, folder: Path, device: torch.device) -> None:
    """Writes a folder of random bf16 weights as the hub has them, unless it is there; made on the device."""
    if (folder / "config.json").is_file():
        return
    import torch
    from safetensors.torch import save_file

    from llmtrain.models.build import model_configuration
    from llmtrain.models.hub_names import empty_model

    config = model_configuration(recipe)
    model = empty_model(config, torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in model.state_dict() if not (config.tie_word_embeddings and name == "lm_head.weight")]
    shards: dict[str, list[str]] = {}
    for name in names:  # a file for each layer
        layer = next((part for part in name.split(".") if part.isdecimal()), "rest")
        shards.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, within in shards.items():
        tensors = {}
        for name in within:
            shape = model.state_dict()[name].shape
            made = torch.ones(shape, device=device) if len(shape) == 1 else 0.02 * torch.randn(shape, device=device)
            tensors[name] = made.to(torch.bfloat16).cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, within in shards.items() for name in within}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
