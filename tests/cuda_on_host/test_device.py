"""The faults that the emulated device detects: faulty programs are refused, and correct ones pass."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from llmtrain.system.host import bound_pinned_memory

pytestmark = pytest.mark.slow


def on_gpu(rank: int, fault: str) -> object:
    """One program of one rank, with its fault or without."""
    name, _, planted = fault.partition("/")
    return globals()[f"_{name}"](bool(planted))


FAULTS = {
    "mixed": "Expected all tensors to be on the same device",
    "read_early": "reads memory that .* on stream .* writes, and nothing makes it wait",
    "written_early": "writes memory that .* on the default stream of cuda:0 reads",
    "allocated_elsewhere": "its allocation",
    "freed_early": "freed without record_stream",
    "copy_to_host": "nan",
    "copy_from_host": "pinned memory was overwritten",
    "hidden_wait": "the host waits for the device: aten::_local_scalar_dense",
    "foreign_context": r"made contexts on the devices \[0, 1\]",
    "thread_on_device_0": r"made contexts on the devices \[0, 1\]",
}


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "thread_on_device_0"])
def test_a_faulty_program_is_detected_and_a_correct_one_passes(gpus, name):
    gpus(1, on_gpu, name)
    with pytest.raises(AssertionError, match=FAULTS[name]):
        gpus(1, on_gpu, f"{name}/planted")


def _mixed(planted):
    torch.ones(3, device="cuda") + torch.ones(3, device="cpu" if planted else "cuda")


def _side():
    return torch.cuda.Stream()


def _read_early(planted):
    side, ones = _side(), torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = ones * 2
    if not planted:
        torch.cuda.current_stream().wait_stream(side)
        doubled.record_stream(torch.cuda.current_stream())
    assert doubled.sum().item() == 16


def _written_early(planted):
    side, ones = _side(), torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    ones.sum()
    if not planted:
        side.wait_event(torch.cuda.current_stream().record_event())
    with torch.cuda.stream(side):
        ones.mul_(2)
    ones.record_stream(side)
    torch.cuda.synchronize()


def _allocated_elsewhere(planted):
    side, ones = _side(), torch.ones(8, device="cuda")
    fresh = torch.empty(8, device="cuda")
    with torch.cuda.stream(side):
        if not planted:
            side.wait_stream(torch.cuda.default_stream())
        fresh.zero_()
    torch.cuda.synchronize()
    del ones


def _freed_early(planted):
    side, ones = _side(), torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ones.sum()
    if not planted:
        ones.record_stream(side)
    del ones
    torch.zeros(8, device="cuda")


def _copy_to_host(planted):
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if not planted:
        event.synchronize()
    assert pinned.sum() == 4, pinned


def _copy_from_host(planted):
    pinned = torch.ones(4, pin_memory=True)
    there = pinned.to("cuda", non_blocking=True)
    if not planted:
        torch.cuda.current_stream().synchronize()
    pinned.zero_()
    assert there.sum().item() == 4


def _hidden_wait(planted):
    import _cuda_on_host as device

    ones = torch.ones(4, device="cuda")
    device.forbid_waits(True)
    total = ones.sum() * 2
    if planted:
        total.item()
    device.forbid_waits(False)


def _foreign_context(planted):
    torch.ones(1, device="cuda:1" if planted else "cuda")


def on_gpu_1(rank: int, planted: bool) -> None:
    """A thread starts on device 0, whatever the device of the thread that started it."""
    event = torch.cuda.Event()
    event.record()

    def wait() -> None:
        if not planted:
            torch.cuda.set_device(rank)
        event.synchronize()

    if rank == 1:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()


def test_a_wait_on_the_device_of_another_rank_is_detected(gpus):
    gpus(2, on_gpu_1, False)
    with pytest.raises(AssertionError, match=FAULTS["thread_on_device_0"]):
        gpus(2, on_gpu_1, True)


def memory(rank: int) -> tuple[int, int, int]:
    from _cuda_on_host import pinned_bytes

    kept = torch.zeros(1000, device="cuda")
    torch.zeros(3000, device="cuda").add_(1)
    torch.empty(5000, dtype=torch.uint8, pin_memory=True)
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), pinned_bytes() + 0 * kept.numel()


def test_memory_is_counted_to_the_byte(gpus):
    assert gpus(1, memory) == [(4000, 16000, 8192)]


def large_and_pinned(rank: int) -> list[int]:
    from _cuda_on_host import pinned_bytes

    environment: dict[str, str] = {}
    bound_pinned_memory(environment)
    size, found = 65 << 20, []
    for settings in ("", environment["PYTORCH_ALLOC_CONF"]):
        torch._C._accelerator_setAllocatorSettings(settings)
        before = pinned_bytes()
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found.append(pinned_bytes() - before)
    return found


def test_large_pinned_memory_has_its_own_size(gpus):
    """By torch's own reading of the setting."""
    assert gpus(1, large_and_pinned) == [[128 << 20, 65 << 20]]


def too_much(rank: int) -> list[str]:
    """What is said of an allocation on a device that is too small for it, and of one that fits after all."""
    from _cuda_on_host import set_memory

    set_memory(rank, 10_000)
    kept, said = torch.zeros(1000, device="cuda"), []
    for size in (2000, 1000):
        try:
            torch.zeros(size, device="cuda")
        except torch.OutOfMemoryError as error:
            said.append(str(error))
    assert torch.cuda.mem_get_info() == (10_000 - kept.nbytes, 10_000)
    return said


def test_an_out_of_memory_error_lists_the_allocations(gpus):
    ((said,),) = gpus(1, too_much)
    assert "Tried to allocate 8000 bytes" in said
    assert "1 × 4000 of aten::" in said


def suffers(rank: int) -> list[bool]:
    """Whether products are right, without a planted fault and with it."""
    from _cuda_on_host import plant

    ones, found = torch.ones(8, 8, device="cuda"), []
    for is_wrong in (False, True):
        plant(1, "aten::mm", is_wrong=is_wrong)
        found.append(bool(((ones @ ones) == 8).all()))
    return found


def test_a_fault_is_planted_on_one_device(gpus):
    assert gpus(2, suffers) == [[True, True], [True, False]]


def draws(rank: int) -> list[bool]:
    torch.manual_seed(1)
    state, first = torch.cuda.get_rng_state(), torch.rand(5, device="cuda")
    drops = torch.nn.functional.dropout(torch.ones(99, device="cuda"))
    host = torch.rand(5)
    torch.cuda.set_rng_state(state)
    again = torch.rand(5, device="cuda")
    drops_again = torch.nn.functional.dropout(torch.ones(99, device="cuda"))
    torch.manual_seed(1)
    host_again = torch.rand(5)
    own = torch.rand(5, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return [torch.equal(*pair) for pair in ((first, again), (drops, drops_again), (host, host_again), (first, own))]


def test_the_device_has_its_own_random_generator(gpus):
    assert gpus(1, draws) == [[True] * 4]


def timed(rank: int) -> float:
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    second.synchronize()
    return first.elapsed_time(second)


def test_events_measure_the_time_between_them(gpus):
    assert gpus(1, timed)[0] > 0


# ---- communicators


def on_two(rank: int, name: str, planted: bool) -> None:
    getattr(sys.modules[__name__], f"_two_{name}")(rank, planted)


GROUP_FAULTS = {
    "host_tensor": "No backend type associated with device type cpu",
    "strided": "tensors must be contiguous",
    "other_device": "this rank's device is",
    "read_before_wait": "race: .* reads memory that all_reduce",
    "sizes": "NCCL would hang or mix up data",
    "order_of_two_groups": "deadlock",
    "order_of_two_groups_async": "all ranks must launch the operations of two communicators in one order",
    "send_without_receive": r"(?s)deadlock of communicators.*rank 0 waits in send.*rank 1 waits in barrier",
    "two_sends": "rank . does send of 4 Float, and rank . does send of 4 Float",
    "end_without_receive": r"(?s)deadlock of communicators.*rank 1 has ended",
}


@pytest.mark.parametrize("name", GROUP_FAULTS)
def test_a_faulty_program_of_two_ranks_is_detected_and_a_correct_one_passes(gpus, name):
    gpus(2, on_two, name, False)
    with pytest.raises(AssertionError, match=GROUP_FAULTS[name]):
        gpus(2, on_two, name, True, timeout=30)


def _ones() -> torch.Tensor:
    return torch.ones(4, device="cuda")


def _two_host_tensor(rank, planted):
    group = torch.distributed.new_group(backend="nccl")
    torch.distributed.all_reduce(torch.ones(4, device="cpu" if planted else "cuda"), group=group)


def _two_strided(rank, planted):
    torch.distributed.all_reduce(torch.ones(4, 4, device="cuda")[:, ::2] if planted else _ones())


def _two_other_device(rank, planted):
    torch.distributed.all_reduce(torch.ones(4, device="cuda:0") if planted else _ones())


def _two_read_before_wait(rank, planted):
    ones = _ones()
    work = torch.distributed.all_reduce(ones, async_op=True)
    if not planted:
        work.wait()
    total = ones.sum()
    work.wait()
    assert total.item() == 8


def _two_sizes(rank, planted):
    torch.distributed.all_reduce(torch.ones(4 + (rank if planted else 0), device="cuda"))


def _two_groups():
    return [torch.distributed.new_group([0, 1]) for _ in range(2)]


def _two_order_of_two_groups(rank, planted):
    groups = _two_groups()
    for group in reversed(groups) if planted and rank else groups:
        torch.distributed.all_reduce(_ones(), group=group)


def _two_order_of_two_groups_async(rank, planted):
    groups = _two_groups()
    ordered = reversed(groups) if planted and rank else groups
    works = [torch.distributed.all_reduce(_ones(), group=group, async_op=True) for group in ordered]
    for work in works:
        work.wait()


def _two_send_without_receive(rank, planted):
    if rank == 0:
        torch.distributed.send(_ones(), 1)
    elif not planted:
        torch.distributed.recv(_ones(), 0)
    torch.distributed.barrier()


def _two_two_sends(rank, planted):
    other = 1 - rank
    calls = [torch.distributed.send, torch.distributed.recv]
    for call in calls if rank == 0 or planted else reversed(calls):
        call(_ones(), other)


def _two_end_without_receive(rank, planted):
    if rank == 0:
        torch.distributed.isend(_ones(), 1)
    elif not planted:
        torch.distributed.recv(_ones(), 0)


def exchange(rank: int) -> list[float]:
    """Sends and receives of one batch have no order among them."""
    got, other = torch.empty(4, device="cuda"), 1 - rank
    sent = torch.distributed.P2POp(torch.distributed.isend, _ones() * rank, other)
    received = torch.distributed.P2POp(torch.distributed.irecv, got, other)
    for work in torch.distributed.batch_isend_irecv([sent, received]):
        work.wait()
    mean = _ones() * rank
    torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
    return [got.sum().item(), mean.sum().item()]


def test_a_batch_of_sends_and_receives_and_a_mean(gpus):
    assert gpus(2, exchange) == [[4.0, 2.0], [0.0, 2.0]]


def split(rank: int) -> float:
    """Groups of the bound device are split from the world: all ranks take part."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    ones = _ones()
    torch.distributed.all_reduce(ones, group=groups[rank // 2])
    return ones.sum().item()


def test_groups_are_split_from_the_world(gpus):
    assert gpus(4, split) == [8.0] * 4
