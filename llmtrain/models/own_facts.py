"""The helper process that builds a model of a user's own on the meta device, and tells the facts of it."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.models.own import OwnModel, own_configuration
from llmtrain.plan.facts.model_facts import facts_of
from llmtrain.plan.facts.own_code import identified
from llmtrain.plan.facts.own_model import KnownModel
from llmtrain.recipe import ModelConfig


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of the model of a request, and its files, as JSON. Raises RecipeError."""
    model, folder = ModelConfig(**request["model"]), request["folder"]
    assert model.build is not None
    config = own_configuration(model, request["vocab_size"], folder)
    with torch.device("meta"):
        facts = facts_of(OwnModel(config), model.build)
    known = facts.model_copy(
        update={
            "without_gradient": config.found.without_gradient,
            "dropout": tuple(config.dropout.items()),
            "has_auxiliary_loss": config.found.has_auxiliary_loss,
        }
    )
    code = identified({model.build.partition(":")[0].partition(".")[0]}, folder)
    return {"known": KnownModel(code=code, facts=known).model_dump_json()}
