"""The helper process that builds a model of a user's own, and finds out on a tiny copy what it supports."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmtrain.errors import FamilyError, RecipeError
from llmtrain.models.activation_bytes import saved_per_token
from llmtrain.models.chunked import check_chunks
from llmtrain.models.own import OwnConfig, OwnModel, own_configuration
from llmtrain.models.own_parts import check_module
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.documents_check import ALONE, influences
from llmtrain.models.tiny.model import COPY_ERRORS, build_tiny_model, packed_input, relative_deviation
from llmtrain.models.tiny.stages_check import check_cut
from llmtrain.models.tiny.tensor_check import check_tensor_split
from llmtrain.plan.facts.model import ModelFacts, OwnTrials
from llmtrain.plan.facts.model_facts import facts_of
from llmtrain.plan.facts.own_code import identified
from llmtrain.plan.facts.own_model import KnownModel
from llmtrain.plan.stages import stage_bounds
from llmtrain.recipe import ModelConfig, Precision

ALONE_ATTENTION = "tokens_alone"
"""Name of an attention in which each token sees only itself."""
SAME_WIDTHS: dict[Precision, Precision] = {"fp16": "bf16", "autocast_fp16": "autocast_bf16"}
"""Precisions whose tensors take as many bytes as those of another one, which is traced."""
SEQUENCE_LENGTH = 1024
"""Tokens for which the stages of a trial are balanced."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of the model of a request, and its files, as JSON. Raises RecipeError."""
    model, folder = ModelConfig(**request["model"]), request["folder"]
    assert model.build is not None
    config = own_configuration(model, request["vocab_size"], folder)
    check_module(config.origin)
    with torch.device("meta"):
        facts = facts_of(OwnModel(config), model.build)
    traced: set[Precision] = {SAME_WIDTHS.get(each, each) for each in get_args(Precision)}
    saved = {each: saved_per_token(config, model, each) for each in traced}
    known = facts.model_copy(
        update={
            "without_gradient": config.found.without_gradient,
            "dropout": tuple(config.dropout.items()),
            # Without a head of its own, the logits are products with the embedding.
            "tied_embeddings": facts.tied_embeddings or not config.found.head,
            "trials": OwnTrials(
                auxiliary_loss=config.found.has_auxiliary_loss,
                is_random=config.found.is_random,
                documents=_mixed_documents(config),
                sequence=_mixed_tokens(config),
                stages=_refused_stages(config, facts),
                tensor=_refused_split(config),
                chunks=_refused_chunks(config),
                saved=tuple((each, saved[SAME_WIDTHS.get(each, each)]) for each in get_args(Precision)),
            ),
        }
    )
    code = identified({model.build.partition(":")[0].partition(".")[0]}, folder)
    return {"known": KnownModel(code=code, facts=known).model_dump_json()}


def _mixed_documents(config: OwnConfig) -> str:
    """Returns why packed documents influence each other; empty if they do not."""
    try:
        mixes = influences(shrink_configuration(config, LAYERS))
    except COPY_ERRORS as error:
        return f"its tiny copy fails for two documents ({type(error).__name__}: {error})"
    if not mixes:
        return ""
    takes_positions = config.found.takes_positions
    needs = "its attention has to be scaled_dot_product_attention with is_causal=True and without a mask"
    return needs if takes_positions else f"{needs}, and its forward pass has to use an argument position_ids"


@torch.no_grad()
def _mixed_tokens(config: OwnConfig) -> str:
    """Returns why slices of a sequence would compute something else than the whole; empty if they would not.

    Only attention exchanges data between slices. In this trial, it mixes no tokens, so nothing else may do so.
    """
    if config.found.has_auxiliary_loss:
        return "its own loss is computed from all tokens of a micro-batch"
    ALL_ATTENTION_FUNCTIONS.register(ALONE_ATTENTION, _attend_alone)
    with torch.random.fork_rng(devices=[]):
        try:
            model = build_tiny_model(shrink_configuration(config, LAYERS), ALONE_ATTENTION).eval()
            tokens, positions = packed_input(config)
            whole = model(input_ids=tokens, position_ids=positions).logits
            slices = zip(tokens.chunk(2, 1), positions.chunk(2, 1), strict=True)
            parts = [model(input_ids=part, position_ids=places).logits for part, places in slices]
        except COPY_ERRORS as error:
            return f"its tiny copy fails for a slice ({type(error).__name__}: {error})"
    if relative_deviation(torch.cat(parts, 1), whole) <= ALONE:
        return ""
    if not config.found.takes_positions:
        return "its forward pass has no argument position_ids, or something other than attention mixes tokens"
    return "something other than scaled_dot_product_attention with is_causal=True mixes tokens"


def _attend_alone(call: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Has the arguments and the result of an attention function of `transformers`.

    It depends on queries and keys, too, which may have positions.
    """
    key, value = (one.repeat_interleave(call.num_key_value_groups, 1) for one in (key, value))
    output = value * (1 + query.mean(-1, keepdim=True) + 2 * key.mean(-1, keepdim=True))
    return output.transpose(1, 2), None


def _refused_stages(config: OwnConfig, facts: ModelFacts) -> str:
    """Returns why the model cannot be cut into two stages; empty if it can."""
    if facts.layers < 2:
        return "it has no list of layers that run one after the other"
    try:
        check_cut(config, stage_bounds(facts, 2, SEQUENCE_LENGTH))
    except RecipeError as error:
        return error.reason if isinstance(error, FamilyError) else str(error)
    return ""


def _refused_chunks(config: OwnConfig) -> str:
    """Returns why the loss cannot be computed for some tokens at a time; empty if it can."""
    try:
        check_chunks(config)
    except RecipeError as error:
        return error.reason if isinstance(error, FamilyError) else str(error)
    return ""


def _refused_split(config: OwnConfig) -> str:
    """Returns why two ranks cannot split the matrices of the model; empty if they can."""
    if not config.tp_plan:
        return "it has no plan; give one in the form of transformers' tp_plan: model.tp_plan"
    try:
        check_tensor_split(config, 2)
    except RecipeError as error:
        return error.reason if isinstance(error, FamilyError) else str(error)
    return ""
