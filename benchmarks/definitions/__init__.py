"""All benchmarks, in the order in which the page shows them."""

from benchmarks.benchmark import Benchmark, Script
from benchmarks.definitions import (
    chats,
    cpu,
    data,
    experts,
    gpt,
    litgpt,
    recompute,
    report,
    scale,
    schedules,
    scripts,
    startup,
    trainer,
    wrapper,
)

BENCHMARKS: dict[str, Benchmark | Script] = {
    one.name: one
    for one in (
        scripts.GPU,
        wrapper.BENCHMARK,
        trainer.BENCHMARK,
        trainer.MIXED,
        litgpt.BENCHMARK,
        gpt.BENCHMARK,
        cpu.BENCHMARK,
        cpu.ATTENTION,
        cpu.PRODUCTS,
        cpu.HOST,
        recompute.BENCHMARK,
        data.BENCHMARK,
        data.WHOLE,
        chats.TOKENS,
        chats.SFT,
        startup.BENCHMARK,
        *scripts.PIPELINE,
        experts.BENCHMARK,
        schedules.BENCHMARK,
        scale.BENCHMARK,
        report.BENCHMARK,
        *scripts.OTHERS,
    )
}
