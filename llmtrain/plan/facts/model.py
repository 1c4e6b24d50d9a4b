"""The properties of a model that a plan depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from llmtrain.plan.facts.weights import Weights
from llmtrain.recipe import Part, Precision


class SavedBytes(Part):
    """What a layer of a user's own model saves for its backward pass, as a trace has shown."""

    fixed: float
    """Bytes for any number of tokens."""
    per_token: float
    """Bytes for each token."""
    per_pair: float
    """Bytes for each pair of tokens of a sequence."""


class OwnTrials(Part):
    """What trials on a tiny copy of a user's own model have shown. A reason is empty if there is nothing against it."""

    auxiliary_loss: bool
    """Whether it returns a loss of its own, which is added for each micro-batch."""
    is_random: bool
    """Whether it has dropout that no field of `model.config` sets."""
    documents: str
    """Why packed documents influence each other."""
    stages: str
    """Why it cannot be cut into the stages of a pipeline."""
    sequence: str
    """Why slices of a sequence would compute something else."""
    tensor: str
    """Why its matrices cannot be split among tensor parallel ranks."""
    chunks: str = ""
    """Why its loss needs the logits of all tokens at once."""
    saved: tuple[tuple[Precision, tuple[SavedBytes, ...]], ...] = ()
    """For each precision and layer, what it saves for its backward pass; empty for a model that cannot be traced."""


class TextPart(Part):
    """Where the text model of a multimodal model, the wrapper, is in it."""

    wrapper: str
    """`model_type` of the whole."""
    prefixes: tuple[tuple[str, str], ...]
    """The beginnings of names in the text model, and what they are in the wrapper: of its decoder and of its head."""
    untouched: tuple[tuple[str, int], ...]
    """The parts beside it, which are not loaded, and their numbers of parameters."""

    def whole(self, name: str) -> str:
        """Returns the name in the wrapper of a module or weight of the text model."""
        for own, its in self.prefixes:
            if f"{name}.".startswith(own):
                return (its + f"{name}.".removeprefix(own))[:-1]
        return name

    def own(self, name: str) -> str | None:
        """Returns the name in the text model of a module or weight of the wrapper; None for one of another part."""
        for own, its in self.prefixes:
            if f"{name}.".startswith(its):
                return (own + f"{name}.".removeprefix(its))[:-1]
        return None


def _merged(config: Mapping[str, Any]) -> float:
    """Returns the number of patches on a side of the square of them that becomes one token."""
    if ratio := config.get("pixel_shuffle_ratio"):
        return float(1 / ratio)
    return float(config.get("spatial_merge_size") or config["pooling_kernel_size"])


class TowerFacts(Part):
    """The vision tower of a multimodal model that is trained on images."""

    prefixes: tuple[str, ...]
    """The beginnings of the names of its parameters, those that project its features into the text model included."""
    parameters: int
    layers: int
    hidden_size: int
    intermediate_size: int
    patches_per_token: int
    """Patches of an image that become one token."""

    @classmethod
    def of(cls, config: Mapping[str, Any], prefixes: tuple[str, ...], parameters: int) -> Self:
        """config: of the tower in `transformers`."""
        return cls(
            prefixes=prefixes,
            parameters=parameters,
            layers=config.get("depth") or config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            patches_per_token=round(_merged(config) ** 2),
        )


class ModelFacts(Part):
    """Properties of a model that the plan depends on, determined without building the model if possible."""

    model_type: str
    """`model_type` of `transformers`."""
    parameters: int
    """Parameters, those of adapters included; tied ones count once."""
    active_parameters: int
    """Parameters used by a token; fewer than `parameters` in a mixture of experts."""
    embedding_parameters: int
    """Input embeddings, positions included; they are looked up and thus cost no FLOPs."""
    largest_parameter: int
    """Elements of the largest single parameter, as stored in the model."""
    layers: int
    """Decoder layers."""
    layer_parameters: tuple[int, ...]
    """Parameters of each decoder layer; empty for a model that is not a chain of layers."""
    layer_idle_parameters: tuple[int, ...]
    """Expert parameters of each decoder layer that a token is not routed to."""
    hidden_size: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    vocab_size: int
    """Rows of the embedding."""
    num_labels: int | None = None
    """Outputs of the head for a token, if it is not that over the vocabulary."""
    max_positions: int | None
    """Longest sequence that the configuration declares."""
    learned_positions: bool = False
    """Whether positions are a table, whose length limits the sequence."""
    rotary_follows: tuple[str, int] | None = None
    """Rotary type whose frequencies depend on the longest position of a batch, and the length up to which they do
    not."""
    yarn_length: int | None = None
    """Length up to which YaRN extends the context of its original length; None for other rotary types."""
    experts: int = 0
    """Experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Experts per layer that a token is routed to; 0 for a dense model, or if the configuration does not say."""
    text_model_type: str = ""
    """`model_type` of the part that reads texts, if the model has parts for other inputs."""
    part: TextPart | None = None
    """Where the model is in a multimodal one, of which it is the text model."""
    tower: TowerFacts | None = None
    """The vision tower, if the model is a multimodal one that is trained on images; its parameters are among those of
    the model."""
    trials: OwnTrials | None = None
    """What trials of a user's own model have shown; None for other models."""
    router_loss_off: float = 0.0
    """Coefficient of the router's loss, if the configuration has one that is not trained; otherwise 0."""
    router_loss: bool = False
    """Whether the configuration asks for the routers' loss, a mean within each micro-batch."""
    expert_modules: bool = False
    """Whether each expert is a module of its own: an expert without tokens then has no gradient."""
    without_gradient: tuple[str, ...] = ()
    """Parameters that the loss of texts does not depend on, which are frozen."""
    dropout: tuple[tuple[str, float], ...] = ()
    """Names and rates of the configuration's dropout, without those of 0."""
    quantization: str = ""
    """Method by which the files of pretrained weights are quantized, and its settings; empty if they are not."""
    quantization_fault: str = ""
    """Why weights that are quantized this way are not read; empty if they are."""
    tied_embeddings: bool
    """Whether embedding and head share one weight."""
    weights: Weights | None = None
    """The parameters one by one; None for a model that is not a chain of layers."""
    trained_parameters: int | None = None
    """Parameters that are trained; None: all."""
    layer_trained_parameters: tuple[int, ...] = ()
    """Trained parameters of each decoder layer that a token uses; empty if all are trained."""
    trains_embedding: bool = True
    """Whether the input table is trained."""
    trains_head: bool = True
    """Whether the output projection is trained."""
    source: str
    """`arithmetic` or `meta device`."""

    @property
    def outputs(self) -> int:
        """Outputs of the head for a token: the logits, unless another head replaces it."""
        return self.num_labels or self.vocab_size

    @property
    def text_type(self) -> str:
        """`model_type` of the part that reads texts."""
        return self.text_model_type or self.model_type
