"""The facts of a model of a user's own, which a helper process builds."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.facts.helper_process import run_helper
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.own_code import OwnCode, cache_path, is_current, write_cache
from llmtrain.recipe import ModelConfig, Part
from llmtrain.system.untrusted import UNREADABLE, read_json

HELPER = "llmtrain.models.own_facts"


class KnownModel(Part):
    """What the helper process has found."""

    code: OwnCode
    facts: ModelFacts


def own_model_facts(model: ModelConfig, vocab_size: int | None, code_dir: str | None) -> ModelFacts:
    """Returns the facts of a user's own model. They are cached until one of the user's files changes.

    Raises RecipeError, with file and line, for code that fails and for a module that is not a language model.
    """
    request: dict[str, Any] = {
        "model": model.model_dump(mode="json", include={"build", "config", "tiny", "parts", "tp_plan"}),
        "vocab_size": vocab_size,
        "folder": code_dir,
    }
    path = cache_path(request)
    try:
        known = read_json(path, KnownModel)
    except UNREADABLE:
        known = None
    if known is None or not is_current(known.code, code_dir):
        document = run_helper(HELPER, request, f"the process that builds {model.build}")
        known = KnownModel.model_validate_json(document["known"])
        write_cache(path, known)
    return known.facts
