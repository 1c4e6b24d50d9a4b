"""Parts of a model by `torch.compile`: each decoder layer, and the loss of some tokens.

What is compiled is a layer's `forward`, not its call. Hooks, by which ZeRO-3 and FSDP2 gather parameters, and
activation checkpointing so stay around the graph, and names of parameters what they were. Layers that are alike share
one compiled function: its guards look at shapes, types and what a layer branches on, and not at which layer it is.
Shapes are fixed. Those of a run are few: a micro-batch with and without packed documents, in training and in
evaluation, and the last micro-batch of an evaluation.
"""

from __future__ import annotations

import os
import signal
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmtrain.errors import Problem, RecipeError
from llmtrain.host import own_cores
from llmtrain.models.cut import STUMBLES, TOLERANCE, packed_input, reference
from llmtrain.models.loss import target_loss_sum
from llmtrain.models.stages import Hole, decoder_layers
from llmtrain.models.tiny import shrink
from llmtrain.stops import STOPS

KINDS = 8
"""Most kinds of layers, each of which is compiled by itself: the families that alternate have two or three."""
VARIANTS = 8 * KINDS
"""Most compiled functions of one piece of code, in a process that may train several plans: kinds × with and without a
mask × training and evaluation × two sizes of micro-batches. Beyond them dynamo would run eagerly, or fail."""
MOST_THREADS = 32
"""Of torch's compiler, by its own choice."""
WHOLE = ("eager", "sdpa")
"""Attention of which is known that it breaks no graph."""
TRACED = (*WHOLE, "flex_attention")
"""Attention that is compiled with its layer; the others look at how many documents there are, and how long."""

Compiled = Callable[..., Any]

_let_through: set[str] = set()
"""What `check_layers` has found right in this process."""

compiling: Callable[[], AbstractContextManager[object]] = nullcontext
"""What is entered while something is compiled; set by who tells a watchdog that this takes its time."""


def compile_layers(model: PreTrainedModel, attention: str) -> None:
    """Has each decoder layer of a model, or of a stage of it, compute by compiled code, from its first call on.

    attention: as the model's own. A layer is one graph, or fails, where its attention is known to be part of one; else
    it is two, with the attention between them as it is.
    """
    if attention not in TRACED:
        _leave_out(attention)
    # Else DistributedDataParallel would have a layer cut where a bucket of gradients ends.
    torch._dynamo.config.optimize_ddp = False
    for layer in decoder_layers(model)[1]:
        if not isinstance(layer, Hole):
            layer.forward = _compiled(layer.forward, is_whole=attention in WHOLE)


def _leave_out(attention: str) -> None:
    """Has what is compiled stop before an attention of `transformers`' table, and go on behind it.

    How many documents a micro-batch has, and how long they are, would else be compiled into it, each time anew.
    """
    kernel = ALL_ATTENTION_FUNCTIONS[attention]
    if not getattr(kernel, "_torchdynamo_disable", False):
        ALL_ATTENTION_FUNCTIONS.register(attention, torch.compiler.disable(kernel))  # type: ignore[no-untyped-call]


def share_processors(ranks: int) -> None:
    """Has this rank compile by its share of the machine's processors, where nobody has said how many it may take.

    torch would take all of them, up to 32, in each of the ranks.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config

        config.compile_threads = max(1, min(MOST_THREADS, own_cores() // ranks))


@cache
def compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """`target_loss_sum`, compiled: logits are read once and their gradient written once, whatever lies between."""
    return _compiled(target_loss_sum, is_whole=True)


def _compiled(function: Compiled, is_whole: bool, backend: Compiled | None = None, limit: int = VARIANTS) -> Compiled:
    compiled: Compiled = torch.compile(  # type: ignore[call-overload]
        function, fullgraph=is_whole, dynamic=False, backend=backend or _inductor, recompile_limit=limit
    )
    return compiled


def _inductor(graph: GraphModule, inputs: Sequence[Tensor]) -> Compiled:
    """torch's own compiler, with word to the log and to the watchdog, and out of the way of signals.

    Batch systems tell all processes of a job to stop, compilers among them. Here such a signal is the rank's alone: it
    comes when the step is over, and what a compiler inherits is that it is blocked.
    """
    from torch._inductor.compile_fx import compile_fx

    started = time.monotonic()
    with compiling(), _stops_blocked():
        made: Any = compile_fx(graph, inputs)
    nodes = sum(node.op.startswith("call") for node in graph.graph.nodes)
    print(f"compiled {nodes} operations in {time.monotonic() - started:.1f} s", flush=True)
    compiled: Compiled = made
    return compiled


@contextmanager
def _stops_blocked() -> Iterator[None]:
    """Blocked and not ignored: what comes meanwhile is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_compiler(fields: Sequence[str], on_cpu: bool) -> None:
    """Raises RecipeError where nothing can be compiled on this machine.

    fields: those of the recipe that ask for it, and that would be `eager` or `chunked` without.
    """
    missing, cure = _missing(on_cpu)
    if missing:
        others = {"kernels.blocks": "eager", "kernels.loss": "chunked"}
        raise RecipeError(
            [
                Problem(
                    "kernels.compiler",
                    field,
                    f"'compiled' was given, but {missing}",
                    f"{cure}, or --set {field}={others[field]}",
                )
                for field in fields
            ]
        )


def _missing(on_cpu: bool) -> tuple[str, str]:
    """What is missing to compile, and what installs it; empty where nothing is."""
    if not on_cpu:
        from torch.utils._triton import has_triton

        return ("", "") if has_triton() else ("triton, which compiles for GPUs, is not there", "pip install triton")
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler is found, by which torch compiles for CPUs", "install g++, or name one in CXX"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"{headers} has no Python.h, which what is compiled includes", "install python3-dev"
    return "", ""


def check_layers(config: PreTrainedConfig, attention: str) -> None:
    """Has the layers of a tiny copy of the model traced, and compares logits and gradients; on the CPU, in fp32.

    Nothing is compiled yet: what the compiler is given runs as it is. Raises RecipeError where a layer cannot be
    followed to its end, nearly every layer would be compiled by itself, or the numbers are others.
    """
    question = f"{attention} {config.to_json_string()}"
    if question in _let_through:
        return
    torch._dynamo.reset()  # what was traced before must not count among the kinds
    try:
        with torch.random.fork_rng(devices=[]):
            deviation = _deviation(shrink(config), attention if attention in WHOLE else "eager")
    except (*STUMBLES, torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
        raise _refused(config, f" ({type(error).__name__}: {_first_line(error)})") from error
    finally:
        torch._dynamo.reset()
    if deviation > TOLERANCE:
        raise _refused(config, f": logits or gradients deviate by {deviation:.0e}")
    _let_through.add(question)


def _refused(config: PreTrainedConfig, why: str) -> RecipeError:
    message = f"the layers of {config.model_type} cannot be compiled{why}"
    return RecipeError(Problem("kernels.blocks", "kernels.blocks", message, "--set kernels.blocks=eager"))


def _deviation(config: PreTrainedConfig, attention: str) -> float:
    """Largest deviation of logits, auxiliary loss and gradients, each relative to its largest number."""
    model = reference(config, attention)
    tokens, positions = packed_input(config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def computed() -> list[Tensor | None]:
        output = model(input_ids=tokens, position_ids=positions, use_cache=False)
        losses = [output.logits.square().mean(), getattr(output, "aux_loss", None)]
        loss = torch.stack([one for one in losses if one is not None]).sum()
        return [output.logits.detach(), loss.detach(), *torch.autograd.grad(loss, trained, allow_unused=True)]

    expected = computed()
    for layer in decoder_layers(model)[1]:
        layer.forward = _compiled(layer.forward, is_whole=True, backend=_traced, limit=KINDS)
    worst = 0.0
    for one, other in zip(computed(), expected, strict=True):
        if one is not None and other is not None:
            worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)))
        elif one is not None or other is not None:
            return float("inf")
    return worst


def _traced(graph: GraphModule, inputs: Sequence[Tensor]) -> Compiled:
    """Forward and backward graph of what was traced, run operation by operation."""
    from torch._dynamo.backends.debugging import aot_eager

    made: Compiled = aot_eager(graph, list(inputs))
    return made


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
