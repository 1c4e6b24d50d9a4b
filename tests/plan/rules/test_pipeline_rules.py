"""The rules of pipelines on the real engine: refused plans fail or deviate, and allowed plans train.

Truth is the plain loop; a refused draft is run all the same, past the rules.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmtrain.engines.plain import PlainLoop
from llmtrain.models import build_model
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import DEEPSPEED_RULES, assemble, broken
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, engine_of, plain_run, trace, worst

pytestmark = pytest.mark.slow

STEPS = 5
FP32 = 1e-5  # as in test_parity.py
LOWER = 2**-6  # likewise, of gradient norms

# A large rate, so that wrong weights show in the next steps' norms; SGD, since Adam hides a wrong scale.
SGD = {"optim.name": "sgd", "optim.lr": 0.3}
UNTIED = {"model.config.tie_word_embeddings": False}
UNCLIPPED = {"optim.clip_grad_norm": 0.0}
OFFLOAD = {"parallel.offload_optimizer": "cpu"}

Outcome = tuple[Trace, dict[str, np.ndarray]] | str
"""Of a case on one rank, the run and this stage's copies of the weights; or the error."""


def _of(precision: str, stage: int = 1, **fields: object) -> dict[str, object]:
    return {"parallel.precision": precision, "parallel.zero_stage": stage, **fields}


LIMIT = 0.1
CLIPPED = _of("fp32", 0, **UNTIED, **{"optim.clip_grad_norm": LIMIT})

CASES: list[dict[str, object]] = [
    *(_of("fp32", stage, **UNCLIPPED) for stage in (2, 3)),
    _of("fp32", 0),
    CLIPPED,
    _of("fp32", 0, **UNCLIPPED),
    _of("fp32", 0, **UNCLIPPED, **UNTIED),
    _of("fp32", 1),
    _of("autocast_bf16", 0, **UNCLIPPED),
    _of("autocast_bf16", 1),
    _of("bf16", 1),
    _of("bf16", 1, **OFFLOAD),
    _of("bf16", 1, **OFFLOAD, **UNTIED),
    _of("bf16", 1, **OFFLOAD, **{"parallel.grad_accum_dtype": "bf16"}),
    _of("fp16", 1),
    _of("fp16", 1, **UNTIED),
    # This is the last one: messages that it leaves between the ranks would block another one.
    _of("autocast_fp16", 0, **UNCLIPPED),
]


def _draft(fields: dict[str, object]) -> Draft:
    recipe = tiny_recipe(**{"parallel.pipeline": 2, "batch.micro_batch_size": GLOBAL_BATCH // 4, **SGD, **fields})
    # fp16 on a CPU is refused by another rule, but runs if the engine is told that it is supported.
    return Draft(recipe, Cluster(devices_per_node=2, device="gpu"), model_facts(recipe.model, recipe.vocab_size))


def _run(rank: int, cases: list[dict[str, object]]) -> list[Outcome]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import torch_autocast

    get_accelerator().is_fp16_supported = lambda: True
    results: list[Outcome] = []
    for fields in cases:
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # DeepSpeed keeps it for the life of a process
        torch_autocast.TORCH_AUTOCAST_DTYPE = None
        plan = assemble(_draft(fields))
        try:
            engine = engine_of(plan)
            run = trace(engine, range(STEPS), plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, 0, 1)
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
            continue
        (stage,) = engine.module.stages
        names = stage.hf_names.items()
        results.append((run, {name: stage.get_parameter(own).detach().float().numpy().copy() for own, name in names}))
    return results


def _expected(fields: dict[str, object]) -> Trace:
    recipe = _draft(fields).recipe
    return plain_run(recipe, STEPS)


def _falsified(fields: dict[str, object], ranks: list[Outcome]) -> str:
    """What the engine did otherwise than the plain loop; empty where it did the same."""
    if any(isinstance(result, str) for result in ranks):
        assert len({type(result) for result in ranks}) == 1, ranks
        return str(ranks[0])
    (run, first), (_, last) = ranks
    drift = max((float(np.abs(first[name] - last[name]).max()) for name in first.keys() & last.keys()), default=0.0)
    if drift:
        return f"copies {drift:.1e} apart"
    expected = _expected(fields)
    tolerance = FP32 if fields["parallel.precision"] == "fp32" else LOWER
    apart = max(worst(run.losses, expected.losses), worst(run.grad_norms, expected.grad_norms))
    if apart > tolerance:
        return f"losses and norms off by {apart:.1e}"
    if tolerance == FP32:
        apart = max(float(np.abs(run.weights[name] - value).max()) for name, value in expected.weights.items())
    return f"weights off by {apart:.1e}" if apart > tolerance else ""


@pytest.fixture(scope="module")
def ranks() -> list[list[Outcome]]:
    """What each rank saw of each case."""
    return run_ranks(2, _run, CASES)


@pytest.fixture(scope="module")
def outcomes(ranks) -> list[str]:
    return [_falsified(fields, list(seen)) for fields, *seen in zip(CASES, *ranks, strict=True)]


def test_rules_and_engine_agree(outcomes):
    wrong, tried = [], set()
    for fields, falsified in zip(CASES, outcomes, strict=True):
        refused = {problem.rule for problem in broken(_draft(fields))[0]}
        tried |= refused
        if bool(refused) != bool(falsified):
            wrong.append(f"{fields}: rules {refused or 'let it pass'}, engine: {falsified or 'right'}")
    assert not wrong, "\n".join(wrong)
    rules = (rule for rule in DEEPSPEED_RULES if rule.id.startswith("pipeline."))
    assert tried == {rule.id for rule in rules if rule.evidence == "run"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (_of("fp32", 2, **UNCLIPPED), "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
        (_of("bf16", 1, **OFFLOAD), "copies"),
        (_of("fp16", 1), "copies"),
        (_of("autocast_fp16", 0, **UNCLIPPED), "_scale is None"),
    ],
)
def test_refused_pipelines_fail_or_deviate(outcomes, fields, words):
    assert words in outcomes[CASES.index(fields)]


def _past_the_assertion(rank: int, cases: list[dict[str, object]]) -> list[Outcome]:
    from deepspeed.runtime.pipe import engine
    from deepspeed.runtime.zero.config import ZeroStageEnum

    engine.ZeroStageEnum = SimpleNamespace(gradients=ZeroStageEnum.weights)
    return _run(rank, cases)


def test_zero_2_fails_without_the_assertion_too():
    """At the second micro-batch, because nothing ends the first pass; the other rank waits in vain."""
    outcomes = run_ranks(2, _past_the_assertion, [_of("fp32", 2, **UNCLIPPED)])
    assert any("has already been reduced" in str(outcome) for (outcome,) in outcomes)


def test_at_zero_0_gradients_are_clipped_by_the_norm_of_the_first_stage(ranks):
    recipe = _draft(CLIPPED).recipe.with_(**UNCLIPPED)
    engine = PlainLoop(build_model(recipe, torch.float32, torch.device("cpu")), recipe)
    gradients = {}
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update((name, weight.grad) for name, weight in engine.model.named_parameters())
    )
    whole = engine.train_step(step_batch(0, 1, GLOBAL_BATCH)).grad_norm
    run, first = ranks[0][CASES.index(CLIPPED)]
    stage = torch.nn.utils.get_total_norm([gradients[name] for name in first])
    # The norm is taken before the update, thus after DeepSpeed's clipping, which should have reduced it to the limit.
    assert run.grad_norms[0] == pytest.approx(LIMIT * whole.item() / stage.item(), rel=1e-4)
    assert run.grad_norms[0] > 1.2 * LIMIT
