"""A pipeline stage of any `transformers` causal LM: the model itself, with holes.

A stage is the whole model, built without memory for its parameters, in which every decoder layer of
another stage is a `Hole`. The layer before the first own one hands in the hidden state that the
previous stage sent; the layer behind the last own one takes the result out. Between them runs the
family's own forward, which makes rotary tables, masks of packed documents, sliding windows and the
like again from the integer position ids; whatever it made of the tokens before the first own layer is
replaced. Layer numbers, configuration and parameter names stay those of the whole model.

What crosses from stage to stage is `(hidden, position_ids, *extras)`, the extras in this order:
`input_ids` for families whose later layers look at tokens again, and the router logits of the MoE
layers so far, [layers, tokens, experts], where `output_router_logits` asks for the auxiliary loss:
that is a product of means over all layers, and so no sum of parts that each stage could make alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from llmtrain.errors import Problem, RecipeError
from llmtrain.models.frozen import freeze_choosers
from llmtrain.models.tensor import TensorParallel
from llmtrain.plan.bounds import StageBounds
from llmtrain.plan.model_facts import decoder_lists


class Refused(RecipeError):  # noqa: N818 - a verdict, and so it is called where it is caught
    """The family cannot be cut into stages without computing something else."""

    def __init__(self, config: PreTrainedConfig, reason: str) -> None:
        self.reason = reason
        message = f"{config.model_type} cannot be cut into pipeline stages: {reason}"
        super().__init__(Problem("pipeline.family", "parallel.pipeline", message, "--set parallel.pipeline=1"))


@dataclass(frozen=True)
class Cut:
    """How a family comes apart; found and proved on a tiny copy of the model (`llmtrain.models.cut`)."""

    bounds: tuple[StageBounds, ...]
    outside: tuple[frozenset[str], ...]
    """Of each stage, the names of the parameters outside the decoder layers that its result depends on."""
    tuple_length: int | None
    """Length of the tuple that a decoder layer returns; None for a bare tensor."""
    sends_tokens: bool
    """Whether every stage needs `input_ids`."""
    sends_routers: bool
    """Whether the model returns an auxiliary loss, made of the router logits of all layers."""


class Hole(nn.Module):
    """The place of a decoder layer that another stage has; returns the hidden state as it came."""

    def __init__(self, layer: nn.Module, tuple_length: int | None) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training" and not isinstance(value, nn.Module):
                setattr(self, name, value)  # `layer_type`, `attention_type`: some forwards ask a layer for its kind
        self.tuple_length = tuple_length

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer would return, were it the identity."""
        hidden = self.exchange(args[0] if args else kwargs["hidden_states"])
        return hidden if self.tuple_length is None else (hidden, *[None] * (self.tuple_length - 1))

    def exchange(self, hidden: Tensor) -> Tensor:
        """The hidden state to go on with."""
        return hidden


class Entry(Hole):
    """The hole before the first own layer: goes on with what the previous stage sent."""

    received: Tensor | None = None

    def exchange(self, hidden: Tensor) -> Tensor:
        """Drops what the forward made of tokens that are not there."""
        assert self.received is not None
        return self.received


class Exit(Hole):
    """The hole behind the last own layer: keeps the result for the next stage."""

    result: Tensor | None = None

    def exchange(self, hidden: Tensor) -> Tensor:
        """Keeps it, and lets the forward run to its end on it, where nothing expensive is left."""
        self.result = hidden
        return hidden


class Absent(nn.Module):
    """The place of a module outside the decoder layers whose result this stage does not use."""

    weight: Tensor

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.is_table = isinstance(module, nn.Embedding)
        width = getattr(module, "embedding_dim", None) if self.is_table else getattr(module, "out_features", None)
        self.width: int | None = width
        # Some forwards ask a module for the type and the device of its weight.
        dtype = next(module.parameters()).dtype
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device), persistent=False)

    def forward(self, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Zeros of the shape that the module would return."""
        if self.width is None:
            return value
        shape = value.shape if self.is_table else value.shape[:-1]
        return torch.zeros(*shape, self.width, dtype=self.weight.dtype, device=value.device)


class Stage(nn.Module):
    """One pipeline stage; called with a tuple of tensors, it returns what the next stage is called with.

    The first stage takes `(input_ids, position_ids)`, both [batch, T]. The last returns the logits
    [batch, T, vocab], or `(logits, auxiliary loss)` where the configuration asks for router logits;
    the sum of the losses in the place of the logits where there are `targets`.
    """

    targets: Tensor | None = None
    """Labels [batch, T] of the micro-batch to come, for a last stage whose model takes them (`ChunkedLoss`)."""
    bounds: Mapping[str, Any] = MappingProxyType({})
    """Arguments by which the attention of the micro-batch to come keeps documents apart (`models.varlen`)."""
    context: AbstractContextManager[Any] = nullcontext()
    """Where the next forward pass runs."""

    def __init__(self, model: PreTrainedModel, index: int, cut: Cut, names: dict[str, str]) -> None:
        super().__init__()
        self.model = model
        self.index = index
        self.cut = cut
        self.is_first = index == 0
        self.is_last = index == len(cut.bounds) - 1
        self._names = names
        self._received_routers: tuple[Tensor, ...] = ()
        layers, bounds = decoder_layers(model)[1], cut.bounds[index]
        base = backbone(model)
        # In tuples, where torch does not take them for children.
        self._run = (model if self.is_last else base,)
        self._entry: tuple[Any, ...] = () if self.is_first else (layers[bounds.first - 1],)
        self._exit: tuple[Any, ...] = () if self.is_last else (layers[bounds.last],)
        accepted = inspect.signature(self._run[0].forward).parameters
        self._takes_positions = "position_ids" in accepted or "kwargs" in accepted
        self._filler = 1 if getattr(model.config, "pad_token_id", None) == 0 else 0
        if self.is_last and cut.sends_routers:
            base.register_forward_hook(self._prepend_routers)

    def hf_names(self) -> dict[str, str]:
        """Own parameter name to its name in the whole model; tied parameters once, as `named_parameters` has it."""
        return self._names

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Runs the own layers.

        inputs: see the module's head; hidden is what the previous stage returned, of any shape.
        """
        states, position_ids, *extras = inputs
        tokens = states if self.is_first else self._tokens(position_ids, extras)
        arguments = {"input_ids": tokens, "use_cache": False, **self.bounds}
        if self._takes_positions:
            arguments["position_ids"] = position_ids
        if self.targets is not None:
            arguments["targets"] = self.targets
        self._received_routers = tuple(extras[0].unbind()) if extras else ()
        for entry in self._entry:
            entry.received = states
        try:
            with self.context:
                output = self._run[0](**arguments)
            return self._last(output) if self.is_last else self._sent(output, position_ids, tokens)
        finally:
            self._forget()

    def _last(self, output: Any) -> Tensor | tuple[Tensor, ...]:
        result = output.logits if self.targets is None else output.loss_sum
        return (result, output.aux_loss) if self.cut.sends_routers else result

    def _sent(self, output: Any, position_ids: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        hidden: Tensor = self._exit[0].result
        extras = [tokens] if self.cut.sends_tokens else []
        routers = (*self._received_routers, *(getattr(output, "router_logits", None) or ()))
        if routers and self.cut.sends_routers:
            extras.append(torch.stack(routers))
        return (hidden, position_ids, *extras)

    def _forget(self) -> None:
        """Lets go of the activations: the engine keeps what it needs, for several micro-batches at a time."""
        self.targets = None
        self.bounds, self.context = {}, nullcontext()
        self._received_routers = ()
        for entry in self._entry:
            entry.received = None
        for gate in self._exit:
            gate.result = None

    def _tokens(self, position_ids: Tensor, extras: list[Tensor]) -> Tensor:
        """Received tokens, taken out of `extras`, or fillers that nothing depends on."""
        if self.cut.sends_tokens:
            return extras.pop(0)
        return torch.full_like(position_ids, self._filler)

    def _prepend_routers(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._received_routers:
            output.router_logits = (*self._received_routers, *(output.router_logits or ()))


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers.

    Raises Refused where there is none, or more than one list that may be it.
    """
    lists = decoder_lists(model)
    if len(lists) != 1:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        found = " and ".join(lists) or "none"
        raise Refused(model.config, f"it should have one list of {count} decoder layers and has {found}")
    (found_list,) = lists.items()
    return found_list


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head; the model itself where they are not apart."""
    if model.base_model is not model:
        return model.base_model
    name = decoder_layers(model)[0].partition(".")[0]
    child = getattr(model, name)
    return child if isinstance(child, PreTrainedModel) else model


def build_with_cut(
    config: PreTrainedConfig,
    index: int,
    cut: Cut,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    tensor: TensorParallel | None = None,
) -> Stage:
    """A stage as `cut` says, its parameters allocated but not drawn; with `tensor`, this rank's slices of them."""
    with no_init_weights(), _parameters_without_memory(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    freeze_choosers(model).tie_weights()
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    list_name, layers = decoder_layers(model)
    bounds = cut.bounds[index]
    for number, layer in enumerate(layers):
        if not bounds.first <= number < bounds.last:
            kind = {bounds.first - 1: Entry, bounds.last: Exit}.get(number, Hole)
            layers[number] = kind(layer, cut.tuple_length)
    _remove_unused(model, list_name, canonical, cut.outside[index], device)
    names = {name: canonical[id(parameter)] for name, parameter in model.named_parameters()}
    if tensor is not None:
        for name, parameter in model.named_parameters():
            tensor.slice(names[name], parameter)
    _allocate(model, device)
    if tensor is not None:
        tensor.install(model, names)
    return Stage(model, index, cut, {f"model.{name}": whole for name, whole in names.items()})


def _remove_unused(
    model: PreTrainedModel, list_name: str, canonical: dict[int, str], used: frozenset[str], device: torch.device
) -> None:
    """Takes away the parameters outside the decoder layers that the stage's result does not depend on.

    A module that is nothing but these is replaced; elsewhere zeros take their place.
    """
    for name, module in list(model.named_modules()):
        own = dict(module.named_parameters(recurse=False))
        unused = {attribute: p for attribute, p in own.items() if canonical[id(p)] not in used}
        if not unused or name.startswith(f"{list_name}."):
            continue
        if len(unused) == len(own) and next(module.children(), None) is None:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Absent(module, device))
            continue
        for attribute, parameter in unused.items():
            delattr(module, attribute)
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            module.register_buffer(attribute, zeros, persistent=False)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Sends each new parameter to the meta device; buffers (rotary frequencies, ...) are computed as usual.

    Its first number is kept: a constant of the constructor is what some parameters start from (`_allocate`).
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            first = parameter.detach().flatten()[:1].clone()
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            parameter.first = first  # type: ignore[attr-defined]
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for the parameters that are left; tied ones stay one.

    Whatever `_init_weights` does not draw, as the router of Ernie 4.5, keeps the constant that its constructor gave it.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                value = torch.empty_like(parameter, device=device)
                first = getattr(parameter, "first", None)
                if first is not None and first.numel() and first.device.type == value.device.type:
                    value.copy_(first.expand_as(value))
                made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
