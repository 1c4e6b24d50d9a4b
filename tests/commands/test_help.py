"""`--help` of a group shows a complete sentence for each of its commands."""

import pytest
from typer.testing import CliRunner

from llmtrain.cli import app


@pytest.mark.parametrize("group", [[], ["checkpoint"], ["recipe"]], ids=lambda group: " ".join(["llmtrain", *group]))
def test_no_sentence_is_cut(group):
    shown = CliRunner().invoke(app, [*group, "--help"]).stdout
    lines = shown.partition("Commands:\n")[2].splitlines()
    assert lines
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []
