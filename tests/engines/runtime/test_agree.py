"""All ranks run the same code of a user's own."""

from __future__ import annotations

import hashlib
from pathlib import Path

from llmtrain.engines.runtime.agree import check_same_code
from llmtrain.errors import RecipeError
from llmtrain.plan.facts.own_code import OwnCode
from tests.helpers.harness import run_ranks
from tests.helpers.small_plan import small_plan


def _checked(rank: int, folder: str) -> str:
    own = Path(folder, str(rank))
    code = OwnCode(files={"mine.py": hashlib.sha256((own / "mine.py").read_bytes()).hexdigest()})
    plan = small_plan()
    try:
        check_same_code(plan.model_copy(update={"recipe": plan.recipe.with_(code_dir=str(own)), "code": code}))
    except RecipeError as error:
        return str(error)
    return ""


def test_a_rank_with_another_file_is_named(tmp_path):
    for rank, text in enumerate(("A = 1\n", "A = 1\n")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "mine.py").write_text(text)
    assert run_ranks(2, _checked, str(tmp_path)) == ["", ""]
    (tmp_path / "1/mine.py").write_text("A = 2\n")
    for message in run_ranks(2, _checked, str(tmp_path)):
        assert "mine.py: on " in message
        assert "differs from that of rank 0 [code.differs]" in message
