"""Compiles parts of a model: with `torch.compile` each decoder layer, and on GPUs the loss of a chunk of tokens; the
kernels for CPUs with the C++ compiler.

The layer's `forward` is compiled, not its call. Hooks, with which ZeRO-3 and FSDP2 gather parameters, and activation
checkpointing therefore stay outside the graph, and parameters keep their names. Layers of the same kind share one
compiled function: its guards check shapes, types and the attributes that a layer branches on, but not which layer it
is. Shapes are static. A run has few of them: a micro-batch with and without packed documents, in training and in
evaluation, and the last micro-batch of an evaluation.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmtrain.data import Documents, MicroBatch
from llmtrain.errors import Problem, RecipeError, reason
from llmtrain.models import cpu
from llmtrain.models.documents import Kinds, document_masks, keep_apart, per_document
from llmtrain.models.loss import target_loss_sum, target_losses
from llmtrain.models.recompute.checkpoints import FullCheckpoint
from llmtrain.models.stages import Placeholder, decoder_layers
from llmtrain.models.tiny.compare import Outcome, deviation, logits_outcome
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import COPY_ERRORS, TOLERANCE, build_tiny_model, packed_input
from llmtrain.models.varlen import VARLEN, varying_documents
from llmtrain.overrides.torch import (
    compile_cpp,
    compile_graph,
    keep_graphs_whole,
    limit_compiler_threads,
    missing_for_compiler,
    too_many_graphs,
    with_recompile_limit,
)
from llmtrain.plan.kernels import TRACED, WHOLE_GRAPH
from llmtrain.system.host import available_cores
from llmtrain.system.stops import STOP_SIGNALS

MAX_LAYER_KINDS = 8
"""Largest number of kinds of layers. Each kind is compiled separately; families that alternate have two or three."""
MAX_COMPILED_VARIANTS = 8 * MAX_LAYER_KINDS
"""Largest number of compiled functions for one piece of code, in a process that may train several plans: kinds × with
and without a mask × training and evaluation × two sizes of micro-batches. Beyond this limit, dynamo would fall back to
eager execution or fail."""
MAX_THREADS = 32
"""Largest number of threads that torch's compiler chooses by itself."""

Compiled = Callable[..., Any]

_eager: dict[str, Compiled] = {}
"""Attention functions, by their names, that run eagerly between two graphs."""
_accepted: set[str] = set()
"""Configurations that `check_layers` has accepted in this process."""

compiling: Callable[[], AbstractContextManager[object]] = nullcontext
"""The context manager that surrounds each compilation. A worker with a watchdog replaces it to report that compilation
takes long."""


def compile_layers(model: PreTrainedModel, attention: str, is_ring: bool = False) -> None:
    """Compiles each decoder layer of a model, or of a stage of it, at its first call.

    attention: the model's attention implementation. If it is known not to break the graph, a layer must compile to one
    graph, or compilation fails. Otherwise a layer compiles to two graphs, with the attention running eagerly between
    them, as does a part that computes each document on its own. is_ring: whether ranks compute attention in a ring,
    which runs eagerly, too.
    """
    if attention not in TRACED and ALL_ATTENTION_FUNCTIONS[attention] is not _eager.get(attention):
        # Otherwise the number of documents in a micro-batch and their lengths would be compiled into the graph, which
        # would be recompiled for each new combination.
        _eager[attention] = torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[attention])  # type: ignore[no-untyped-call]
        ALL_ATTENTION_FUNCTIONS.register(attention, _eager[attention])
    keep_graphs_whole()
    for layer in decoder_layers(model)[1]:
        if isinstance(layer, Placeholder):
            continue
        forward = layer.forward
        if isinstance(forward, FullCheckpoint):
            compiled = _compiled_layer(layer, forward.forward, attention, is_ring=is_ring)
            layer.forward = replace(forward, forward=compiled)
        else:
            layer.forward = _compiled_layer(layer, forward, attention, is_ring=is_ring)


def share_compiler_threads(ranks: int) -> None:
    """Limits this rank's compiler threads to its share of the machine's processors, unless the user has set a number.

    By default torch would use all processors, up to 32, in each rank.
    """
    limit_compiler_threads(max(1, min(MAX_THREADS, available_cores() // ranks)))


@cache
def compiled_loss(on_cpu: bool, of_tokens: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns `target_loss_sum`, compiled: the gradient of the logits is all that is written.

    on_cpu: returns a kernel for CPUs. of_tokens: returns `target_losses` instead.
    """
    if not on_cpu:
        return _compiled(target_losses if of_tokens else target_loss_sum, is_whole=True)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        losses = cpu.cross_entropies(logits.float().flatten(0, -2), labels.flatten())
        return losses.view_as(labels) if of_tokens else losses.sum()

    return loss


def _compiled_layer(
    layer: nn.Module,
    forward: Compiled,
    attention: str,
    backend: Compiled | str | None = None,
    limit: int = MAX_COMPILED_VARIANTS,
    is_ring: bool = False,
) -> Compiled:
    is_whole = attention in WHOLE_GRAPH and not per_document(layer) and not is_ring
    compiled = _compiled(forward, is_whole, backend, limit)
    return varying_documents(compiled) if attention == VARLEN else compiled


def _compiled(
    function: Compiled, is_whole: bool, backend: Compiled | str | None = None, limit: int = MAX_COMPILED_VARIANTS
) -> Compiled:
    compiled = torch.compile(
        function,
        fullgraph=is_whole,
        dynamic=False,
        backend=backend or _inductor,
        options={"guard_filter_fn": _guards_to_keep},
    )
    return with_recompile_limit(compiled, limit)


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Drops the check of the number that ZeRO-3 gives each parameter, with which each layer would be compiled anew.

    torch 2.11 makes such a check because DeepSpeed asks whether a parameter has a number.
    """
    return [not guard.name.endswith(".ds_id") for guard in guards]


def _inductor(graph: GraphModule, inputs: Sequence[Tensor]) -> Compiled:
    """Compiles with torch's own compiler, logs the duration, notifies the watchdog and blocks stop signals meanwhile.

    Batch systems send a stop signal to all processes of a job, including compiler processes. Here only the rank handles
    it: the signal is delivered when the compilation is over, and compiler processes inherit the blocked signal mask.
    """
    started = time.monotonic()
    with compiling(), _stops_blocked():
        compiled = compile_graph(graph, inputs)
    nodes = sum(node.op.startswith("call") for node in graph.graph.nodes)
    print(f"compiled {nodes} operations in {time.monotonic() - started:.1f} s", flush=True)
    return compiled


def compile_for_cpu(attention: str, loss: str) -> None:
    """Compiles the kernels for CPUs (`llmtrain.models.cpu`) if the recipe's attention or its loss has one.

    If this is impossible, `varlen` computes documents one at a time, which takes longer, and the log says why. Raises
    RecipeError if the loss is `compiled`.
    """
    if attention != VARLEN and loss != "compiled":
        return
    missing, _ = missing_for_compiler(on_cpu=True)
    try:
        if not missing:
            with compiling(), _stops_blocked():
                cpu.set_library(compile_cpp(cpu.SOURCE.read_text(encoding="utf-8")))
    except (RuntimeError, OSError) as error:
        missing = reason(error)
    if missing and loss == "compiled":
        raise RecipeError(_not_compiled("kernels.loss", missing))
    if missing:
        print(f"'{VARLEN}' computes one document at a time, because its kernel is not compiled: {missing}", flush=True)


@contextmanager
def _stops_blocked() -> Iterator[None]:
    """Blocks signals instead of ignoring them, so that a signal that arrives meanwhile is delivered afterwards."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def check_compiler(fields: Sequence[str], on_cpu: bool) -> None:
    """Raises RecipeError if this machine cannot compile.

    fields: the fields of the recipe that ask for compilation; without it they would be `eager` or `chunked`.
    """
    missing, cure = missing_for_compiler(on_cpu)
    if missing:
        raise RecipeError([_not_compiled(field, missing, f"{cure}, or ") for field in fields])


def _not_compiled(field: str, why: str, cure: str = "") -> Problem:
    other = {"kernels.blocks": "eager", "kernels.loss": "chunked"}[field]
    return Problem("kernels.compiler", field, f"'compiled' cannot be used: {why}", f"{cure}--set {field}={other}")


def check_layers(config: PreTrainedConfig, attention: str, kinds: Kinds | None = None) -> None:
    """Traces the layers of a tiny copy of the model and compares logits and gradients; on the CPU, in fp32.

    kinds: of the parts that compute each document on its own. Nothing is compiled: the traced graphs run as they are.
    Raises RecipeError if a layer cannot be traced as a whole, if nearly every layer would need its own compilation, or
    if the results differ.
    """
    key = f"{attention} {bool(kinds)} {config.to_json_string()}"
    if key in _accepted:
        return
    torch.compiler.reset()  # graphs traced earlier must not count among the kinds
    try:
        with torch.random.fork_rng(devices=[]):
            tried = attention if attention in WHOLE_GRAPH else "eager"
            worst = _deviation(shrink_configuration(config), tried, kinds or {})
    except (*COPY_ERRORS, too_many_graphs()) as error:
        raise _refused(config, f" ({type(error).__name__}: {reason(error)})") from error
    finally:
        torch.compiler.reset()
    if worst > TOLERANCE:
        raise _refused(config, f": logits or gradients deviate by {worst:.0e}")
    _accepted.add(key)


def _refused(config: PreTrainedConfig, why: str) -> RecipeError:
    message = f"the layers of {config.model_type} cannot be compiled{why}"
    return RecipeError(Problem("kernels.blocks", "kernels.blocks", message, "--set kernels.blocks=eager"))


def _deviation(config: PreTrainedConfig, attention: str, kinds: Kinds) -> float:
    """Returns the largest deviation of logits and gradients."""
    model = build_tiny_model(config, attention)
    keep_apart(model, kinds)
    tokens, positions = packed_input(config)
    bounds = Documents.of(positions).arguments(tokens.device) if attention == VARLEN else {}

    def outcome() -> Outcome:
        with document_masks(MicroBatch(tokens, positions, labels=tokens)):
            output = model(input_ids=tokens, position_ids=positions, use_cache=False, **bounds)
        return logits_outcome(model, output.logits, getattr(output, "aux_loss", None))

    expected = outcome()
    for layer in decoder_layers(model)[1]:
        layer.forward = _compiled_layer(layer, layer.forward, attention, "aot_eager", MAX_LAYER_KINDS)
    compiled = deviation(outcome(), expected)
    return max(compiled.output, compiled.gradient)
