"""A model of a user's own: any `nn.Module` from tokens to logits, in the form of a causal LM of `transformers`.

`OwnModel` has the children, parameters and buffers of the user's module itself, under their own names. What splits,
shards, recomputes, saves and exports models of `transformers` then does so with this one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llmtrain.models.own_attention import intercept, route_of, routed
from llmtrain.models.own_parts import (
    FIELD,
    Origin,
    OwnOutput,
    Parts,
    as_output,
    build_module,
    find_parts,
    sizes_of,
    with_head,
)
from llmtrain.overrides.torch import persistent_buffers
from llmtrain.plan.facts.model_facts import dropout_of
from llmtrain.recipe import ModelConfig
from llmtrain.recipe.own_code import import_object

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads")
"""Names for the number of heads in a user's configuration."""


class OwnConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of a model of a user's own; its sizes are those of the module that it builds."""

    model_type = "llmtrain_own"
    router_aux_loss_coef = 1.0
    """The model multiplies its auxiliary loss itself."""

    def __init__(
        self,
        build: str = "",
        code_dir: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        tiny: Mapping[str, Any] | None = None,
        parts: Mapping[str, str] | None = None,
        tp_plan: Mapping[str, str] | None = None,
        seed: int = 0,
        **others: Any,
    ) -> None:
        """build: import path of the function or class. arguments: its keyword arguments. tiny: those that differ in a
        tiny copy. parts: names of modules, see `Parts`. tp_plan: how tensor parallel ranks split matrices. seed: of the
        initial weights.
        """
        self.build = build
        self.code_dir = code_dir
        self.arguments = dict(arguments or {})
        self.tiny = dict(tiny or {})
        self.parts = dict(parts or {})
        self.tp_plan = dict(tp_plan or {})
        self.seed = seed
        super().__init__(**others)
        self.model_type = build or type(self).model_type  # for messages

    @property
    def origin(self) -> Origin:
        """What the user's module is built from."""
        return Origin.of(self.build, self.code_dir, self.arguments, self.tiny, self.parts)

    @property
    def found(self) -> Parts:
        """The parts of the model."""
        return find_parts(self.origin)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return sizes_of(self.origin).vocabulary

    @property
    def hidden_size(self) -> int:
        """Width of the embedding."""
        return sizes_of(self.origin).width

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return sizes_of(self.origin).layers

    @property
    def num_attention_heads(self) -> int:
        """Number of heads, if an argument with a usual name says so; else 0."""
        heads = [self.arguments[name] for name in HEADS if isinstance(self.arguments.get(name), int)]
        return heads[0] if heads else 0

    @property
    def dropout(self) -> dict[str, float]:
        """The rates of dropout among the arguments, if they are not 0."""
        return dropout_of(self.arguments)


class OwnModel(PreTrainedModel):  # type: ignore[misc]
    """A user's module as a causal LM. Its children, parameters and buffers are those of the user's module."""

    config_class = OwnConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        user = build_module(config.origin, config.seed)
        # The same dictionaries: a part that is replaced in one of the two modules is replaced in the other.
        self._modules, self._parameters, self._buffers = user._modules, user._parameters, user._buffers
        self._non_persistent_buffers_set = user._non_persistent_buffers_set
        # In a tuple, so that torch does not register it as a child.
        self._user = (user,)
        self._accepted = frozenset(inspect.signature(user.forward).parameters)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        **arguments: Any,
    ) -> OwnOutput:
        """Calls the user's module with the tokens [batch, T], and with the positions if it accepts them.

        logits_to_keep: the number of last positions, or the positions, whose logits are computed, if these are the
        result of a linear layer; 0: all. arguments: the boundaries of packed documents (`Documents.arguments`), or an
        `attention_mask` [batch, 1, T, T], for the attention.
        """
        named = {"position_ids": position_ids} if "position_ids" in self._accepted and position_ids is not None else {}
        found = self.config.found
        table: Any = self.get_submodule(found.embedding).weight
        like = table.new_empty(()).expand(*input_ids.shape, 1)
        mask = arguments.pop("attention_mask", None)
        route = route_of(self.config, like, mask, position_ids, self.training, arguments)
        with routed(route), self._keeping(logits_to_keep):
            output = as_output(self._user[0](input_ids, **named))
            return with_head(output, self.get_submodule(found.head)) if found.applies_head else output

    @contextmanager
    def _keeping(self, positions: int | Tensor) -> Iterator[None]:
        """Gives the head only the hidden states of some positions."""
        head = self.get_output_embeddings()
        if head is None or (isinstance(positions, int) and positions == 0):
            yield
            return
        kept = slice(-positions, None) if isinstance(positions, int) else positions
        handle = head.register_forward_pre_hook(lambda _, given: (given[0][:, kept], *given[1:]))
        try:
            yield
        finally:
            handle.remove()

    @property
    def tp_plan(self) -> dict[str, str]:
        """The plan by which tensor parallel ranks split the matrices."""
        return dict(self.config.tp_plan)

    def train(self, mode: bool = True) -> OwnModel:
        """Sets the mode of the user's module, too."""
        self._user[0].training = mode
        super().train(mode)
        return self

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of the tokens."""
        table: nn.Module = self.get_submodule(self.config.found.embedding)
        return table

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the layer that computes the logits; None if that is no module of its own."""
        head = self.config.found.head
        return self.get_submodule(head) if head else None

    def tie_weights(self, *args: Any, **named: Any) -> None:
        """Does nothing: the user's module has tied what it ties."""

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the user's constructor draws the weights."""


AutoConfig.register(OwnConfig.model_type, OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnModel)


def own_configuration(model: ModelConfig, vocab_size: int | None, code_dir: str | None, seed: int = 0) -> OwnConfig:
    """Returns the configuration of a recipe's own model.

    vocab_size: the size that the recipe gives, if it does. seed: of the initial weights. Raises RecipeError if there is
    no such function.
    """
    assert model.build is not None
    arguments = dict(model.config)
    intercept()
    factory = import_object(model.build, code_dir, FIELD)
    if vocab_size is not None and _takes_vocabulary(factory):
        arguments.setdefault("vocab_size", vocab_size)
    parts = {str(part): name for part, name in model.parts.items()}
    return OwnConfig(model.build, code_dir, arguments, model.tiny, parts, model.tp_plan, seed)


def _takes_vocabulary(factory: Any) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
    return "vocab_size" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class InitialWeights:
    """The initial weights of a model of a user's own, as its constructor draws them, in fp32 on the CPU."""

    def __init__(self, config: OwnConfig) -> None:
        built = OwnModel(config)
        self._weights: dict[str, Tensor] = {
            **dict(built.named_parameters(remove_duplicate=False)),
            **persistent_buffers(built),
        }

    def copy_to(self, name: str, into: Tensor) -> None:
        """Copies a weight or a buffer, given its name in the model."""
        into.copy_(self._weights[name])
