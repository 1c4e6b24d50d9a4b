"""All questions, in the order in which the page shows them."""

from benchmarks.question import Question, Script
from benchmarks.questions import (
    chats,
    cpu,
    data,
    gpt,
    gpu,
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

QUESTIONS: dict[str, Question | Script] = {
    one.name: one
    for one in (
        wrapper.QUESTION,
        trainer.QUESTION,
        trainer.MIXED,
        litgpt.QUESTION,
        gpt.QUESTION,
        cpu.QUESTION,
        cpu.PRODUCTS,
        cpu.HOST,
        recompute.QUESTION,
        data.QUESTION,
        data.WHOLE,
        chats.TOKENS,
        chats.SFT,
        startup.QUESTION,
        *scripts.PIPELINE,
        schedules.QUESTION,
        scale.QUESTION,
        report.QUESTION,
        *scripts.OTHERS,
        gpu.MFU,
        gpu.WRAPPER,
        gpu.TRAINER,
    )
}
