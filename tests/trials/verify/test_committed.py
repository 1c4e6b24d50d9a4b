"""docs/guides/verify.md quotes the committed certificate correctly."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_documentation_quotes_the_certificate():
    certificate = json.loads((ROOT / "benchmarks/results/verify_tiny.json").read_text())
    plans = certificate["plans"]
    certified = sum(plan["certified"] for plan in plans)
    most = [f"{max(plan['max_deviation'][name] for plan in plans):.1e}" for name in ("loss", "grad_norm", "weights")]
    told = " ".join((ROOT / "docs/guides/verify.md").read_text().split())
    assert f"{certified} of {len(plans)} plans certified in {certificate['seconds']:.0f} s" in told
    assert "{} in a loss, {} in a gradient norm and {} in a weight".format(*most) in told
