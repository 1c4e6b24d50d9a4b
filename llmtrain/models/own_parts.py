"""Builds a module of a user's own, and finds its parts by running a tiny copy of it."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from llmtrain.errors import Problem, RecipeError, did_you_mean
from llmtrain.models.own_attention import intercept
from llmtrain.models.tiny.configuration import LAYER_COUNTS, LAYERS, shrunk_arguments
from llmtrain.recipe.own_code import import_object, own_code_errors

FIELD = "model.build"
TINY_TOKENS = (2, 16)
"""Shape of the tokens with which a tiny copy is tried."""
TOKENS_BELOW = 90
"""Tokens of a trial are below this number."""
TOLERANCE = 1e-4
"""Largest deviation relative to the largest logit. Products have other shapes, so that their sums, of a few hundred
terms in fp32, may be in another order; a dependence of any practical size is far larger."""
MAX_TINY_PARAMETERS = 20_000_000
"""Parameters of the largest model that is tried as it is, if its arguments cannot be shrunk."""


@dataclass(frozen=True)
class Origin:
    """What a module is built from. Arguments are JSON, so that origins can be compared."""

    build: str
    """Import path of the function or class."""
    code_dir: str | None
    """Folder of the user's code (`Recipe.code_dir`)."""
    arguments: str = "{}"
    """Keyword arguments of the function."""
    tiny: str = "{}"
    """Those that differ in a tiny copy."""
    parts: str = "{}"
    """Names of the parts that the user has given."""

    @classmethod
    def of(
        cls,
        build: str,
        code_dir: str | None,
        arguments: Mapping[str, Any],
        tiny: Mapping[str, Any] | None = None,
        parts: Mapping[str, str] | None = None,
    ) -> Origin:
        """Returns the origin of a module with these arguments."""
        return cls(build, code_dir, *(json.dumps(each or {}, sort_keys=True) for each in (arguments, tiny, parts)))

    @cached_property
    def named(self) -> dict[str, Any]:
        """The keyword arguments."""
        values: dict[str, Any] = json.loads(self.arguments)
        return values

    def with_arguments(self, arguments: Mapping[str, Any]) -> Origin:
        """Returns the origin of a module with other arguments."""
        return replace(self, arguments=json.dumps(dict(arguments), sort_keys=True))

    def tiny_arguments(self, layers: int | None = None) -> dict[str, Any]:
        """Returns the arguments of a tiny copy with that many layers; by default with all of them.

        Sizes with usual names are shrunk if the result runs, and those of `tiny` are set.
        """
        tiny = {name: value for name, value in json.loads(self.tiny).items() if layers or name not in LAYER_COUNTS}
        return (shrunk_arguments(self.named, layers) if _shrinks(self) else self.named) | tiny


@dataclass
class OwnOutput(ModelOutput):  # type: ignore[misc]
    """What the model returns."""

    logits: Tensor | None = None
    """[batch, T, vocab]."""
    aux_loss: Tensor | None = None
    """A scalar that is added to the loss of the micro-batch; None if the model has none."""


def as_output(result: Any) -> OwnOutput:
    """Returns what a user's module has returned as logits and auxiliary loss.

    This is a tensor of logits, a pair with the auxiliary loss, or an object or a dictionary with `logits` and possibly
    `aux_loss`.
    """
    if isinstance(result, Tensor):
        return OwnOutput(logits=result)
    if isinstance(result, tuple | list):
        return OwnOutput(logits=result[0], aux_loss=result[1] if len(result) > 1 else None)
    if isinstance(result, Mapping):
        return OwnOutput(logits=result["logits"], aux_loss=result.get("aux_loss"))
    return OwnOutput(logits=result.logits, aux_loss=getattr(result, "aux_loss", None))


def with_head(output: OwnOutput, head: nn.Module) -> OwnOutput:
    """Returns the output of a module that has returned hidden states [batch, T, width], with logits."""
    return OwnOutput(logits=head(output.logits), aux_loss=output.aux_loss)


def build_module(origin: Origin, seed: int = 0) -> nn.Module:
    """Calls the user's function or class, with the generator of random numbers at a seed.

    Raises RecipeError, with file and line, if it fails, lacks an argument or returns something else than a module.
    """
    intercept()
    factory = import_object(origin.build, origin.code_dir, FIELD)
    _check_arguments(origin, factory)
    with _seeded(seed), own_code_errors(origin.build, origin.code_dir, FIELD, "fails"):
        module = factory(**origin.named)
    if not isinstance(module, nn.Module):
        message = f"{origin.build} returned {type(module).__name__}, not a torch.nn.Module"
        raise RecipeError(Problem("model.build", FIELD, message))
    return module


def _check_arguments(origin: Origin, factory: Any) -> None:
    """Raises RecipeError for fields of `model.config` that the user's function does not take, or that it lacks."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # implemented in C
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    named = {name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    problems = [
        Problem(
            "model.config_key",
            f"model.config.{name}",
            f"{origin.build} has no such argument{did_you_mean(name, named)}",
            f"its arguments: {', '.join(sorted(named))}",
        )
        for name in origin.named
        if name not in named and inspect.Parameter.VAR_KEYWORD not in kinds
    ]
    required = [name for name in named if parameters[name].default is inspect.Parameter.empty]
    problems += [
        Problem("model.config_key", f"model.config.{name}", f"is required by {origin.build}")
        for name in sorted(required)
        if name not in origin.named
    ]
    if problems:
        raise RecipeError(problems)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class Sizes(NamedTuple):
    """Sizes of a built module."""

    vocabulary: int
    width: int
    layers: int


@dataclass(frozen=True)
class Parts:
    """The parts of a user's module, found by running a tiny copy of it."""

    embedding: str
    """Name of the `nn.Embedding` that is given the tokens."""
    layers: str
    """Name of the list of layers, each of which is given the result of the one before; empty if there is none."""
    head: str
    """Name of the module whose result is the logits; empty if there is none."""
    applies_head: bool
    """Whether the user's module returns hidden states, to which the head that is named is applied."""
    without_gradient: tuple[str, ...]
    """Parameters that the loss does not depend on."""
    has_auxiliary_loss: bool
    takes_positions: bool
    """Whether its forward pass has an argument `position_ids`."""
    is_random: bool
    """Whether two passes in training differ, although no argument asks for dropout."""


@cache
def _shrinks(origin: Origin) -> bool:
    """Whether a model with shrunk arguments runs. Raises RecipeError if it does not, and the model itself is large."""
    shrunk = origin.with_arguments(shrunk_arguments(origin.named, LAYERS) | json.loads(origin.tiny))
    try:
        run_tiny(build_module(shrunk), shrunk)
    except RecipeError as error:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in build_module(origin).parameters())
        if parameters <= MAX_TINY_PARAMETERS:
            return False
        fix = "give sizes with which a tiny copy runs, such as --set 'model.tiny={\"width\": 64}'"
        raise RecipeError([replace(problem, fix=problem.fix or fix) for problem in error.problems]) from error
    return True


def run_tiny(module: nn.Module, origin: Origin) -> OwnOutput:
    """Returns the output of a module for the tokens of a trial. Raises RecipeError, with file and line, if it fails."""
    with own_code_errors(origin.build, origin.code_dir, FIELD, f"fails for tokens {list(TINY_TOKENS)} in a tiny copy"):
        return as_output(module(tiny_tokens(module)))


def tiny_tokens(module: nn.Module) -> Tensor:
    """Returns tokens [2, 16] that the largest embedding of a module has."""
    rows = max((each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)), default=1)
    return torch.randint(0, min(TOKENS_BELOW, rows), TINY_TOKENS, generator=torch.Generator().manual_seed(0))


@cache
def sizes_of(origin: Origin) -> Sizes:
    """Returns the sizes of the module, which is built on the meta device."""
    with torch.device("meta"):
        built = build_module(origin)
    parts = find_parts(origin)
    table: Any = built.get_submodule(parts.embedding)
    layers: Any = built.get_submodule(parts.layers) if parts.layers else ()
    return Sizes(table.num_embeddings, table.embedding_dim, len(layers))


@cache
def find_parts(origin: Origin) -> Parts:
    """Returns the parts of a model, found by running a tiny copy of it on the CPU.

    Raises RecipeError if it fails, or if it does not map tokens to the logits of each position.
    """
    module = build_module(origin.with_arguments(origin.tiny_arguments(LAYERS))).eval()
    calls: list[Call] = []
    hooks = [
        each.register_forward_hook(partial(_note_call, calls, name), with_kwargs=True)
        for name, each in module.named_modules()
        if name
    ]
    output = run_tiny(module, origin)
    for hook in hooks:
        hook.remove()
    _check_logits(origin, output)
    named: dict[str, str] = json.loads(origin.parts)
    _check_names(origin, module)
    applies_head = "head" in named and named["head"] not in {call.name for call in calls}
    if applies_head:
        output = with_head(output, module.get_submodule(named["head"]))
    embedding = named.get("embedding") or _embedding(origin, calls)
    _check_width(origin, output, module.get_submodule(embedding))
    found = {
        "embedding": embedding,
        "layers": named.get("layers") or _layers(module, calls),
        "head": named.get("head") or _head(calls, output),
    }
    return Parts(
        **found,
        applies_head=applies_head,
        without_gradient=_without_gradient(module, output),
        has_auxiliary_loss=output.aux_loss is not None,
        takes_positions="position_ids" in inspect.signature(module.forward).parameters,
        is_random=_is_random(module),
    )


class Call(NamedTuple):
    """A call of a module in a forward pass."""

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    output: Any


def _note_call(
    calls: list[Call], name: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any
) -> None:
    calls.append(Call(name, module, (*args, *named.values()), output))


def _check_logits(origin: Origin, output: OwnOutput) -> None:
    logits = output.logits
    if not isinstance(logits, Tensor) or logits.shape[:-1] != TINY_TOKENS:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        message = f"{origin.build} returns logits of shape {shape} for tokens of shape {list(TINY_TOKENS)}"
        fix = "return the logits of every position, [batch, sequence, vocabulary], also without targets"
        raise RecipeError(Problem("model.logits", FIELD, message, fix))


def _check_width(origin: Origin, output: OwnOutput, table: Any) -> None:
    """Raises RecipeError for a model that has no logit for some of the tokens of its embedding."""
    assert output.logits is not None
    width, rows = output.logits.shape[-1], table.num_embeddings
    if width < rows:
        message = f"{origin.build} returns {width} logits for a token, but its embedding has {rows} tokens"
        fix = "if it returns hidden states, name the layer that computes the logits: --set model.parts.head=NAME"
        raise RecipeError(Problem("model.logits", FIELD, message, fix))


def _check_names(origin: Origin, module: nn.Module) -> None:
    """Raises RecipeError for names in `model.parts` that are no modules."""
    names = [name for name, _ in module.named_modules() if name]
    problems = [
        Problem("model.parts", f"model.parts.{part}", f"{origin.build} has no module {name}{did_you_mean(name, names)}")
        for part, name in json.loads(origin.parts).items()
        if name not in names
    ]
    if problems:
        raise RecipeError(problems)


def _embedding(origin: Origin, calls: list[Call]) -> str:
    """Returns the name of the first table that is given as many indices as there are tokens."""
    for call in calls:
        if isinstance(call.module, nn.Embedding) and call.inputs[0].shape == TINY_TOKENS:
            return call.name
    message = f"{origin.build} passes its tokens to no torch.nn.Embedding"
    raise RecipeError(Problem("model.parts", FIELD, message, "name it: --set model.parts.embedding=NAME"))


def _layers(module: nn.Module, calls: list[Call]) -> str:
    """Returns the name of the longest list whose modules run once each, in their order; of equals, the outermost."""
    order = {id(call.module): number for number, call in enumerate(calls)}
    times = Counter(id(call.module) for call in calls)
    candidates = []
    for name, each in module.named_modules():
        if not isinstance(each, nn.ModuleList | nn.Sequential) or any(part.isdigit() for part in name.split(".")):
            continue
        keys = [id(layer) for layer in each]
        if keys and all(times[key] == 1 for key in keys) and keys == sorted(keys, key=order.__getitem__):
            candidates.append((len(keys), name))
    return max(candidates, key=lambda found: (found[0], -found[1].count(".")), default=(0, ""))[1]


def _head(calls: list[Call], output: OwnOutput) -> str:
    """Returns the name of the linear layer whose result is, up to its dtype, the logits."""
    assert output.logits is not None
    for call in reversed(calls):
        if isinstance(call.module, nn.Linear) and isinstance(call.output, Tensor):
            same = call.output.shape == output.logits.shape
            return call.name if same else ""
    return ""


def _without_gradient(module: nn.Module, output: OwnOutput) -> tuple[str, ...]:
    assert output.logits is not None
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    total = output.logits.sum() if output.aux_loss is None else output.logits.sum() + output.aux_loss
    gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    return tuple(name for name, gradient in zip(trained, gradients, strict=True) if gradient is None)


def _is_random(module: nn.Module) -> bool:
    """Whether the results of two passes in training differ."""
    module.train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first, second = (as_output(module(tiny_tokens(module))).logits for _ in range(2))
    assert first is not None
    assert second is not None
    return not torch.equal(first, second)


@cache
def check_module(origin: Origin) -> None:
    """Raises RecipeError for a model that training could not treat as a language model.

    On a tiny copy: rows of a batch must not influence each other, since every layout divides a batch into other rows;
    a position must not see later tokens; nothing may be kept between calls that `state_dict` does not have; and no two
    parameters may be at the same place in memory.
    """
    tiny = origin.with_arguments(origin.tiny_arguments(LAYERS))
    module = build_module(tiny)
    module.train(not find_parts(origin).is_random)
    tokens = tiny_tokens(module)
    later = tokens.clone()
    later[:, -1] = (later[:, -1] + 1) % int(tokens.max() + 1)
    with torch.no_grad():
        whole = _logits(module, tokens)
        alone = torch.cat([_logits(module, row[None]) for row in tokens])
        before = _logits(module, later)[:, :-1]
        again = build_module(tiny)
        again.load_state_dict(module.state_dict())
        again.train(module.training)
        fresh, used = _logits(again, tokens), _logits(module, tokens)
    faults = {
        "the logits of a row depend on the other rows of the batch": (whole, alone),
        "the logits of a position depend on later tokens": (whole[:, :-1], before),
        "it keeps a state between calls that its state_dict does not have": (used, fresh),
    }
    problems = [
        Problem("model.trial", FIELD, f"{origin.build} cannot be trained: {fault} (by {deviation:.0e})")
        for fault, results in faults.items()
        if (deviation := float((results[0] - results[1]).abs().max() / results[0].abs().max())) > TOLERANCE
    ]
    if problems := [*problems, *_tied_by_data(origin, module)]:
        raise RecipeError(problems)


def _tied_by_data(origin: Origin, module: nn.Module) -> Iterator[Problem]:
    """Yields parameters that begin at the same place in memory: each would be updated with its own gradient."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        first = names.setdefault(parameter.data_ptr(), name)
        if first != name and parameter.numel():
            message = f"{origin.build} has two parameters with the same memory: {first} and {name}"
            yield Problem("model.tied", FIELD, message, f"make {name} the same nn.Parameter as {first}")


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    logits = as_output(module(tokens)).logits
    assert logits is not None
    return logits
