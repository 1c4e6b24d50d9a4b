"""The page of tokens that fit shows what plans predict."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_shows_the_predictions_of_plans():
    spec = importlib.util.spec_from_file_location("render_tokens", ROOT / "tools/render_tokens.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.PAGE.read_text(encoding="utf-8") == page.render()
