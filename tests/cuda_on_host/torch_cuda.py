"""`torch.cuda` and NCCL's process group over the device of this folder: what the CPU build of torch leaves out.

`install` replaces each name by `replace`, which fails where torch has it no longer.
"""

from __future__ import annotations

import json
import os
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import _cuda_on_host as device
import torch

GPUS = {
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 163),
    "NVIDIA H100 80GB HBM3": ((9, 0), 132, 227),
    "NVIDIA B200": ((10, 0), 148, 227),
}
"""Compute capability, multiprocessors, and the most shared memory of a block in KiB (CUDA C++ Programming Guide,
technical specifications per compute capability)."""
NAME = os.environ.get("CUDA_ON_HOST_NAME", "NVIDIA H100 80GB HBM3")
CAPABILITY, MULTIPROCESSORS, SHARED_KIB = GPUS.get(NAME, GPUS["NVIDIA H100 80GB HBM3"])


def replace(owner: Any, **values: Any) -> None:
    """Gives `owner` what stands in for these names of its own."""
    for name, value in values.items():
        if not hasattr(owner, name):
            raise RuntimeError(f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}")
        setattr(owner, name, value)


def index(given: Any = None) -> int:
    """The number of a device, given in any of torch's ways."""
    if isinstance(given, int):
        return given
    number = None if given is None else torch.device(given).index
    return device.current_device() if number is None else number


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if "stream_id" in given:
            return super().__new__(cls, **given)
        return super().__new__(cls, device=torch.device("cuda", index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    time_s = 0.0

    def record(self, stream: torch.Stream | None = None) -> None:
        self.time_s = time.perf_counter()
        super().record(current_stream() if stream is None else stream)

    def elapsed_time(self, other: Event) -> float:  # torch.Event's refuses subclasses
        return 1000 * (other.time_s - self.time_s)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)


def stream_of(device: int, number: int) -> Stream:
    return Stream(stream_id=number, device_index=device, device_type=1)


def current_stream(of: Any = None) -> Stream:
    return stream_of(index(of), device.current_stream(index(of)))


class StreamContext:
    """`torch.cuda.stream`."""

    def __init__(self, stream: torch.Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = device.current_device(), device.current_stream(self.stream.device_index)
            if self.before[0] != self.stream.device_index:
                device.set_device(self.stream.device_index)
            device.set_stream(self.stream.device_index, self.stream.stream_id)

    def __exit__(self, *failure: object) -> None:
        if self.stream is not None:
            device.set_stream(self.stream.device_index, self.before[1])
            if self.before[0] != self.stream.device_index:
                device.set_device(self.before[0])


class DeviceContext:
    """`torch.cuda.device`."""

    def __init__(self, given: Any):
        self.index = index(given)

    def __enter__(self) -> None:
        self.before = exchange_device(self.index)

    def __exit__(self, *failure: object) -> None:
        exchange_device(self.before)


class DeviceOf(DeviceContext):
    """`torch.cuda.device_of`."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__(tensor.device if tensor.is_cuda else -1)


def exchange_device(number: int) -> int:
    before = device.current_device()
    if number >= 0 and number != before:
        device.set_device(number)
    return before


def set_device(given: Any) -> None:
    if index(given) >= 0:
        device.set_device(index(given))


def synchronize(given: Any = None) -> None:
    device.device_waits(index(given))


def properties(given: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=device.memory(index(given)),
        multi_processor_count=MULTIPROCESSORS,
        uuid=f"0000-{index(given)}",
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=SHARED_KIB << 10,
        shared_memory_per_multiprocessor=(SHARED_KIB + 1) << 10,
        L2_cache_size=50 << 20,
        gcnArchName="",
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def memory_stats(given: Any = None) -> dict[str, int]:
    now, most = device.allocated(index(given)), device.peak(index(given))
    return {
        "allocated_bytes.all.current": now,
        "allocated_bytes.all.peak": most,
        "reserved_bytes.all.current": now,
        "reserved_bytes.all.peak": most,
        "num_alloc_retries": 0,
    }


def mem_get_info(given: Any = None) -> tuple[int, int]:
    device.make_context(index(given))
    total = device.memory(index(given))
    return total - device.allocated(index(given)), total


def install() -> None:
    """Makes `torch.cuda` usable in this process; before anything else looks at it."""
    cuda = torch.cuda
    generators = tuple(device.default_generator(i) for i in range(device.devices()))

    def nothing(*given: Any) -> None: ...

    def now(given: Any = None) -> int:
        return int(device.allocated(index(given)))

    def most(given: Any = None) -> int:
        return int(device.peak(index(given)))

    def reset(given: Any = None) -> None:
        device.reset_peak(index(given))

    replace(
        cuda,
        Stream=Stream,
        Event=Event,
        StreamContext=StreamContext,
        stream=StreamContext,
        device=DeviceContext,
        device_of=DeviceOf,
        current_stream=current_stream,
        default_stream=lambda given=None: stream_of(index(given), 0),
        set_stream=lambda stream: None if stream is None else device.set_stream(stream.device_index, stream.stream_id),
        _lazy_init=nothing,
        init=nothing,
        is_initialized=lambda: True,
        is_available=lambda: True,
        _is_compiled=lambda: True,
        _is_in_bad_fork=lambda: False,
        is_current_stream_capturing=lambda: False,
        device_count=device.devices,
        current_device=device.current_device,
        set_device=set_device,
        synchronize=synchronize,
        _exchange_device=exchange_device,
        _maybe_exchange_device=lambda number: exchange_device(number),
        get_device_capability=lambda given=None: CAPABILITY,
        get_device_name=lambda given=None: NAME,
        get_device_properties=properties,
        is_bf16_supported=lambda including_emulation=True: True,
        memory_allocated=now,
        max_memory_allocated=most,
        memory_reserved=now,
        max_memory_reserved=most,
        reset_peak_memory_stats=reset,
        reset_max_memory_allocated=reset,
        memory_stats=memory_stats,
        mem_get_info=mem_get_info,
        empty_cache=nothing,
        ipc_collect=nothing,
        default_generators=generators,
    )
    replace(cuda.streams, Stream=Stream, Event=Event)
    replace(
        cuda.nvtx,
        _nvtx=types.SimpleNamespace(
            rangePushA=lambda m: 0, rangePop=lambda: 0, rangeStartA=lambda m: 0, rangeEnd=nothing, markA=nothing
        ),
    )
    replace(cuda.nccl, version=lambda: (2, 28, 9), is_available=lambda tensors: False)
    for module in (cuda.random, cuda.memory):
        replace(
            module,
            **{name: getattr(cuda, name) for name in vars(module) if not name.startswith("_") and name in vars(cuda)},
        )
    replace(torch.version, cuda="13.0")
    # Names that only a build with CUDA has. They are separate functions, because Dynamo treats them differently.
    cuda._get_device_properties = properties
    for name, value in {
        "_cuda_getCurrentRawStream": lambda number: device.current_stream(number),
        "_cuda_getDevice": device.current_device,
        "_cuda_setDevice": device.set_device,
        "_cuda_exchangeDevice": lambda number: exchange_device(number),
        "_cuda_maybeExchangeDevice": lambda number: exchange_device(number),
        "_broadcast_coalesced": lambda tensors, to, size: [_on(tensors, i) for i in to],
        "_scatter": _scatter,
        "_gather": lambda tensors, dim, to: torch.cat(_on(tensors, index(to)), dim),
    }.items():
        setattr(torch._C, name, value)
    _install_storage()
    _install_operations()
    _install_nccl()
    for fault in json.loads(os.environ.get("CUDA_ON_HOST_FAULTS", "[]")):
        (device.set_memory if "bytes" in fault else device.plant)(**fault)


def _on(tensors: Iterable[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [t if t.device.index == number else t.to(torch.device("cuda", number)) for t in tensors]


def _scatter(
    tensor: torch.Tensor, to: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Sequence[Any] | None
) -> list[torch.Tensor]:
    chunks = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(to), dim)
    made = []
    for number, chunk, stream in zip(to, chunks, streams or [None] * len(to), strict=False):
        with StreamContext(stream):
            made.append(chunk.to(torch.device("cuda", number), non_blocking=True))
    return made


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _install_storage() -> None:
    """Methods of storages, which do not go through the dispatcher."""
    storage = torch.UntypedStorage

    def on_device(own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *a, **k: (other if self.device.type == "cuda" else own)(self, *a, **k)

    def resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        device.resize_storage(_bytes(self), size)
        return self

    own_to = storage.to

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        device = torch.device(device)
        if device.type != "cuda":
            return own_to(self, device=device, non_blocking=non_blocking)
        return _bytes(self).to(device).untyped_storage()

    replace(
        storage,
        clone=on_device(storage.clone, lambda self: _bytes(self).clone().untyped_storage()),
        resize_=on_device(storage.resize_, resize),
        to=to,
    )


def _install_operations() -> None:
    """Operations that the CPU has not."""
    global _library
    _library = torch.library.Library("aten", "IMPL")

    def addmm(
        bias: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        out_dtype: torch.dtype,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> torch.Tensor:
        return torch.addmm(bias.to(out_dtype), a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha)

    def histc(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        edges = ((values.float() - min) * bins / (max - min)).long().clamp(0, bins - 1)
        inside = ((values >= min) & (values <= max)).to(values.dtype)
        return torch.zeros(bins, dtype=values.dtype, device=values.device).scatter_add_(
            0, edges.flatten(), inside.flatten()
        )

    _install_attention(_library)
    _install_convolution()
    _library.impl("addmm.dtype", addmm, "CUDA")
    _library.impl("addmm.dtype_out", lambda *a, out, **k: out.copy_(addmm(*a, **k)), "CUDA")
    _library.impl("mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CUDA")
    _library.impl("histc", histc, "CUDA")


def _install_convolution() -> None:
    """Convolutions of each channel by itself, for which torch has a kernel of its own on CUDA."""
    own = torch.nn.functional.conv1d

    def conv1d(
        given: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        steps = [one[0] if isinstance(one, tuple) else one for one in (stride, padding, dilation)]
        channels = given.size(1)
        if not (given.is_cuda and groups == channels == len(weight) and groups > 1 and steps[::2] == [1, 1]):
            return own(given, weight, bias, stride, padding, dilation, groups)
        padded = torch.nn.functional.pad(given, (steps[1], steps[1]))
        size = padded.size(-1) - weight.size(-1) + 1
        parts = [padded[..., at : at + size] * weight[:, 0, at, None] for at in range(weight.size(-1))]
        result = torch.stack(parts).sum(0)
        return result if bias is None else result + bias[:, None]

    replace(torch.nn.functional, conv1d=conv1d)


def _install_attention(library: torch.library.Library) -> None:
    """CUDA's fused kernels of attention, by that of CPUs, which keeps the same: output and log-sum-exp.

    They are called with tensors of the host, so what they allocate themselves is not counted, as workspaces are not.
    """
    names = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
    cpu, backward = (getattr(torch.ops.aten, name) for name in names)

    def shared(keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return keys.repeat_interleave(query.size(1) // keys.size(1), 1)

    def summed(gradient: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return gradient.unflatten(1, (keys.size(1), -1)).sum(2)

    def seeds() -> list[torch.Tensor]:
        return [torch.empty((), dtype=torch.int64) for _ in range(2)]

    def efficient(
        q: Any, k: Any, v: Any, bias: Any, _: bool, dropout: Any = 0, causal: Any = False, **scale: Any
    ) -> Any:
        return *cpu(q, k, v, dropout, causal, attn_mask=bias, **scale), *seeds()

    def efficient_backward(
        gradient: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, sums: Any, *more: Any, **scale: Any
    ) -> Any:
        dropout, causal = more[2], more[4] if len(more) > 4 else False
        mask = bias if bias is not None and bias.numel() else None
        found = backward(gradient, q, k, v, out, sums, dropout, causal, attn_mask=mask, **scale)
        return *found, torch.empty(0)

    def flash(q: Any, k: Any, v: Any, dropout: Any = 0, causal: Any = False, _: bool = False, **scale: Any) -> Any:
        found, nothing = cpu(q, shared(k, q), shared(v, q), dropout, causal, **scale), torch.empty(0, dtype=torch.int32)
        return *found, nothing, nothing.clone(), q.size(2), k.size(2), *seeds(), torch.empty(0)

    def flash_backward(gradient: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *more: Any, **scale: Any) -> Any:
        of_q, of_k, of_v = backward(gradient, q, shared(k, q), shared(v, q), out, sums, *more[4:6], **scale)
        return of_q, summed(of_k, k), summed(of_v, v)

    for name, kernels in {"efficient": (efficient, efficient_backward), "flash": (flash, flash_backward)}.items():
        for suffix, kernel in zip(("", "_backward"), kernels, strict=True):
            library.impl(f"_scaled_dot_product_{name}_attention{suffix}", kernel, "CPU")


class Options:
    """`ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.split_from: Any = None
        self.split_color: int | None = None
        self.config = types.SimpleNamespace()
        self.group_name = ""
        self.global_ranks_in_group: Sequence[int] = ()
        self._timeout: Any = None


class _IsNCCL(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, device.HostNCCL)


class ProcessGroupNCCL(metaclass=_IsNCCL):
    """Makes a group over gloo that keeps NCCL's rules."""

    Options = Options

    def __new__(cls, store: Any, rank: int, size: int, options: Options) -> Any:
        gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        ranks = list(options.global_ranks_in_group) or list(range(size))
        made = device.HostNCCL(store, gloo, rank, size, options.group_name, ranks)
        if options.split_from is not None:  # all ranks of the parent take part
            options.split_from.split()
        return made


def _install_nccl() -> None:
    import torch.distributed as dist
    import torch.distributed.device_mesh as mesh
    import torch.distributed.distributed_c10d as c10d

    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: Any = None,
        **_: Any,
    ) -> Any:
        own = None
        for ranks in split_ranks:
            ranks = [dist.get_global_rank(parent_pg, r) if parent_pg else r for r in ranks]
            made = dist.new_group(ranks, timeout=timeout, group_desc=group_desc)
            own = made if dist.get_rank() in ranks else own
        return own

    for module in (dist, c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # which a build without CUDA has not
        replace(module, is_nccl_available=lambda: True, split_group=split_group)
    replace(c10d, _NCCL_AVAILABLE=True)
    replace(mesh, split_group=split_group)
