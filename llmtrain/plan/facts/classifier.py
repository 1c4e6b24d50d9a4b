"""The facts of a model whose head over the vocabulary is replaced by one of `model.num_labels` outputs."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.weights import Weight
from llmtrain.recipe import ModelConfig

FIELD = "model.num_labels"
MODULE = "score"
"""Name of the head in the classifiers of `transformers`."""
HEAD = f"{MODULE}.weight"
SUFFIX = "ForSequenceClassification"
"""End of the names of these classes."""


def is_classifier(config: Any) -> bool:
    """Whether a configuration of `transformers` is that of a classifier."""
    return any(str(name).endswith(SUFFIX) for name in config.architectures or ())


def with_head(facts: ModelFacts, model: ModelConfig) -> ModelFacts:
    """Returns the facts of a model with the head that the recipe asks for."""
    if model.num_labels is None:
        return facts
    head = Weight(name=HEAD, shape=(model.num_labels, facts.hidden_size))
    removed = 0 if facts.tied_embeddings else facts.vocab_size * facts.hidden_size
    weights, largest = facts.weights, facts.largest_parameter
    if weights is not None:
        removed = 0 if weights.tied else sum(weight.elements for weight in weights.head)
        weights = weights.model_copy(update={"head": (head,), "tied": False})
        largest = max(weight.elements for weight in weights.of_layers(0, weights.layers, first=True, last=True))
    added = head.elements - removed
    return facts.model_copy(
        update={
            "num_labels": model.num_labels,
            "parameters": facts.parameters + added,
            "active_parameters": facts.active_parameters + added,
            "largest_parameter": largest,
            "tied_embeddings": False,
            "weights": weights,
        }
    )
