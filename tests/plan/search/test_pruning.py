"""The search, which skips and shares what it can, finds what an exhaustive search finds, to the last bit."""

from __future__ import annotations

import pytest

from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict import MemoryCache, Shortage, memory_of, memory_shortage
from llmtrain.plan.predict.parts import readable
from llmtrain.plan.predict.time import TimeBound, predict
from llmtrain.plan.rules import assemble
from llmtrain.plan.search import search
from llmtrain.plan.search.search import MAX_BEST, MAX_SLOWER, legal_layouts, search_plans, timed_plans
from llmtrain.plan.search.variants import DEGREES, MICRO_BATCH, SCHEDULE, ZERO_STAGE, changed
from llmtrain.recipe.cluster import DEVICES, Cluster
from tests.helpers.legal_plans import legal_plans
from tests.helpers.random_plans import cases


def _case(name: str, devices: int, device: str, gib: int, marks=(), **fields: object):
    """A recipe on two nodes whose devices have so little memory that many plans do not fit."""
    recipe = load_recipe(f"recipes/{name}", [])[0].with_(
        **{key.replace("__", "."): value for key, value in fields.items()}
    )
    small = DEVICES[device].model_copy(update={"memory_bytes": gib * 2**30})
    cluster = Cluster(nodes=2, devices_per_node=devices // 2, device=device, own_devices=[small])
    return pytest.param(
        recipe, cluster, marks=marks, id=f"{name}-{devices}-{gib}-{'-'.join(map(str, fields.values()))}"
    )


BATCH = {"batch__global_batch_size": 8, "batch__micro_batch_size": 1}
ODD = {"batch__global_batch_size": 24, "batch__micro_batch_size": 1}
CASES = [
    _case("llama_1b.py", 4, "h100", 12, kernels="auto", **BATCH),  # with every schedule
    _case("qwen3_30b_a3b.py", 4, "h200", 141, **BATCH),
    _case(
        *("llama3_8b.py", 4, "h100", 50),
        parallel__activation_checkpointing="full",
        parallel__checkpoint_every=3,
        parallel__offload_activations=True,
        **BATCH,
    ),
    *(
        _case(*sizes, **fields, **ODD, marks=pytest.mark.breadth)
        for sizes, fields in (
            (("llama_1b.py", 8, "a100", 12), {"kernels": "auto"}),
            (("llama3_8b.py", 6, "h200", 40), {}),
            (("llama3_8b.py", 4, "h100", 60), {"optim__name": "adafactor"}),
            (("llama_1b.py", 4, "h100", 10), {"optim__name": "adamw_8bit", "data__sequence_length": 512}),
            (("gpt2_124m.py", 4, "a100", 3), {"kernels": "auto", "parallel__precision": "autocast_bf16"}),
        )
    ),
]


def _exhaustive(recipe, cluster, facts):
    """Every plan with its time, the fastest first."""
    plans = [(predict(assemble(draft)), fields, draft) for fields, draft in legal_plans(recipe, cluster, facts)]
    return sorted(plans, key=lambda plan: -plan[0].tokens_per_second)


def _as_summed(plan) -> Shortage | None:
    """The shortage according to the memory of all stages."""
    memory = memory_of(plan)
    size = memory.needed - memory.capacity
    where = f" on stage {memory.fullest}" if plan.stages else ""
    return None if memory.fits else Shortage(size, f"does not fit by {readable(size)}{where}")


def _shown(timed, cache):
    """The times of the best, slower and too large plans; the latter with what they lack."""
    best, slower, too_large = [], [], []
    for time, fields, draft in timed:
        kind = (fields[ZERO_STAGE], *(fields[field] == 1 for field in DEGREES))
        alike = tuple(fields[field] for field in (*DEGREES, *SCHEDULE, ZERO_STAGE, MICRO_BATCH))
        if len(best) < MAX_BEST and any(alike == one[2] for one in best):
            continue
        if len(best) == MAX_BEST and any(kind == one[1] for one in (*best, *slower)):
            continue
        shortage = memory_shortage(assemble(draft), cache)
        if shortage and not best:
            too_large.append((shortage, kind, time))
        elif not shortage:
            (best if len(best) < MAX_BEST else slower).append((time, kind, alike))
    nearest = {}
    for shortage, kind, time in sorted(too_large, key=lambda miss: miss[0].size):
        nearest.setdefault(kind, (time, shortage.text))
    times = [[time for time, *_ in some] for some in (best, slower[:MAX_SLOWER])]
    return *times, list(nearest.values())[: search.MAX_TOO_LARGE]


@pytest.mark.parametrize(("recipe", "cluster"), CASES)
def test_the_search_finds_what_an_exhaustive_one_finds(recipe, cluster):
    facts, cache = model_facts(recipe.model, recipe.vocab_size), MemoryCache()
    expected = _exhaustive(recipe, cluster, facts)
    found = list(timed_plans(legal_layouts(recipe, cluster, facts), lambda fields, draft: False))
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert [draft.recipe for *_, draft in found] == [draft.recipe for *_, draft in expected]

    every = [memory_shortage(assemble(draft), cache) for *_, draft in expected]  # all of them share what they may
    assert any(every)
    assert not all(every)
    for (time, fields, draft), shortage in list(zip(expected, every, strict=True))[:: max(1, len(every) // 100)]:
        smallest = TimeBound.of(assemble(search._with_micro_batch(draft, 1)))
        assert 0 < smallest.step_s(fields[MICRO_BATCH], draft.accumulation) < time.step_s
        summed = _as_summed(assemble(draft))
        assert (shortage and (shortage.size, shortage.text)) == (summed and (summed.size, summed.text))

    result = search_plans(recipe, cluster, lambda plan: memory_shortage(plan, cache))
    best, slower, too_large = _shown(expected, cache)
    assert result.legal == len(expected)
    assert [one.time for one in result.best] == best
    assert [one.time for one in result.slower] == slower
    assert [(one.time, one.why) for one in result.too_large] == too_large


def test_rules_that_are_asked_once_do_not_depend_on_what_varies():
    """Micro-batches vary within a layout, recomputation as well; micro-batches also with what is offloaded."""
    changes = [{MICRO_BATCH: 3}, {"parallel.checkpoint_every": 4}, {"parallel.offload_activations": True}]
    changes += [{"parallel.activation_checkpointing": kind} for kind in ("none", "selective", "full")]
    places = [{"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"}, {"parallel.zero_stage": 3}]
    checked = [
        (search.LAYOUT_RULES, changes),
        (search.MICRO_BATCH_RULES, [*changes[1:], places[0]]),
        (search.RECOMPUTATION_RULES, [changes[0], *places]),
    ]
    refused = set()
    for case in cases(3, 20, [1, 2, 4]):
        draft = case.draft
        for rules, fields in ((rules, fields) for rules, varied in checked for fields in varied):
            other = Draft(changed(draft.recipe, fields), draft.cluster, draft.facts)
            for rule in rules:
                is_refused = rule.refuses and any(rule.faults(draft))
                refused |= {rule.id} if is_refused else set()
                assert is_refused == (rule.refuses and any(rule.faults(other))), (rule.id, fields)
    assert len(refused) > 5
