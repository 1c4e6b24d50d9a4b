"""Rules and engine agree on random plans: legal plans match the plain loop, and refused ones do not.

`tests/plan/campaign.py` runs more of them, with any seed.
"""

from __future__ import annotations

import pytest

from llmtrain.plan.rules import broken
from tests.helpers.plans_on_engine import verdict
from tests.helpers.random_plans import cases
from tests.plan.campaign import disagreement


def _disagreements(seed: int, count: int, worlds: list[int]) -> list[str]:
    return [told for one in cases(seed, count, worlds) if (told := disagreement(one, verdict(one)))]


@pytest.mark.breadth
@pytest.mark.parametrize("seed", range(1, 12))
def test_rules_and_engine_agree_on_drawn_plans(seed):
    assert not (found := _disagreements(seed, 6, [1, 2, 4])), "\n".join(found)


@pytest.mark.breadth
def test_draws_repeat_and_reach_the_rules():
    drawn = cases(3, 300, [1, 2, 4])
    again = cases(3, 300, [1, 2, 4])
    assert [one.told for one in drawn] == [one.told for one in again]
    assert sum(not one.rules for one in drawn) == 150
    reached = {rule for one in drawn for rule in one.rules}
    assert len(reached) >= 20
    for one in drawn:
        assert {problem.rule for problem in broken(one.draft)[0]} == one.rules, one.told
