"""A pipeline stage of any `transformers` causal LM: the model itself with placeholders for absent layers.

A stage is the whole model, built without allocating its parameters, in which a `Placeholder` replaces every
decoder layer of another stage. The placeholder before the stage's first layer injects the hidden state that the
previous stage sent; the one after its last layer captures the result. The family's own forward runs in between and
computes rotary tables, masks of packed documents, sliding windows and the like from the integer position ids. Whatever
it computed from the tokens before the stage's first layer is discarded. Layer numbers, configuration and parameter
names remain those of the whole model.

The inputs of a stage are `(hidden, position_ids, *extras)`, with these extras in this order: `input_ids`, for families
whose later layers read the tokens again; and the router logits of the MoE layers so far, [layers, tokens, experts], if
`output_router_logits` asks for the auxiliary loss. Of these, only hidden states and router logits are sent between
ranks. The auxiliary loss is a product of means over all layers, so it is not a sum of terms that each stage could
compute alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from llmtrain.errors import FamilyError
from llmtrain.models.classifier import decoder_of
from llmtrain.models.loss import freeze_unused
from llmtrain.models.sharding import Sharding
from llmtrain.overrides.torch import parameters_without_memory
from llmtrain.plan.facts.built_model import decoder_lists
from llmtrain.plan.stages import StageBounds


def cannot_cut(config: PreTrainedConfig, reason: str) -> FamilyError:
    """Returns the refusal of a family that cannot be cut into stages without changing what it computes."""
    refused = f"{config.model_type} cannot be cut into pipeline stages"
    return FamilyError("pipeline.family", "parallel.pipeline", 1, refused, reason)


@dataclass(frozen=True)
class Cut:
    """Where a family is cut into stages, found and verified on a tiny copy (`llmtrain.models.tiny.stages_check`)."""

    bounds: tuple[StageBounds, ...]
    outside: tuple[frozenset[str], ...]
    """For each stage, the names of the parameters outside the decoder layers that its result depends on."""
    tuple_length: int | None
    """Length of the tuple that a decoder layer returns; None if it returns a bare tensor."""
    sends_tokens: bool
    """Whether every stage needs `input_ids`."""
    sends_routers: bool
    """Whether the model returns an auxiliary loss, computed from the router logits of all layers."""


class Placeholder(nn.Module):
    """A placeholder for a decoder layer of another stage; returns the hidden state unchanged."""

    def __init__(self, layer: nn.Module, tuple_length: int | None) -> None:
        super().__init__()
        of_class = {name: value for name, value in vars(type(layer)).items() if isinstance(value, str)}
        for name, value in {**of_class, **vars(layer)}.items():
            if not name.startswith("_") and name != "training" and not isinstance(value, nn.Module):
                setattr(self, name, value)  # `layer_type`, `attention_type`: some forwards read a layer's kind
        self.tuple_length = tuple_length

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the layer would return if it were the identity."""
        hidden = self.exchange(args[0] if args else kwargs["hidden_states"])
        return hidden if self.tuple_length is None else (hidden, *[None] * (self.tuple_length - 1))

    def exchange(self, hidden: Tensor) -> Tensor:
        """Returns the hidden state with which the forward continues."""
        return hidden


class StageEntry(Placeholder):
    """The placeholder before the stage's first layer; continues with what the previous stage sent."""

    received: Tensor | None = None

    def exchange(self, hidden: Tensor) -> Tensor:
        """Returns the received state, and drops what the forward computed from placeholder tokens."""
        assert self.received is not None
        return self.received


class StageExit(Placeholder):
    """The placeholder after the stage's last layer; keeps the result for the next stage."""

    result: Tensor | None = None
    ends_pass: bool = False
    """Whether the head would follow, which this stage does not have."""

    def exchange(self, hidden: Tensor) -> Tensor:
        """Keeps the state. Returns it, so that the forward can finish if nothing expensive follows, or ends the pass.

        Raises EndOfStage to end it.
        """
        self.result = hidden
        if self.ends_pass:
            raise EndOfStage
        return hidden


class EndOfStage(Exception):  # noqa: N818 - not an error
    """Ends a forward pass after the last layer of a stage."""


class AbsentModule(nn.Module):
    """A placeholder for a module outside the decoder layers whose result this stage does not use."""

    weight: Tensor

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.is_table = isinstance(module, nn.Embedding)
        self.width: int | None = getattr(module, "embedding_dim" if self.is_table else "out_features", None)
        # Some forwards read the dtype and the device of a module's weight.
        dtype = next(module.parameters()).dtype
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device), persistent=False)

    def forward(self, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns zeros of the shape that the module would return."""
        if self.width is None:
            return value
        shape = value.shape if self.is_table else value.shape[:-1]
        return torch.zeros(*shape, self.width, dtype=self.weight.dtype, device=value.device)


class Stage(nn.Module):
    """One pipeline stage; takes a tuple of tensors and returns the arguments of the next stage.

    The first stage takes `(input_ids, position_ids)`, both [batch, T]. The last stage returns the logits [batch, T,
    vocab], or `(logits, auxiliary loss)` if the configuration asks for router logits. Given labels as `targets`, it
    returns the sum of the losses instead of the logits.
    """

    def __init__(self, model: PreTrainedModel, index: int, cut: Cut, names: dict[str, str]) -> None:
        super().__init__()
        self.model = model
        self.index = index
        self.cut = cut
        self.is_first = index == 0
        self.is_last = index == len(cut.bounds) - 1
        self.hf_names = names
        """Parameter of the stage → its name in the whole model. A tied one occurs once, as in `named_parameters`."""
        self._received_routers: tuple[Tensor, ...] = ()
        layers, bounds = decoder_layers(model)[1], cut.bounds[index]
        base = backbone(model)
        # In tuples, so that torch does not register them as children.
        self._run = (model if self.is_last else base,)
        self._entry: tuple[Any, ...] = () if self.is_first else (layers[bounds.first - 1],)
        self._exit: tuple[Any, ...] = () if self.is_last else (layers[bounds.end],)
        exits: Any = self._exit
        for last in exits:
            last.ends_pass = base is model
        accepted = inspect.signature(self._run[0].forward).parameters
        self._takes_positions = "position_ids" in accepted or "kwargs" in accepted
        self._filler = 1 if getattr(model.config, "pad_token_id", None) == 0 else 0
        if self.is_last and cut.sends_routers:
            base.register_forward_hook(self._prepend_routers)

    def add_idle_parameters(self) -> None:
        """Adds a matrix or a vector of one element, whose gradient is 0, if this stage trains no matrix or no vector.

        The optimizer has a parameter group of matrices and one of vectors, and the engine all-reduces the gradient norm
        of one group after the other. If stages had different groups, they would wait for each other forever.
        """
        trained = {min(parameter.ndim, 2) for parameter in self.model.parameters() if parameter.requires_grad}
        like = next(self.model.parameters())
        lacking = sorted({1, 2} - trained)
        self.idle = nn.ParameterList(torch.zeros((1,) * size, dtype=like.dtype, device=like.device) for size in lacking)

    def forward(self, inputs: tuple[Tensor, ...], **arguments: Any) -> Tensor | tuple[Tensor, ...]:
        """Runs the layers of this stage.

        inputs: see the module's docstring; `hidden` is what the previous stage returned, of any shape. arguments: of
        the model's forward pass: those of `models.varlen`, and, on the last stage, `logits_to_keep` or, if its model
        accepts them (`ChunkedLoss`), labels [batch, T] as `targets`.
        """
        states, position_ids, *extras = inputs
        tokens = states if self.is_first else self._tokens(position_ids, extras)
        if self._takes_positions:
            arguments["position_ids"] = position_ids
        self._received_routers = tuple(extras[0].unbind()) if extras else ()
        for entry in self._entry:
            entry.received = states
        try:
            output = self._run_layers(tokens, arguments)
            if not self.is_last:
                return self._output_for_next_stage(output, position_ids, tokens)
            result = self._with_idle(output.loss_sum if "targets" in arguments else output.logits)
            return (result, output.aux_loss) if self.cut.sends_routers else result
        finally:
            self._release()

    def _run_layers(self, tokens: Tensor, arguments: dict[str, Any]) -> Any:
        """Returns the output of the model or of its backbone; None if the pass ends after the last layer."""
        try:
            return self._run[0](input_ids=tokens, use_cache=False, **arguments)
        except EndOfStage:
            return None

    def inputs(self, received: Sequence[Tensor], tokens: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Returns the inputs of any stage but the first. received: hidden states and router logits."""
        hidden, *routers = received
        return (hidden, position_ids, *([tokens] if self.cut.sends_tokens else []), *routers)

    def _output_for_next_stage(self, output: Any, position_ids: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        hidden = self._with_idle(self._exit[0].result)
        extras = [tokens] if self.cut.sends_tokens else []
        routers = (*self._received_routers, *(getattr(output, "router_logits", None) or ()))
        if routers and self.cut.sends_routers:
            extras.append(torch.stack(routers))
        # Autograd has no graph if nothing before is trained, but the engine starts a backward pass from each output.
        return tuple(_differentiable(tensor) for tensor in (hidden, position_ids, *extras))

    def _with_idle(self, result: Tensor) -> Tensor:
        for parameter in getattr(self, "idle", ()):
            result = result + 0 * parameter.sum()
        return result

    def _release(self) -> None:
        """Releases the activations. The engine keeps those that it needs, for several micro-batches at a time."""
        self._received_routers = ()
        for entry in self._entry:
            entry.received = None
        for exit_ in self._exit:
            exit_.result = None

    def _tokens(self, position_ids: Tensor, extras: list[Tensor]) -> Tensor:
        """Returns the received tokens, removed from `extras`, or filler tokens that no result depends on."""
        if self.cut.sends_tokens:
            return extras.pop(0)
        return torch.full_like(position_ids, self._filler)

    def _prepend_routers(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._received_routers:
            output.router_logits = (*self._received_routers, *(output.router_logits or ()))


class RankStages(nn.ModuleList):
    """The stages of one rank of a pipeline. A weight that several of them use is one parameter."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        self.hf_names: dict[str, str] = {}
        """Parameter of this module → its name in the whole model."""
        shared: dict[str, nn.Parameter] = {}
        for index, stage in enumerate(stages):
            parameters = dict(stage.named_parameters())
            for path, name in stage.hf_names.items():
                if name in shared:
                    _replace(stage, parameters[path], shared[name])
                    continue
                self.hf_names[f"{index}.{path}"] = name
                if path in parameters:  # 4-bit weights are not parameters
                    shared[name] = parameters[path]

    def hugging_face_name(self, name: str) -> str:
        """Returns the name of a parameter or buffer in the whole model."""
        return self.hf_names.get(name) or name.partition(".")[2].removeprefix("model.")


def _replace(stage: Stage, parameter: nn.Parameter, by: nn.Parameter) -> None:
    """Replaces a parameter in every module that has it; an embedding and a head may be tied within a stage, too."""
    for path, candidate in list(stage.named_parameters(remove_duplicate=False)):
        if candidate is parameter:
            module, _, attribute = path.rpartition(".")
            setattr(stage.get_submodule(module), attribute, by)


def _differentiable(output: Tensor) -> Tensor:
    needs_no_graph = output.requires_grad or not output.is_floating_point() or not torch.is_grad_enabled()
    return output if needs_no_graph else output.detach().requires_grad_()


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Returns the name of the list of decoder layers, and the list.

    Raises FamilyError if there is no such list, or more than one candidate.
    """
    lists = decoder_lists(model)
    if len(lists) != 1:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        names = " and ".join(lists) or "none"
        raise cannot_cut(model.config, f"it should have one list of {count} decoder layers and has {names}")
    (named_list,) = lists.items()
    return named_list


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model without its head, or the model itself if the two are not separate modules."""
    if model.base_model is not model:
        return model.base_model
    name = decoder_layers(model)[0].partition(".")[0]
    child = getattr(model, name)
    if not isinstance(child, PreTrainedModel):
        return model
    return child if child.get_output_embeddings() is None else child.base_model  # a causal LM inside (Llama 4)


def build_stage(
    config: PreTrainedConfig,
    index: int,
    cut: Cut,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    shardings: Sequence[Sharding] = (),
) -> Stage:
    """Builds a stage of the causal LM of `config`, with its parameters allocated on `device` but not initialized.

    `draw_all_weights(stage.model, seed)` then draws exactly the weights that the whole model would have. shardings: if
    there are any, only this rank's shards are allocated, and `draw_all_weights` needs `made_whole`.
    """
    with no_init_weights(), parameters_without_memory(), torch.device(device):
        model = decoder_of(config, attn_implementation=attention, dtype=dtype)
    freeze_unused(model).tie_weights()
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    list_name, layers = decoder_layers(model)
    bounds = cut.bounds[index]
    for number, layer in enumerate(layers):
        if not bounds.first <= number < bounds.end:
            kind = {bounds.first - 1: StageEntry, bounds.end: StageExit}.get(number, Placeholder)
            layers[number] = kind(layer, cut.tuple_length)
    _remove_unused(model, list_name, canonical, cut.outside[index], device)
    names = {name: canonical[id(parameter)] for name, parameter in model.named_parameters()}
    for sharding in shardings:
        for name, parameter in model.named_parameters():
            sharding.shard(names[name], parameter)
    allocate(model, device)
    for sharding in shardings:
        sharding.install(model, names)
    return Stage(model, index, cut, {f"model.{name}": whole for name, whole in names.items()})


def _remove_unused(
    model: PreTrainedModel, list_name: str, canonical: dict[int, str], used: frozenset[str], device: torch.device
) -> None:
    """Removes the parameters outside the decoder layers that the stage's result does not depend on.

    A module with no other parameters and no children is replaced; in other modules, zeros replace the parameters.
    """
    for name, module in list(model.named_modules()):
        parameters = dict(module.named_parameters(recurse=False))
        unused = {attribute: p for attribute, p in parameters.items() if canonical[id(p)] not in used}
        if not unused or name.startswith(f"{list_name}."):
            continue
        if len(unused) == len(parameters) and next(module.children(), None) is None:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, AbsentModule(module, device))
            continue
        for attribute, parameter in unused.items():
            delattr(module, attribute)
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            module.register_buffer(attribute, zeros, persistent=False)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocates the parameters of a module that are on the meta device; tied ones stay tied.

    A parameter that `_init_weights` does not draw, such as the router of Ernie 4.5, keeps the constant of its
    constructor.
    """
    allocated: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in allocated:
                value = torch.empty_like(parameter, device=device)
                first = getattr(parameter, "first", None)
                if first is not None and first.numel() and first.device.type == value.device.type:
                    value.copy_(first.expand_as(value))
                allocated[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                vars(allocated[id(parameter)]).update(vars(parameter))  # such as the mark of an expert
            setattr(part, name, allocated[id(parameter)])
