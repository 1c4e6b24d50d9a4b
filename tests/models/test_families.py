"""What was tried with the model types of `transformers`: the lists that rules read are those of the pages."""

from __future__ import annotations

import re

import pytest

from llmtrain.plan.facts.families import (
    CONTINUES_FROM_STATES,
    EXPERT_FAMILIES,
    EXPERT_TENSOR_FAMILIES,
    MEGATRON_SP_FAMILIES,
    MIXES_DOCUMENTS,
    MIXING_PARTS,
    SLICED_FAMILIES,
)
from tools import render
from tools.page import ROOT

PAGES = ("families", "families_tensor", "families_sequence", "families_documents", "families_expert")


def notes(page: str, kind: str = r"[\w ]+") -> dict[str, str]:
    """Returns the families of one kind on a page, or all, with their notes."""
    text = (ROOT / f"docs/reference/{page}.md").read_text(encoding="utf-8")
    sections = re.findall(rf"^## ({kind})\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    rows = (row for _, section in sections for row in re.findall(r"^\| (\S+) \| (.*) \|$", section, re.MULTILINE))
    return {family: note for family, note in rows if family != "Family"}


def test_the_lists_are_those_of_the_pages():
    works = notes("families_tensor", "Works")
    assert works.keys() == SLICED_FAMILIES
    assert {family for family, note in works.items() if note.endswith(", slices")} == MEGATRON_SP_FAMILIES
    mixing = {family for family, note in notes("families_documents").items() if "documents influence" in note}
    assert mixing == MIXES_DOCUMENTS
    experts = notes("families_expert", "Works")
    assert experts.keys() == EXPERT_FAMILIES
    assert {family for family, note in experts.items() if note} == EXPERT_TENSOR_FAMILIES
    parts = {family: note.rpartition(" | ")[2] for family, note in notes("families_documents", "Works").items()}
    assert {family for family, names in parts.items() if names} == MIXING_PARTS
    sequences = notes("families_sequence", "Works")
    assert {family for family, note in sequences.items() if note.endswith("handed on")} == CONTINUES_FROM_STATES


@pytest.mark.parametrize("page", PAGES)
def test_no_family_computes_something_else_without_being_refused(page):
    assert len(notes(page)) > 180
    assert notes(page, "Wrong") == {}


@pytest.mark.parametrize(("page", "share"), [("families", 0.95), ("families_tensor", 0.92)])
def test_almost_all_families_can_be_cut_into_stages_and_split(page, share):
    works, refused = (len(notes(page, kind)) for kind in ("Works", "Refused"))
    assert works >= 120
    assert works / (works + refused) >= share


def test_the_experts_of_almost_all_families_can_be_distributed():
    works, refused = (len(notes("families_expert", kind)) for kind in ("Works", "Refused"))
    assert works >= 45
    assert works / (works + refused) >= 0.9


def test_almost_all_families_keep_documents_apart():
    works, refused = (len(notes("families_documents", kind)) for kind in ("Works", "Refused"))
    assert works / (works + refused) >= 0.95


@pytest.mark.breadth
@pytest.mark.parametrize("name", [*PAGES, "families_multimodal"])
def test_a_trial_gives_the_committed_results(name):
    assert [*render.messages([name])] == []
