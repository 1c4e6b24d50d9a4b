"""Compares losses of translated settings with those that axolotl and LLaMA-Factory had (`tests.helpers.originals`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain.plan.migrate.programs import translate
from llmtrain.plan.migrate.translation import Translation
from tests.helpers.originals import LOSSES, STEPS, configurations, write_inputs
from tests.helpers.trained_recipes import losses_of

RECORDED = json.loads(LOSSES.read_text())
EQUAL = [
    *(("axolotl", name) for name in ("chats", "questions", "adapter", "pairs")),
    *(("llama_factory", name) for name in ("chats", "adapter", "pairs", "accumulated")),
]
DIFFERENT = {
    ("axolotl", "accumulated"): "axolotl takes the mean of each micro-batch",
    ("llama_factory", "newline"): "LLaMA-Factory trains it",
}
"""Cases whose losses differ → what a line says of it."""
TOLERANCE = 2e-6
"""Relative. A loss is a mean of some hundred logarithms in fp32. Kernels add these in other orders, which changes it by
some 2⁻²⁴ of its size for each of the few dozen operations on the way."""


def translated(program: str, name: str, folder: Path) -> Translation:
    path = folder / f"{program}_{name}.yaml"
    path.write_text(json.dumps(configurations(program, folder)[name]))
    return translate([path], devices=1)


@pytest.mark.slow
def test_losses_are_those_of_the_originals(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    made = {case: translated(*case, tmp_path) for case in (*EQUAL, *DIFFERENT)}
    recipes = {
        "/".join(case): one.check().with_(**{"data.cache_dir": str(tmp_path / "cache")}) for case, one in made.items()
    }
    ours = losses_of(recipes, STEPS)
    deviations = {}
    for program, name in made:
        theirs = RECORDED[program]["losses"][name]
        pairs = zip(ours[f"{program}/{name}"], theirs, strict=True)
        deviations[program, name] = max(abs(one - other) / other for one, other in pairs)
    assert {case for case, deviation in deviations.items() if deviation > TOLERANCE} == set(DIFFERENT), deviations
    for case, said in DIFFERENT.items():
        assert deviations[case] > 10 * TOLERANCE
        assert any(said in line.text for line in made[case].of("different"))
