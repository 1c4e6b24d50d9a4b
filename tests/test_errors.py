"""Errors for people."""

from __future__ import annotations

import pytest

from llmtrain.errors import Problem, RecipeError, format_value
from tests.helpers.commands import llmtrain


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:s3cret@host/x", "https://…@host/x"),
        ("https://s3cret@host:8080", "https://…@host:8080"),
        ("ftp://me:s3cret@1@host?a=b@c", "ftp://…@host?a=b@c"),
        ("https://host/me@x", "https://host/me@x"),
    ],
)
def test_an_error_contains_no_password_of_a_url(url, shown):
    error = RecipeError(Problem("a.rule", f"field {url}", f"there is no '{url}'", f"--set x={url}"))
    assert error.report() == f"error: field {shown}: there is no '{shown}' [a.rule]\n    --set x={shown}"
    assert "s3cret" not in str(error.as_dict())


def test_a_refused_model_is_shown_without_its_password(small_recipe):
    fields = ("architecture=null", "config={}", "pretrained=https://me:s3cret@host/owner/name")
    refused = llmtrain("plan", small_recipe, *(f"--set=model.{one}" for one in fields))
    assert refused.returncode == 2
    assert "https://…@host" in refused.stderr
    assert "s3cret" not in refused.stdout + refused.stderr


@pytest.mark.parametrize(("value", "text"), [(1e-5 / 10, "1e-06"), (0.1 + 0.2, "0.3"), (5e-4, "0.0005"), (1.0, "1.0")])
def test_floats_are_shown_without_the_digits_of_their_rounding(value, text):
    assert format_value(value) == text
