"""Compares measurements with the catalogue, the predictions and the other devices."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from llmtrain.errors import Problem
from llmtrain.launch.doctor.finding import Finding, fault, listed, ok, warning
from llmtrain.plan import Plan
from llmtrain.plan.predict import memory_of
from llmtrain.plan.predict.assumptions import EAGER
from llmtrain.plan.predict.rates import AchievedRates
from llmtrain.plan.predict.time import predict, unknown
from llmtrain.recipe.cluster import MeasuredRates
from llmtrain.system.quantities import readable_bytes
from llmtrain.trials.self_test.job import DeviceRates
from llmtrain.trials.verify.job import Certificate

TOLERATED = 0.1
"""Relative deviation from a prediction, or from the other devices, up to which there is no warning."""


def measured_by(ranks: Sequence[DeviceRates], device: str) -> MeasuredRates:
    """Returns the slowest value of each rate, because a step waits for the slowest rank.

    device: the device's name in the catalogue.
    """
    return MeasuredRates(
        device=device,
        matmul={name: min(rates.matmul[name] for rates in ranks) for name in ranks[0].matmul},
        attention={name: min(rates.attention[name] for rates in ranks) for name in ranks[0].attention},
        memory_bandwidth=min(rates.memory_bandwidth for rates in ranks),
        launch_s=max(rates.launch_s for rates in ranks),
        host_bandwidth=min(filter(None, (rates.host_bandwidth for rates in ranks)), default=None),
        node_bandwidth=min(filter(None, (rates.node_bandwidth for rates in ranks)), default=None),
    )


def findings(plan: Plan, ranks: Sequence[DeviceRates], measured: MeasuredRates) -> Iterator[Finding]:
    """Yields the findings. plan: the plan of the measured steps, for a node with the catalogue's rates."""
    yield _products_are_right(ranks)
    yield from _devices(plan, ranks)
    yield from _rates(plan, ranks, measured)
    yield from _step(plan, ranks, measured)


def measuring_failed(problem: Problem) -> Finding:
    """Returns the finding for an error that ended the measuring workers."""
    return fault("measure.failed", f"{problem.field}: {problem.message}", problem.fix or "see its log")


def parity(certificate: Certificate) -> Iterator[Finding]:
    """Yields findings on whether plans train like plain PyTorch."""
    check, family = "parity.plans", certificate.recipe.model.architecture
    total = len(certificate.verdicts)
    others = [verdict for verdict in certificate.verdicts if not certificate.certified(verdict)]
    if not others:
        yield ok(check, f"{family}: {total} plans train as plain PyTorch does on one device, save, load and export")
    for verdict in others:
        deviations = ", ".join(
            f"{name} {value:.1e}" for name, value in certificate.max_deviation(verdict).items() if value
        )
        what = (
            f"failed: {verdict.failure}"
            if verdict.failure
            else f"deviates from plain PyTorch: {deviations or 'not finite'}"
        )
        yield fault(check, f"{family}, {verdict.name}: {what}", "do not train with this strategy here; report it")


def _products_are_right(ranks: Sequence[DeviceRates]) -> Finding:
    wrong = [f"rank {rates.rank} ({rates.product}) in {listed(list(rates.wrong))}" for rates in ranks if rates.wrong]
    if wrong:
        text = f"wrong products of integers on {'; '.join(wrong)}"
        return fault("compute.products", text, "the device is faulty: leave it out (CUDA_VISIBLE_DEVICES)")
    return ok("compute.products", "products of integers are exact in every data type on every device")


def _devices(plan: Plan, ranks: Sequence[DeviceRates]) -> Iterator[Finding]:
    """Reports devices with less memory than in the catalogue, or than the other devices."""
    sizes = {rates.rank: rates.memory_bytes for rates in ranks if rates.memory_bytes}
    if not sizes:
        return
    expected = max(plan.cluster.spec.memory_bytes or 0, *sizes.values())
    small = [
        f"rank {rank} has {readable_bytes(have)}" for rank, have in sizes.items() if have < (1 - TOLERATED) * expected
    ]
    if small:
        text = f"{listed(small)} of memory; {readable_bytes(expected)} expected"
        yield warning("devices.memory", text, "describe the device in `cluster()` (own_devices), or leave it out")
    else:
        yield ok("devices.memory", f"{readable_bytes(min(sizes.values()))} of memory on each device")


def _rates(plan: Plan, ranks: Sequence[DeviceRates], measured: MeasuredRates) -> Iterator[Finding]:
    """Compares each rate with the assumed one, and with the rates of the other devices."""
    spec = plan.cluster.spec
    kinds = (("matmul", "compute.", "matrix products"), ("attention", "compute.attention_", "attention"))
    for kind, check, what in kinds:
        for name, rate in getattr(measured, kind).items():
            by_rank = {rates.rank: getattr(rates, kind)[name] for rates in ranks}
            yield _compared(f"{check}{name}", f"{what} in {name}", by_rank, rate, _assumed(plan, name, kind))
    memory = spec.memory_bandwidth and spec.memory_bandwidth * EAGER.memory
    by_rank = {rates.rank: rates.memory_bandwidth for rates in ranks}
    yield _compared("memory.bandwidth", "copies within memory", by_rank, measured.memory_bandwidth, memory, "B/s")
    if measured.host_bandwidth:
        by_rank = {rates.rank: rates.host_bandwidth for rates in ranks if rates.host_bandwidth}
        expected = spec.host_bandwidth and spec.host_bandwidth * EAGER.link
        yield _compared("links.host", "copies to and from the host", by_rank, measured.host_bandwidth, expected, "B/s")
    if measured.node_bandwidth:
        expected = spec.node_bandwidth and spec.node_bandwidth * EAGER.link
        text = f"all-reduce over {len(ranks)} devices"
        yield _compared("links.node", text, {}, measured.node_bandwidth, expected, "B/s")
        yield _pairs(ranks, expected)


def _assumed(plan: Plan, dtype: str, rate: str) -> float | None:
    spec = plan.cluster.spec
    if dtype not in spec.peak_flops or spec.memory_bandwidth is None:
        return None
    value: float = getattr(AchievedRates.of(plan.cluster, dtype, EAGER), rate)
    return value


BUSY = (
    "look for other processes there, and at a GPU's clocks and temperatures: "
    "`nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE`"
)


def _compared(
    check: str, what: str, by_rank: dict[int, float], slowest: float, expected: float | None, unit: str = "FLOP/s"
) -> Finding:
    """Compares the slowest rate with the expected one, and with the median of the devices (`own`, by rank)."""
    text = f"{what}: {_rate(slowest, unit)}"
    if expected:
        text += f", {slowest / expected:.2g} of the assumed {_rate(expected, unit)}"
    median = statistics.median(by_rank.values()) if by_rank else slowest
    late = [f"rank {rank} reaches {rate / median:.2g}" for rank, rate in by_rank.items() if _is_late(rate, median)]
    if late:
        return warning(check, f"{text}; {listed(late)} of the median, {_rate(median, unit)}", BUSY)
    if expected and _is_late(slowest, expected):
        return warning(check, f"{text}: slower", "plans for this machine use the measured rate from now on")
    return ok(check, text)


def _is_late(rate: float, expected: float) -> bool:
    return rate < (1 - TOLERATED) * expected


def _pairs(ranks: Sequence[DeviceRates], expected: float | None) -> Finding:
    """Reports the devices at the ends of slow links. A rank whose links are all slow is reported alone."""
    # Both ends of a link measure the same exchange.
    rates = {
        (rates.rank, other): rate
        for rates in ranks
        for other, rate in enumerate(rates.pair_bandwidth)
        if rate and rates.rank < other
    }
    usual = max(rates.values())
    (first, second), slowest = min(rates.items(), key=lambda item: item[1])
    text = f"between two devices: {_rate(slowest, 'B/s')} at least, between ranks {first} and {second}"
    if expected:
        text += f", {slowest / expected:.2g} of the assumed {_rate(expected, 'B/s')}"
    late = {pair: rate / usual for pair, rate in rates.items() if _is_late(rate, usual)}
    by_rank = {rates.rank: max(rate for rate in rates.pair_bandwidth if rate) / usual for rates in ranks}
    alone = {rank: share for rank, share in by_rank.items() if len(ranks) > 2 and _is_late(share, 1)}
    named = [f"rank {rank} reaches {share:.2g}" for rank, share in alone.items()]
    named += [f"ranks {a} and {b} reach {share:.2g}" for (a, b), share in late.items() if not alone.keys() & {a, b}]
    fix = "look at the link: `nvidia-smi topo -m`, `nvidia-smi nvlink -s`, `dmesg | tail`"
    if named:
        return warning("links.pairs", f"{text}; {listed(named)} of the fastest two, {_rate(usual, 'B/s')}", fix)
    is_slow = bool(expected and _is_late(slowest, expected))
    return warning("links.pairs", f"{text}: slower", fix) if is_slow else ok("links.pairs", text)


def _step(plan: Plan, ranks: Sequence[DeviceRates], measured: MeasuredRates) -> Iterator[Finding]:
    """Compares a real step with the predictions from the datasheet and from the measured rates."""
    took = max(rates.step_s for rates in ranks)
    parallel, precision = plan.parallel, plan.recipe.parallel.precision
    text = f"a step of {plan.model.parameters / 1e6:.0f} M parameters (ZeRO-{parallel.zero_stage}, {precision})"
    text += f" took {_duration(took)}"
    if unknown(plan):
        yield ok("step.time", text)
    else:
        calibrated = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"measured": measured})})
        first, second = predict(plan), predict(calibrated)
        assert first, "nothing is unknown"
        assert second, "nothing is unknown"
        text += f"; {_duration(first.step_s)} predicted by the datasheet, {_duration(second.step_s)} by these rates"
        slow = took > (1 + TOLERATED) * second.step_s
        fix = "the report helps to find out why: attach it to an issue"
        yield warning("step.time", f"{text}: slower", fix) if slow else ok("step.time", text)
    allocated = max((rates.allocated_bytes or 0 for rates in ranks), default=0)
    memory = memory_of(plan)
    if allocated and memory:
        text = f"a step held {readable_bytes(allocated)}; {readable_bytes(memory.allocated)} predicted"
        large = allocated > (1 + TOLERATED) * memory.allocated
        fix = "leave that share of the memory free when you choose a plan, and attach the report to an issue"
        yield warning("step.memory", f"{text}: more", fix) if large else ok("step.memory", text)


def _rate(value: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e6:.3g} M{unit}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
