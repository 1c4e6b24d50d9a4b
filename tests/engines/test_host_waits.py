"""Between two logged steps, the host reads no number from a device: it would wait for all queued work.

On CPUs nobody waits, but the questions are the same, so they are counted here: `Tensor.item` and its kin end in one
operator, which a dispatch mode sees.
"""

from __future__ import annotations

import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.plan.ds_config import render
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import MIXTRAL, step_batch, tiny_recipe, with_pairs
from tests.helpers.harness import run_ranks

LOGGED = 4
STEPS = 8
OURS = Path(__file__).parents[2] / "llmtrain"


class Questions(TorchDispatchMode):
    """Who asks for a number of a tensor, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.asked: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        packages = ("deepspeed", "transformers", "accelerate", "llmtrain")
        for frame in reversed(traceback.extract_stack()):
            parts = Path(frame.filename).parts
            found = next((name for name in packages if name in parts), None)
            if found and frame.name not in ("note", "watched"):
                self.asked.append((self.step, f"{found}: {Path(frame.filename).name} {frame.name}"))
                return
        self.asked.append((self.step, "somebody"))

    @contextmanager
    def of_lists(self):
        """`tolist` and `cpu` go past the dispatcher."""
        own = {name: getattr(torch.Tensor, name) for name in ("tolist", "cpu")}

        def counting(name):
            def method(tensor, *arguments, **named):
                self.note()
                return own[name](tensor, *arguments, **named)

            return method

        for name in own:
            setattr(torch.Tensor, name, counting(name))
        try:
            yield
        finally:
            for name, method in own.items():
                setattr(torch.Tensor, name, method)


def _fit(rank, world, fields):
    from llmtrain.checkpoint.state import begin
    from llmtrain.engines import build_engine
    from llmtrain.train.loop import Run, fit

    recipe = tiny_recipe(
        **{"logging.every_steps": LOGGED, "evaluation.every_steps": 0, "checkpoint.every_steps": 0, **fields}
    )
    plan = resolve(recipe, Cluster(devices_per_node=world))
    engine = build_engine(plan, render(plan), torch.device("cpu"))
    micro, accumulation = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps

    batches = [
        step_batch(step, micro, accumulation, engine.data_parallel_rank, plan.data_parallel_size)
        for step in range(STEPS)
    ]
    if recipe.objective.is_preference:
        batches = [with_pairs(batch) for batch in batches]

    questions = Questions()
    run = Run(
        recipe,
        engine,
        data=SimpleNamespace(train_batches=lambda cursor: (batch for batch in batches)),
        saver=SimpleNamespace(start=lambda state: None, wait=lambda: None),
        state=begin(plan, "data"),
        stop_step=STEPS,
        progress=SimpleNamespace(
            advance=lambda step: setattr(questions, "step", step),
            show=lambda record: None,
            busy=lambda what: nullcontext(),
        ),
        stop=SimpleNamespace(should_stop=lambda step: False, stopped_by=None),
        metrics=METRICS if rank == 0 else None,
    )
    with questions, questions.of_lists():
        fit(run)
    return questions.asked


METRICS = SimpleNamespace(step_record=lambda metrics: {}, log=lambda record: None, flush=lambda: None)


def asked(world, **fields):
    """Of the steps after the first two: (whether the step before was logged, who asks) on any rank."""
    found = [one for rank in run_ranks(world, _fit, world, fields) for one in rank]
    return {(step % LOGGED == 0, who) for step, who in found if step >= 2}


LOGGING = {(True, "llmtrain: guard.py read"), (True, "llmtrain: loop.py _record")}


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (1, {"parallel.zero_stage": 0}),
        (2, {"parallel.zero_stage": 1, "parallel.precision": "bf16"}),
        (1, {"parallel.zero_stage": 1, "objective.name": "dpo"}),
        pytest.param(2, {"parallel.zero_stage": 3, "parallel.precision": "bf16"}, marks=pytest.mark.slow),
        *(
            pytest.param(world, fields, marks=pytest.mark.breadth)
            for world, fields in (
                (2, {"parallel.zero_stage": 2, "parallel.precision": "bf16"}),
                (2, {"parallel.zero_stage": 0, "parallel.sequence": 2}),
                (2, {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"}),
                (1, {"parallel.zero_stage": 1, **MIXTRAL}),
            )
        ),
    ],
    ids=lambda value: "-".join(str(one) for one in value.values()) if isinstance(value, dict) else str(value),
)
def test_the_host_reads_from_the_device_only_in_logged_steps(world, fields):
    found = asked(world, **fields)
    of_objective = {(True, "llmtrain: loop.py _metrics")} if "objective.name" in fields else set()
    assert found >= LOGGING
    assert found == LOGGING | of_objective


@pytest.mark.slow
def test_stages_receive_document_boundaries():
    """Their positions come from other stages; `transformers` need not look into them."""
    found = asked(2, **{"parallel.pipeline": 2, "parallel.zero_stage": 1})
    assert not {who for _, who in found if "masking_utils" in who}
