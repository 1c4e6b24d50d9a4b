"""The private parts of torch 2.13 that llmtrain replaces or reads, and the settings of it that have underscores.

`llmtrain.overrides` has the list of the private parts. Functions around documented settings refer to the page.

Torch's compiler is imported where it is used, because that takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import Work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.sgd import sgd

from llmtrain.overrides import replaced
from llmtrain.system.host import processor_name

PIECE = 2**16
"""Number of elements that are summed in fp32 on a CPU. There, torch's norm of 50 million elements is off by 3e-3, as
are `clip_grad_norm_` and `get_total_norm`; the norm computed in pieces is off by 2e-7, in an eighth of the time that
fp64 takes."""


def keep_own_hooks(copied: nn.Module) -> None:
    """Gives each module of a copy, which has the dictionary of hooks of the original, one of its own."""
    for module in copied.modules():
        module._forward_hooks = module._forward_hooks.copy()


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of the squares of all elements of all `gradients`, an fp64 scalar on `device`; 0 without any."""
    pieces = [piece for gradient in gradients for piece in _pieces(gradient.detach())]
    norms = torch._foreach_norm(pieces, 2, dtype=torch.float32) if pieces else ()
    nothing = torch.zeros((), device=device)
    return torch.stack([nothing, *(norm.to(device) for norm in norms)]).double().square().sum()


def _pieces(gradient: Tensor) -> Sequence[Tensor]:
    """Splits a gradient into pieces for which fp32 suffices. A GPU's kernel does so itself (ForeachReduceOp.cu)."""
    return torch.split(gradient.reshape(-1), PIECE) if gradient.device.type == "cpu" else (gradient,)


class ShardedSGD(torch.optim.SGD):
    """SGD on this rank's shards: torch 2.13 supports DTensors in the fused kernel of Adam, but not in that of SGD."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates each shard unless `found_inf` is 1. The momentum buffers must exist (`llmtrain.engines.guard`)."""
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None and local(weight).numel()]
            if not trained:
                continue
            sgd(
                [local(weight) for weight in trained],
                [local(weight.grad) for weight in trained],
                [local(self.state[weight]["momentum_buffer"]) if group["momentum"] else None for weight in trained],
                fused=True,
                found_inf=self.found_inf,  # type: ignore[attr-defined]
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters_without_memory() -> AbstractContextManager[object]:
    """Creates each new parameter on the meta device until the returned context ends; buffers are computed as usual.

    The first value of each parameter is kept in `first`, because some parameters start from a constant that their
    constructor sets.
    """

    def on_meta(_: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.device.type == "meta":
            return parameter
        first = parameter.detach().flatten()[:1].clone()
        parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        parameter.first = first  # type: ignore[attr-defined]
        return parameter

    context: AbstractContextManager[object] = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    return context


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that are saved together with the weights."""
    saved = model.state_dict(keep_vars=True)
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if (f"{path}.{name}" if path else name) in saved
    }


def fake_tensors() -> AbstractContextManager[object]:
    """Returns a context in which new tensors have shapes but no memory.

    Documented: https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_of(tensor: Tensor) -> int:
    """Returns what identifies a tensor's storage while it lives, also if it has no memory."""
    return id(tensor.untyped_storage())


def join_fake_group(rank: int, world_size: int) -> None:
    """Joins a process group without other members, whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # defines the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def around_waits(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Runs every `Work.wait` of this process, which ends each collective called from Python, within a context."""
    wait = Work.wait

    def watched(work: Work, *arguments: Any) -> bool:
        with context():
            return wait(work, *arguments)

    Work.wait = watched  # type: ignore


def too_many_graphs() -> type[Exception]:
    """Returns the error of a function that must be one graph, and needs more graphs than its limit allows."""
    return torch._dynamo.exc.FailOnRecompileLimitHit


def keep_graphs_whole() -> None:
    """Prevents dynamo from splitting graphs under DistributedDataParallel wherever a bucket of gradients ends.

    Documented: https://docs.pytorch.org/docs/stable/notes/ddp.html
    """
    torch._dynamo.config.optimize_ddp = False


def with_recompile_limit(compiled: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """Returns a compiled function that may have up to `limit` graphs.

    Beyond that, it fails if it must be one graph, or else runs eagerly. Torch's own limit of 8 still applies to other
    functions. `torch.compile` has an argument for this in torch 2.13, but not in 2.11.
    """

    @wraps(compiled, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with replaced((torch.compiler.config, "recompile_limit", limit)):
            return compiled(*args, **kwargs)

    return run


def mark_dynamic_length(tensor: Tensor) -> None:
    """Keeps the size of a tensor's first dimension out of graphs that are compiled with static shapes.

    Documented: https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html
    """
    torch._dynamo.mark_dynamic(tensor, 0)


def varlen_backward(
    gradient: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    log_sums: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the states of `varlen_attn`, by the same kernel call as in torch's backward formula.

    bounds, longest: of the queries and of the keys.
    """
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=gradient.device)
    is_causal = window == (-1, 0)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        gradient,
        *states,
        output,
        log_sums,
        *bounds,
        *longest,
        is_causal,
        no_dropout,
        scale,
        list(window),
    )
    return gradients


def limit_compiler_threads(most: int) -> None:
    """Sets the number of threads of the compiler, unless the user has set it.

    Documented: https://docs.pytorch.org/docs/stable/torch.compiler.config.html, which refers to this configuration.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config

        config.compile_threads = most


def compile_graph(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compiles a graph and its backward pass with torch's own compiler.

    Documented: https://docs.pytorch.org/docs/stable/torch.compiler_custom_backends.html
    """
    from torch._dynamo import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("inductor")(graph, list(inputs))
    return compiled


def compile_cpp(source: str) -> ctypes.CDLL:
    """Compiles C++ for this processor, with OpenMP, and loads it. Another process on this machine finds the result.

    Raises RuntimeError or OSError if the compiler fails, or if the result cannot be loaded.
    """
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import invalid_vec_isa

    flags = ("-ffp-contract=fast",)  # torch's own flags do not let multiplications and additions be fused
    # The source needs none of torch's vector classes. Finding out which of them work here would take torch seconds.
    with replaced((codecache, "pick_vec_isa", lambda: invalid_vec_isa)):
        load = codecache.CppCodeCache.load_async(f"{source}// {processor_name()}\n", extra_flags=flags)
        library: ctypes.CDLL = load()
    return library


def missing_for_compiler(on_cpu: bool) -> tuple[str, str]:
    """Returns what is missing for compilation and how to install it; both empty if nothing is missing."""
    if not on_cpu:
        found = find_spec("triton") is not None
        return ("", "") if found else ("triton, which compiles for GPUs, is not installed", "pip install triton")
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch needs a C++ compiler for CPUs, and none is found", "install g++, or name one in CXX"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"{headers} has no Python.h, which compiled code includes", "install python3-dev"
    return "", ""


def record_memory_history() -> None:
    """Lets torch remember each allocation on the GPU with the calls that led to it.

    Documented: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    torch.cuda.memory._record_memory_history()


def write_memory_snapshot(file: Path) -> None:
    """Writes what was remembered, for https://pytorch.org/memory_viz, and ends it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


torch_attention = torch.nn.functional.scaled_dot_product_attention
"""Torch's own function, which `replace_attention` keeps."""


def replace_attention(function: Callable[..., Tensor]) -> None:
    """Replaces `scaled_dot_product_attention` in this process by a function with the same arguments."""
    torch.nn.functional.scaled_dot_product_attention = function
