"""Drawn plans on the real engine, as many as one likes: `python tests/plan/campaign.py --seed 3 --count 200`.

Writes a line for each disagreement between rules and engine, and at the end how the plans that each rule
refuses went wrong. `--only SEED:NUMBER` runs one plan again. A plan takes some seconds. Exit 1 where there was a
disagreement.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.helpers.plans_on_engine import verdict
from tests.helpers.random_plans import Case, case, cases

OF_CHOICE = {"layout.tensor_divides"}
"""Rules that refuse what may train right, and say why."""


def disagreement(one: Case, found: str) -> str:
    """Why rules and engine disagree; empty where they agree."""
    if one.rules and not found and not one.rules <= OF_CHOICE:
        return f"{one.told}\n  refused by {', '.join(sorted(one.rules))}, but it trains right"
    if found and not one.rules:
        return f"{one.told}\n  legal, but it {found}"
    return ""


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--worlds", default="1,2,4", help="numbers of ranks")
    options.add_argument("--only", help="SEED:NUMBER of one plan")
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no plan after so long")
    options.add_argument("--json", help="write every verdict, a line each")
    given = options.parse_args()
    worlds = [int(world) for world in given.worlds.split(",")]
    chosen = [case(*map(int, given.only.split(":")), worlds)] if given.only else cases(given.seed, given.count, worlds)
    sys.exit(_run(chosen, given.seconds, given.json))


def _run(chosen: list[Case], seconds: float, path: str | None) -> int:
    started, wrong, legal = time.monotonic(), 0, 0
    ways: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for number, one in enumerate(chosen):
        if time.monotonic() - started > seconds:
            chosen = chosen[:number]
            break
        begun = time.monotonic()
        found = verdict(one)
        taken = time.monotonic() - begun
        told = disagreement(one, found)
        if told:
            wrong += 1
            print(told, flush=True)
        legal += not one.rules
        if one.rules:
            ways[tuple(sorted(one.rules))][found.partition(":")[0] or "right"] += 1
        if path:
            line = {"case": one.told, "rules": sorted(one.rules), "found": found, "seconds": round(taken, 2)}
            with Path(path).open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(f"{len(chosen)} plans, {legal} legal, {wrong} disagreements, {time.monotonic() - started:.0f} s")
    for rules, counts in sorted(ways.items()):
        print(f"  {' + '.join(rules)}: {', '.join(f'{count} {way}' for way, count in counts.most_common())}")
    return int(wrong > 0)


if __name__ == "__main__":
    main()
