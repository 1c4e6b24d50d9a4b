"""Selects the trained part of a model: all of it, parameters by name, or low-rank adapters as those of PEFT.

PEFT puts a module in the place of a linear layer, which becomes its child `base_layer`. Everything that names a weight
for others (checkpoints, exports, `verify`) uses `weight_name`, so that weights keep their Hugging Face names, and
adapters of linear layers have those of PEFT's files. Adapters of single parameters, such as fused experts, are updates
(`models.experts`), and named as if the parameter were a layer. Their names and shapes in PEFT's files are those of
modules that PEFT wraps around each other (`peft.tuners.lora.layer.ParamWrapper`).

`modules_to_save` are trained in place. PEFT would train a copy and keep the original, so that an adapter can
be switched off; the computed gradients are the same.

PEFT is imported where it is used, because the import takes a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.errors import Problem, RecipeError, abbreviate
from llmtrain.models import nf4
from llmtrain.models.adapter_files import (
    from_file,
    is_adapter,
    pretrained_adapter,
    read_adapter,
    stored_modules,
    stored_name,
    to_file,
)
from llmtrain.models.experts import add_update, updates
from llmtrain.models.hub_names import aliases, empty_model
from llmtrain.models.initial import Gather, seed_for_name
from llmtrain.models.loss import freeze_unused, target_loss_sum
from llmtrain.models.sharding import Sharding, made_whole
from llmtrain.models.stages import Stage
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import COPY_ERRORS, build_tiny_model, packed_input
from llmtrain.plan.facts.built_model import STACKS, has_fused_experts, without_gradient
from llmtrain.plan.facts.images import IMAGE_FAMILIES, reads_images
from llmtrain.plan.facts.model import TextPart
from llmtrain.plan.facts.model_facts import part_of
from llmtrain.plan.facts.trained import matches
from llmtrain.recipe import LoraConfig, ModelConfig, Recipe

if TYPE_CHECKING:
    import peft

ADAPTER = "default"
"""PEFT's name of a model's only adapter."""

_OF_PARAMETER = re.compile(r"\.lora_([AB])_(\w+)$")
"""The end of the name of a matrix of an update."""


def weight_name(name: str) -> str:
    """Returns the name of a parameter without PEFT's additions: its Hugging Face name, or that in an adapter's file.

    The names of updates are made alike: `experts.lora_A_down_proj` is `experts.down_proj.lora_A.weight`.
    """
    plain = name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")
    return _OF_PARAMETER.sub(lambda end: ("" if end[2] == "weight" else f".{end[2]}") + f".lora_{end[1]}.weight", plain)


@dataclass(frozen=True)
class Trained:
    """The part of the whole model that a recipe trains."""

    weights: frozenset[str]
    """Names of the parameters that are trained themselves; a tied one is listed under its first name."""
    modules: tuple[str, ...] = ()
    """Names of the linear layers with an adapter, in the model's order."""
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Names of the parameters with an adapter that belong to no linear layer, in the model's order; their shapes."""
    saved: tuple[str, ...] = ()
    """Names of the modules that are trained as a whole and saved with the adapter."""
    config: peft.LoraConfig | None = None
    """The adapter's configuration, if there is one."""
    packed: frozenset[str] = frozenset()
    """Names of the frozen weights that are held in 4 bits."""


def select_trained(recipe: Recipe, config: PreTrainedConfig) -> Trained | None:
    """Returns the part of the model that a recipe trains; None if it freezes nothing. Nothing is allocated.

    Raises RecipeError with all patterns that match nothing, and for layers that cannot have an adapter.
    """
    model = recipe.model
    if not model.is_partly_frozen:
        return None
    whole = freeze_unused(empty_model(config, torch.float32, model.trust_remote_code))
    if model.adapter is None:
        return _select_by_name(model, whole)
    lora = adapter_configuration(model.adapter)
    if model.adapter.pretrained is not None and (part := part_of(model, config)) is not None:
        lora = of_text_model(lora, whole, part)
    saved, problems = saved_modules(whole, lora)
    adapted, others = _adapted_modules(whole, model.adapter, lora, saved)
    parameters, more = _adapted_parameters(whole, model.adapter, lora, saved)
    if problems or others or more:
        raise RecipeError([*others, *more, *problems])
    weights = frozenset(
        f"{name}.{parameter}" for name in saved for parameter, _ in whole.get_submodule(name).named_parameters()
    )
    packed = nf4.packed_names(whole, weights) if model.quantize == "nf4" else frozenset()
    trained = Trained(weights, adapted, parameters, saved, lora, packed)
    if not reads_images(config):  # these families call all of their linear layers
        _check_used(config, trained)
    return trained


def adapter_configuration(adapter: LoraConfig) -> peft.LoraConfig:
    """Returns PEFT's configuration of an adapter; the names of its targets are not resolved.

    Raises RecipeError for a pretrained adapter of another kind.
    """
    import peft

    if adapter.pretrained is not None:
        return pretrained_adapter(adapter)
    assert adapter.rank is not None, "the recipe requires it"
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.rank if adapter.alpha is None else adapter.alpha,
        lora_dropout=adapter.dropout,
        use_dora=adapter.dora,
        use_rslora=adapter.rslora,
        modules_to_save=list(adapter.modules_to_save) or None,
    )


def of_text_model(lora: peft.LoraConfig, whole: PreTrainedModel, part: TextPart) -> peft.LoraConfig:
    """Returns the configuration of an adapter of a multimodal model for its text model alone.

    whole: the text model. part: its place in the multimodal model; names that are already its own stay.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    def own(names: Iterable[str]) -> list[str]:
        return [part.own(name) or name for name in names]

    changed, targets = copy(lora), lora.target_modules
    if isinstance(targets, str) and targets.lower() != "all-linear":  # an expression for names in the whole
        linear = [name for name, module in whole.named_modules() if is_linear(module)]
        changed.target_modules = {name for name in linear if check_target_module_exists(lora, part.whole(name))}
    elif targets is not None and not isinstance(targets, str):
        changed.target_modules = set(own(targets))
    changed.target_parameters = own(lora.target_parameters or ()) or None
    changed.modules_to_save = own(lora.modules_to_save or ()) or None
    for values in ("rank_pattern", "alpha_pattern"):
        of_names = (getattr(lora, values) or {}).items()
        setattr(changed, values, {part.own(name) or name: value for name, value in of_names})
    return changed


def of_whole_model(lora: peft.LoraConfig, part: TextPart) -> peft.LoraConfig:
    """Returns the configuration of an adapter of a text model for the multimodal model: the inverse of the above.

    Its targets have to be the names of modules, as `outline` returns them.
    """
    changed = copy(lora)
    changed.target_modules = {part.whole(name) for name in lora.target_modules or ()}
    changed.target_parameters = [part.whole(name) for name in lora.target_parameters or ()] or None
    changed.modules_to_save = [part.whole(name) for name in lora.modules_to_save or ()] or None
    for values in ("rank_pattern", "alpha_pattern"):
        of_names = (getattr(lora, values) or {}).items()
        setattr(changed, values, {part.whole(name): value for name, value in of_names})
    return changed


def apply_adapter(
    model: PreTrainedModel,
    trained: Trained | None,
    recipe: Recipe,
    gather: Gather | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Freezes the parameters that are not trained, and adds the adapters with their initial or pretrained weights.

    model: whole, or a part of it with the same names of modules. gather: as for `draw_all_weights`. names: of the
    part's parameters in the whole model, if any differ.
    """
    if trained is None:
        return
    for name, parameter in model.named_parameters():
        is_trained = (names or {}).get(name, name) in trained.weights
        parameter.requires_grad_(is_trained and parameter.requires_grad)
    if trained.config is None:
        return
    _add_adapters(model, trained)
    values = None
    if recipe.model.adapter and recipe.model.adapter.pretrained:
        values = read_adapter(recipe.model.adapter, part_of(recipe.model, model.config))
    _initialize_adapters(model, recipe.train.seed, gather, values, names or {}, stored_modules(trained.parameters))


def outline(model: PreTrainedModel, recipe: Recipe) -> peft.LoraConfig:
    """Adds the adapters to a model without memory; returns the configuration with which PEFT does the same."""
    trained = select_trained(recipe, model.config)
    assert trained is not None
    assert trained.config is not None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained.weights)
    config = _add_adapters(model, trained)
    config.target_parameters = list(trained.parameters) or None
    config.modules_to_save, config.inference_mode = list(trained.saved) or None, True
    config.ensure_weight_tying = _saves_tied(model, trained.saved)
    return config


def apply_adapter_to_stage(
    stage: Stage, trained: Trained | None, recipe: Recipe, shardings: Sequence[Sharding] = ()
) -> None:
    """Applies the adapter to a pipeline stage, as `apply_adapter` does to a whole model.

    shardings: with them, the stage holds this rank's shards, and so do its adapters.
    """
    names = {stage_name.removeprefix("model."): whole for stage_name, whole in stage.hf_names.items()}
    apply_adapter(stage.model, trained, recipe, partial(made_whole, shardings), names)
    for sharding in shardings:
        sharding.split_adapters(stage.model)
    if trained is not None:
        stage.add_idle_parameters()
    plain_names = ((name, weight_name(name)) for name, _ in nf4.named_weights(stage.model))
    stage.hf_names = {f"model.{name}": names.get(plain, plain) for name, plain in plain_names}


def adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields PEFT's modules that stand for linear layers, with the names of these."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _select_by_name(model: ModelConfig, whole: PreTrainedModel) -> Trained:
    groups = aliases(whole)
    parameters = dict(whole.named_parameters())
    unmatched = [pattern for pattern in model.trainable if not any(fnmatchcase(name, pattern) for name in groups)]
    if unmatched:
        message = f"{', '.join(unmatched)} matches no parameter of {_type(whole)}, whose last one is '{[*groups][-1]}'"
        raise RecipeError(
            Problem("model.trainable", "model.trainable", message, "name parameters, such as 'lm_head.*'")
        )
    weights = frozenset(
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad
        and any(fnmatchcase(alias, pattern) for alias in groups[name] for pattern in model.trainable)
    )
    if not weights:
        message = "names only parameters that no loss depends on"
        raise RecipeError(Problem("model.trainable", "model.trainable", message, "name others"))
    return Trained(weights)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, and not, as Llama 4's router, one of a class whose output is another one."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _adapted_modules(
    whole: PreTrainedModel, adapter: LoraConfig, lora: peft.LoraConfig, saved: tuple[str, ...]
) -> tuple[tuple[str, ...], list[Problem]]:
    """Returns the names of the linear layers that an adapter targets, and problems with them.

    saved: modules that are trained as a whole, and contain no adapters.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    unreached = {name.rpartition(".")[0] for name in without_gradient(whole.config)}
    linear = {name for name, module in whole.named_modules() if is_linear(module)}
    ends = {name for name, module in whole.named_modules() if module is whole.get_output_embeddings()}
    names = [
        name
        for name, _ in whole.named_modules()
        if name and not f"{name}.".startswith(tuple(f"{module}." for module in saved))
    ]
    field = "model.adapter.targets"
    if adapter.pretrained is not None:
        field = "model.adapter.pretrained"
        targeted = [name for name in names if check_target_module_exists(lora, name)]
        matched = {name: [name] for name in targeted}
        if not (targeted or lora.target_parameters):
            matched = {str(lora.target_modules): []}
    elif adapter.targets == "all-linear":
        tower = tuple(IMAGE_FAMILIES[whole.config.model_type].tower) if reads_images(whole.config) else ()
        targeted = [name for name in names if name in linear - ends - unreached and not name.startswith(tower)]
        matched = {"all-linear": targeted}
    else:
        matched = {target: [name for name in names if matches(name, [target])] for target in adapter.targets}
        targeted = [name for name in names if name in linear - unreached and matches(name, adapter.targets)]
    problems = []
    if unmatched := [target for target, modules in matched.items() if not modules]:
        message = f"{', '.join(unmatched)} matches no module of {_type(whole)}"
        layers = sorted({name.rpartition(".")[2] for name in linear - ends})
        problems.append(Problem("adapter.targets", field, message, f"its linear layers are {abbreviate(layers)}"))
    if others := [modules[0] for modules in matched.values() if modules and linear.isdisjoint(modules)]:
        message = (
            f"{abbreviate(others)} of {_type(whole)} is not a linear layer, and has no product to add an adapter to"
        )
        fix = "name linear layers; model.adapter.target_parameters names fused experts"
        problems.append(Problem("adapter.linear", field, message, fix))
    of_linear = [linear.intersection(modules) for modules in matched.values()]
    if idle := [min(modules) for modules in of_linear if modules and modules <= unreached]:
        message = f"the loss of {_type(whole)} does not depend on an adapter of {abbreviate(idle)}"
        problems.append(Problem("adapter.unused", field, message, "name the other linear layers"))
    if heads := [name for name in targeted if name in ends]:
        message = f"{abbreviate(heads)} is the head, whose weight the chunked loss reads directly"
        fix = "train it as a whole, with model.adapter.modules_to_save"
        problems.append(Problem("adapter.head", field, message, fix))
    return tuple(targeted), problems


def _adapted_parameters(
    whole: PreTrainedModel, adapter: LoraConfig, lora: peft.LoraConfig, saved: tuple[str, ...]
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """Returns the parameters that an adapter targets by themselves, with their shapes, and problems with them."""
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in whole.named_parameters()
        if not name.startswith(tuple(f"{module}." for module in saved))
    }
    field, patterns = "model.adapter.target_parameters", list(adapter.target_parameters)
    matched = {pattern: [name for name in shapes if matches(name, [pattern])] for pattern in patterns}
    if adapter.pretrained is not None:
        field, patterns = "model.adapter.pretrained", lora.target_parameters or []
        matched = {pattern: _ending(shapes, pattern) for pattern in patterns}
    own = {name: reason for name in shapes if (reason := _no_update(whole, name, shapes[name]))}
    problems = []
    if unmatched := [pattern for pattern, names in matched.items() if not names]:
        message = f"{', '.join(unmatched)} matches no parameter of {_type(whole)}"
        known = sorted({".".join(name.split(".")[-2:]) for name in shapes.keys() - own.keys()})
        problems.append(Problem("adapter.targets", field, message, f"those of no layer are {abbreviate(known)}"))
    targeted = {name for names in matched.values() for name in names}
    if wrong := [name for name in shapes if name in targeted & own.keys()]:
        message = f"{abbreviate(wrong)} of {_type(whole)} {own[wrong[0]]}"
        fix = "name fused experts or routers; model.adapter.targets names linear layers"
        problems.append(Problem("adapter.parameters", field, message, fix))
    if idle := [name for name in without_gradient(whole.config) if name in targeted]:
        message = f"the loss of {_type(whole)} does not depend on an adapter of {abbreviate(idle)}"
        problems.append(Problem("adapter.unused", field, message, "name other parameters"))
    return {name: shape for name, shape in shapes.items() if name in targeted}, problems


def _no_update(whole: PreTrainedModel, name: str, shape: tuple[int, ...]) -> str:
    """Returns why a parameter cannot have an adapter of its own; empty if it can."""
    path, _, attribute = name.rpartition(".")
    module = whole.get_submodule(path)
    if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        return "belongs to a layer, which has an adapter as a whole"
    if len(shape) not in (2, 3):
        return "is neither a matrix nor a stack of matrices"
    if has_fused_experts(module) and attribute not in STACKS:
        return "is added to the products of experts"
    return ""


def _ending(names: Iterable[str], target: str) -> list[str]:
    """Returns the names that PEFT takes for one of its `target_parameters`."""
    return [name for name in names if name == target or name.endswith(f".{target}")]


def targeted_parameters(whole: PreTrainedModel, lora: peft.LoraConfig) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the parameters that PEFT adapts in a model by themselves, in its order."""
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    targeted = {name for target in lora.target_parameters or () for name in _ending(shapes, target)}
    return {name: shape for name, shape in shapes.items() if name in targeted}


def rank_of(lora: peft.LoraConfig, name: str) -> int:
    """Returns the rank of the adapter of a layer or parameter."""
    return int(_of_pattern(lora.rank_pattern, name, lora.r))


def scale_of(lora: peft.LoraConfig, name: str) -> float:
    """Returns by what an adapter's update is multiplied (`peft.tuners.lora.layer.LoraLayer.update_layer`)."""
    rank, alpha = rank_of(lora, name), float(_of_pattern(lora.alpha_pattern, name, lora.lora_alpha))
    return alpha / (math.sqrt(rank) if lora.use_rslora else rank)


def _of_pattern(pattern: dict[str, Any] | None, name: str, default: Any) -> Any:
    """Returns what PEFT takes for a name: the value of the first pattern that matches it, or the default."""
    from peft.utils.other import get_pattern_key

    values = pattern or {}
    return values.get(get_pattern_key(values.keys(), name), default)


def targeted_layers(whole: PreTrainedModel, lora: peft.LoraConfig) -> list[str]:
    """Returns the names of the linear layers that PEFT adapts in a model, in the model's order."""
    from peft.tuners.tuners_utils import check_target_module_exists

    head, targets = whole.get_output_embeddings(), lora.target_modules
    linear = {name: module for name, module in whole.named_modules() if is_linear(module)}
    if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return [name for name, module in linear.items() if targets and module is not head]
    return [name for name in linear if check_target_module_exists(lora, name)]


def saved_modules(whole: PreTrainedModel, lora: peft.LoraConfig) -> tuple[tuple[str, ...], list[Problem]]:
    """Returns the names of the modules that are trained as a whole, and the problems with them."""
    patterns = lora.modules_to_save or []
    saved = [name for name, _ in whole.named_modules() if name and matches(name, patterns)]
    field, problems = "model.adapter.modules_to_save", []
    if unmatched := [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in saved)]:
        message = f"{', '.join(unmatched)} matches no module of {_type(whole)}"
        problems.append(Problem("adapter.modules", field, message, "name modules, such as 'lm_head'"))
    # A table that embedding and head share is saved under its first name, as PEFT does with `ensure_weight_tying`.
    first = {alias: group[0] for alias, group in aliases(whole).items() if len(group) > 1}
    saved = list(dict.fromkeys(first.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight") for name in saved))
    return tuple(saved), problems


def _saves_tied(whole: PreTrainedModel, saved: Collection[str]) -> bool:
    """Whether embedding and head share a table that is trained as a whole."""
    return any(len(group) > 1 and group[0].removesuffix(".weight") in saved for group in aliases(whole).values())


def _check_used(config: PreTrainedConfig, trained: Trained) -> None:
    """Tries the adapters on a tiny copy of the model. Raises RecipeError if the loss does not depend on one.

    Some forwards read the weight of a linear layer instead of calling it. An adapter would then do nothing, and
    strategies would disagree on whether weight decay applies to it.
    """
    try:
        tiny_config = shrink_configuration(config)
        with torch.random.fork_rng(devices=[]):
            tiny = build_tiny_model(tiny_config, "eager").train()
            shapes = {name: tuple(parameter.shape) for name, parameter in tiny.named_parameters()}
            own = {name: shapes[name] for name in trained.parameters if name in shapes}
            _add_adapters(tiny, replace(trained, parameters=own))
            tokens, positions = packed_input(tiny_config)
            loss = target_loss_sum(tiny(input_ids=tokens, position_ids=positions, use_cache=False).logits, tokens)
            outer = {name: module.lora_B[ADAPTER].weight for name, module in adapters(tiny)}
            outer |= {f"{path}.{name}": one.b for path, module in tiny.named_modules() for name, one in updates(module)}
            gradients = torch.autograd.grad(loss, list(outer.values()), allow_unused=True)
    except COPY_ERRORS as error:
        message = f"no adapter can be added to a tiny copy of {config.model_type} ({type(error).__name__}: {error})"
        fix = "name other targets, such as those of attention"
        raise RecipeError(Problem("adapter.family", "model.adapter.targets", message, fix)) from error
    idle = [name for name, gradient in zip(outer, gradients, strict=True) if gradient is None]
    if idle:
        message = f"the loss of {config.model_type} does not depend on an adapter of {abbreviate(idle)}"
        fix = "name the others in model.adapter.targets and model.adapter.target_parameters"
        raise RecipeError(Problem("adapter.unused", "model.adapter.targets", message, fix))


def _add_adapters(model: PreTrainedModel, trained: Trained) -> peft.LoraConfig:
    """Adds the adapters of the layers and parameters that a part of the model holds; returns PEFT's configuration."""
    assert trained.config is not None
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, shape in trained.parameters.items():
        path, _, attribute = name.rpartition(".")
        if getattr(modules.get(path), attribute, None) is not None:
            add_update(modules[path], attribute, shape, rank_of(trained.config, name), scale_of(trained.config, name))
    return _inject_adapter(model, trained.config, _adapted_layers_in(model, trained))


def _inject_adapter(model: PreTrainedModel, lora: peft.LoraConfig, names: list[str]) -> peft.LoraConfig:
    """Puts PEFT's modules in the place of linear layers; returns their configuration.

    Leaves the random state as it is.
    """
    import peft

    injected = copy(lora)
    injected.target_modules, injected.modules_to_save, injected.exclude_modules = set(names), None, None
    injected.layers_to_transform = injected.layers_pattern = injected.target_parameters = None
    injected.init_lora_weights, injected.inference_mode = True, False
    if not names:
        return injected
    injected.fan_in_fan_out = isinstance(model.get_submodule(names[0]), Conv1D)
    frozen = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    devices = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        peft.inject_adapter_in_model(injected, model, ADAPTER)
    # In some mixtures of experts PEFT takes the names of other layers for those of experts.
    if others := {name for name, _ in adapters(model)} ^ set(names):
        raise ValueError(f"PEFT adapts other modules than requested; they differ in {abbreviate(sorted(others))}")
    for parameter in model.parameters():
        parameter.requires_grad_(frozen.get(id(parameter), True))
    for _, module in adapters(model):
        # PEFT keeps adapters in fp32. Here they have fp32 masters, like every weight, and the model's own data type.
        dtype = module.get_base_layer().weight.dtype
        if dtype.is_floating_point:
            for part in (module.lora_A, module.lora_B, module.lora_magnitude_vector):
                part.to(dtype)
    return injected


@torch.no_grad()
def _initialize_adapters(
    model: PreTrainedModel,
    seed: int,
    gather: Gather | None,
    values: Mapping[str, Tensor] | None,
    names: Mapping[str, str],
    stored: Mapping[str, str],
) -> None:
    """Writes the initial values: A as `nn.Linear` draws it, from the seed and its name, and zeros for B.

    values: those of a pretrained adapter, including the modules that it trains as a whole. stored: of `stored_modules`.
    """
    for name, parameter in model.named_parameters():
        weight = weight_name(names.get(name, name))
        if not parameter.requires_grad or not (is_adapter(weight) or values is not None):
            continue
        with nullcontext() if gather is None or is_adapter(weight) else gather([parameter]):
            if values is not None:
                parameter.copy_(_pretrained_value(values, stored_name(weight, stored), parameter))
            elif ".lora_A." in weight:
                parameter.copy_(_draw_lora_a(parameter, seed_for_name(seed, weight)))
    if values is not None and names == {}:
        trained = (weight_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad)
        tied = aliases(model)
        known = {stored_name(alias, stored) for name in trained for alias in tied.get(name, (name,))}
        if extra := sorted(values.keys() - known):
            message = f"contains weights that the model does not have: {abbreviate(extra)}"
            raise RecipeError(Problem("adapter.pretrained", "model.adapter.pretrained", message))


def _draw_lora_a(like: Tensor, seed: int) -> Tensor:
    """Draws A as LoRA's own code does (`loralib/layers.py`), in fp32 and on the host, so that ranks draw alike.

    For experts, it is drawn as the matrix of PEFT's file.
    """
    drawn = torch.empty(like.shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    return nn.init.kaiming_uniform_(drawn.flatten(0, -2), a=math.sqrt(5), generator=generator).view(like.shape)


def _pretrained_value(values: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    value, shape = values.get(name), to_file(name, like.detach().to("meta")).shape
    if value is None or value.shape != shape:
        message = f"has no weight '{name}'" if value is None else f"'{name}' is {list(value.shape)}, not {list(shape)}"
        raise RecipeError(Problem("adapter.pretrained", "model.adapter.pretrained", message))
    return from_file(name, value, tuple(like.shape)).to(like)


def _adapted_layers_in(model: nn.Module, trained: Trained) -> list[str]:
    """Returns the names of the linear layers with an adapter that a part of the whole model holds."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return [name for name in trained.modules if isinstance(modules.get(name), nn.Linear | Conv1D)]


def _type(model: PreTrainedModel) -> str:
    return str(model.config.model_type)
