"""After a kill at any moment, `latest` names a complete checkpoint: the previous or the new one."""

from __future__ import annotations

import pytest

from tests.helpers import killing


@pytest.mark.parametrize(
    ("kind", "taken_back"),
    [("kill", False), ("kill", True), ("half", False)],
    ids=["call", "taken back", "half a write"],
)
def test_a_kill_at_any_call_of_a_save_loses_only_that_save(kind, taken_back, quick_disk):
    killing.at_every_call(quick_disk, kind, taken_back, every=4, seed=1)


def test_a_full_disk_at_any_call_of_a_save_is_reported(quick_disk):
    assert killing.full_at_every_call(quick_disk, every=3) > 8


def test_a_kill_at_any_moment_loses_only_the_current_save(quick_disk):
    killing.at_random_instants(quick_disk / "checkpoints", kills=15, seed=2)


@pytest.mark.parametrize(("ranks", "kills"), [(2, 4), (4, 2)])
def test_a_killed_rank_aborts_the_save_of_all_ranks(ranks, kills, quick_disk):
    killing.of_ranks(quick_disk, ranks, kills, seed=3)


@pytest.mark.breadth
def test_a_hundred_kills(quick_disk):
    kills = sum(
        killing.at_every_call(quick_disk / f"{kind}-{back}", kind, back)
        for kind in ("kill", "half")
        for back in (False, True)
    )
    kills += killing.at_random_instants(quick_disk / "random" / "checkpoints", 30, seed=5)
    for ranks, count in ((2, 6), (4, 4)):
        kills += killing.of_ranks(quick_disk / f"ranks{ranks}", ranks, count, seed=6)
        kills += killing.of_ranks(quick_disk / f"zero{ranks}", ranks, count // 2, seed=7, real=True)
    print(f"{kills} kills")
    assert kills >= 100
