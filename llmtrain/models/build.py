"""Builds the model of a recipe, whole or partitioned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial, reduce
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from llmtrain.errors import Problem, RecipeError, reason
from llmtrain.models import adapter, nf4
from llmtrain.models.classifier import declare_head, decoder_of
from llmtrain.models.hub_names import empty_model, remote_code_errors
from llmtrain.models.initial import Gather, draw_all_weights
from llmtrain.models.loss import freeze_unused
from llmtrain.models.own import InitialWeights, own_configuration
from llmtrain.models.pretrained import Pretrained, read_pretrained
from llmtrain.models.rotary import check_rotary
from llmtrain.models.sharding import Sharding, made_whole
from llmtrain.models.stages import Cut, Stage, allocate, build_stage
from llmtrain.models.tensor.collectives import Communicator
from llmtrain.models.tensor.split import DeclaredSplit, TensorParallel
from llmtrain.models.tiny.expert_check import check_experts
from llmtrain.models.tiny.stages_check import check_cut
from llmtrain.models.tiny.tensor_check import check_tensor_split
from llmtrain.overrides.torch import parameters_without_memory, persistent_buffers
from llmtrain.plan.facts.built_model import decoder_lists
from llmtrain.plan.facts.classifier import HEAD, MODULE
from llmtrain.plan.facts.families import WRAPPERS
from llmtrain.plan.facts.model_facts import dropout_of, model_facts, pretrained_configuration
from llmtrain.plan.facts.pretrained_config import has_own_code, pretrained_config, pretrained_folder
from llmtrain.plan.facts.rotary import effective_overrides
from llmtrain.plan.facts.wrapper import declare_causal_lm, text_of
from llmtrain.plan.stages import stage_bounds
from llmtrain.recipe import ModelConfig, Recipe


def model_configuration(recipe: Recipe) -> PreTrainedConfig:
    """Returns the configuration of a recipe's model. Raises RecipeError like `configuration_of` and `declare_head`."""
    if recipe.model.build is not None:
        return own_configuration(recipe.model, recipe.vocab_size, recipe.code_dir, recipe.train.seed)
    values = dict(recipe.model.config)
    if recipe.model.architecture is not None and recipe.vocab_size is not None:
        values["vocab_size"] = recipe.vocab_size
    config = configuration_of(recipe.model, values)
    declare_head(config, recipe.model.num_labels)
    return config


def configuration_of(model: ModelConfig, values: dict[str, Any]) -> PreTrainedConfig:
    """Returns the `transformers` configuration of a model, with `values` for some fields.

    Raises RecipeError if the architecture does not exist, the pretrained model cannot be found or comes with code that
    may not be run, or its class refuses a value.
    """
    values = deepcopy(values)  # `transformers` adds defaults to the dictionaries that it is given
    try:
        if model.architecture is not None:
            made = AutoConfig.for_model(model.architecture, **values)
            if made.model_type in WRAPPERS.values():
                declare_causal_lm(type(made))
            return made
        pretrained_folder(model)
        with remote_code_errors(str(model.pretrained)):
            config = pretrained_configuration(model, values)
        if values and not has_own_code(model, vars(config)):
            _check_effect(model, type(text_of(config)), values)
        return config
    except (ValueError, OSError, TypeError, StrictDataclassError) as error:
        field = "model.architecture" if model.architecture else "model.pretrained"
        raise RecipeError(
            Problem("model.config", field, f"{model.architecture or model.pretrained!r}: {reason(error)}")
        ) from error


def _check_effect(model: ModelConfig, kind: type[PreTrainedConfig], values: dict[str, Any]) -> None:
    """Raises RecipeError if overridden fields would change another one, which the configuration declares, too.

    Layers of Qwen2, for example, follow `layer_types`. This list is derived from `use_sliding_window` only while
    `config.json` lacks it.
    """
    _, declared = pretrained_config(model)

    def derived(name: str, fields: dict[str, Any]) -> Any:
        return kind.from_dict({key: value for key, value in fields.items() if key != name}).to_dict().get(name)

    for name in (name for name, value in declared.items() if isinstance(value, list) and name not in values):
        before, after = derived(name, declared), derived(name, declared | values)
        if before == declared[name] and after[: len(before)] != before[: len(after)]:
            message = f"{', '.join(values)} would change {name}, which {model.pretrained} declares itself"
            fix = f"--set 'model.config.{name}={json.dumps(after)}'"
            raise RecipeError(Problem("model.config_key", "model.config", message, fix))


def training_configuration(recipe: Recipe) -> PreTrainedConfig:
    """Returns the configuration with which a recipe's model trains. Raises RecipeError like `configuration_of`.

    With an objective of completions, dropout is off unless `model.config` asks for it: the log-probabilities of the
    reference have none, so that even the first loss of DPO would not be ln 2. TRL turns it off, too
    (`disable_dropout`).
    """
    config = model_configuration(recipe)
    if recipe.objective.is_preference:
        for part in (config, config.get_text_config()):
            for name in dropout_of(part.to_dict()).keys() - recipe.model.config.keys():
                setattr(part, name, 0.0)
    return config


def build_model(
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
    partitioned: Callable[[], AbstractContextManager[object]] | None = None,
    gather: Gather | None = None,
    is_reader: bool = True,
) -> PreTrainedModel:
    """Builds the recipe's causal LM with its initial or pretrained weights.

    partitioned, gather: ZeRO-3's context managers for building partitioned parameters and for gathering them. With
    them, no rank ever holds the whole model, and ranks with `is_reader` read pretrained weights one tensor at a time.
    """
    config = training_configuration(recipe)
    trained = adapter.select_trained(recipe, config)
    packed = {name: name for name in trained.packed} if trained else {}
    # This lookup imports the model's classes. If they were first imported inside ZeRO-3's context, their constructors
    # would lose their decorators when the context ends.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # Packed weights are made on the device one at a time; on the host, untouched pages take no memory.
    with torch.device("cpu" if packed else device), no_init_weights(), (partitioned or nullcontext)():
        model = causal_lm(config, recipe.model, dtype)
    model.tie_weights()
    weights = {name: parameter for name, parameter in model.named_parameters() if name not in packed}
    _set_weights(model, weights, recipe, config, gather, is_reader)
    if packed:
        nf4.pack_weights(model, packed, read_pretrained(recipe.model, config).tensor, device, dtype)
        model.to(device)
    adapter.apply_adapter(freeze_unused(model), trained, recipe, gather)
    return model


def causal_lm(config: PreTrainedConfig, model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model of a configuration, with weights as the active contexts make them."""
    return decoder_of(
        config,
        attn_implementation=model.attention_kernel,
        dtype=dtype,
        trust_remote_code=model.trust_remote_code,
    )


def build_sharded(
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
    shardings: Sequence[Sharding],
    partition: Callable[[torch.nn.Module], None] = lambda _: None,
    gather: Gather = lambda _: nullcontext(),
    is_reader: bool = True,
) -> PreTrainedModel:
    """Builds a rank's shards of the recipe's causal LM with its initial or pretrained weights.

    shardings: of tensor and expert parallelism; each parameter is sharded by at most one of them. A parameter is whole
    only while it is initialized or read. partition, gather: ZeRO-3's, with which no rank holds more than its shards of
    a layer; ranks with `is_reader` read pretrained weights.
    """
    config = training_configuration(recipe)
    trained = adapter.select_trained(recipe, config)
    packed = {name: name for name in trained.packed} if trained else {}
    home = torch.device("cpu") if packed else device  # as in `build_model`
    with no_init_weights(), parameters_without_memory(), torch.device(home):
        model = causal_lm(config, recipe.model, dtype)
    freeze_unused(model).tie_weights()
    for name, parameter in model.named_parameters():
        for sharding in shardings:
            sharding.shard(name, parameter)
    for part in (*(layer for layers in decoder_lists(model).values() for layer in layers), model):
        allocate(part, home)
        partition(part)
    for sharding in shardings:
        sharding.install(model, {name: name for name, _ in model.named_parameters()})

    @contextmanager
    def whole(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        with gather(parameters), made_whole(shardings, parameters):
            yield

    weights = {name: parameter for name, parameter in model.named_parameters() if name not in packed}
    _set_weights(model, weights, recipe, config, whole, is_reader)
    if packed:
        nf4.pack_weights(model, packed, _reader(recipe, config, shardings), device, dtype)
        model.to(device)
    adapter.apply_adapter(model, trained, recipe, whole)
    for sharding in shardings:
        sharding.split_adapters(model)
    return model


def _reader(recipe: Recipe, config: PreTrainedConfig, shardings: Sequence[Sharding]) -> Callable[[str], torch.Tensor]:
    """Returns a function that reads this rank's part of a pretrained weight, given its name."""
    read = read_pretrained(recipe.model, config).tensor
    return lambda name: reduce(lambda weight, sharding: sharding.part(name, weight), shardings, read(name))


def check_weights(recipe: Recipe) -> None:
    """Raises RecipeError like `read_pretrained` if the recipe's pretrained weights are not those of its model.

    Raises it also, like `check_rotary`, if the model does not compute the rotary positions that the recipe gives.
    """
    model = recipe.model
    if model.pretrained is not None:
        config = model_configuration(recipe)
        _, declared = pretrained_config(model)
        if not has_own_code(model, declared):
            check_rotary(config, effective_overrides(model.config, declared))
        read_pretrained(model, config)


def check_trained(recipe: Recipe) -> None:
    """Raises RecipeError if the recipe's model does not have what is to be trained, or cannot have its adapters.

    The weights of a pretrained adapter are read and compared with the model's.
    """
    config = model_configuration(recipe)
    trained = adapter.select_trained(recipe, config)
    if recipe.model.adapter and recipe.model.adapter.pretrained is not None:
        whole = empty_model(config, torch.float32, recipe.model.trust_remote_code)
        adapter.apply_adapter(freeze_unused(whole), trained, recipe)


StageBuilder = Callable[..., Stage]
"""Builds a stage, given its index, the `Communicator` of the tensor parallel ranks that share it, and shardings."""


def find_cut_and_split(
    recipe: Recipe, stages: int, tensor: int = 1, sequence_parallel: bool = False
) -> tuple[Cut, DeclaredSplit]:
    """Finds how to cut the recipe's model into balanced stages and how to split it among tensor parallel ranks.

    Both are verified on a tiny copy. tensor: number of ranks that share each stage. sequence_parallel: whether they
    shard the residual stream, if the family allows it. Raises RecipeError if the family cannot be cut or split this
    way, or if there are more stages than layers.
    """
    config, attention = training_configuration(recipe), recipe.model.attention_kernel
    facts = model_facts(recipe.model, recipe.vocab_size, recipe.code_dir)
    cut = check_cut(config, stage_bounds(facts, stages, recipe.data.sequence_length), attention)
    return cut, find_split(config, recipe, tensor, sequence_parallel)


def find_split(config: PreTrainedConfig, recipe: Recipe, tensor: int, sequence_parallel: bool = False) -> DeclaredSplit:
    """Returns how tensor parallel ranks split the recipe's model, after it was verified on a tiny copy.

    config: of the model. Distributed experts, which are verified with it, are not split. tensor and sequence_parallel:
    as in `find_cut_and_split`. Raises FamilyError.
    """
    if recipe.parallel.expert > 1:
        return check_experts(config, tensor, recipe.model.attention_kernel)
    if tensor == 1:
        return DeclaredSplit({}, {})
    return check_tensor_split(config, tensor, recipe.model.attention_kernel, sequence_parallel)


def stage_builder(
    recipe: Recipe,
    stages: int,
    dtype: torch.dtype,
    device: torch.device,
    tensor: int = 1,
    sequence_parallel: bool = False,
) -> StageBuilder:
    """Returns a function that builds the stages of the recipe's model with their initial or pretrained weights.

    Each stage allocates its own weights only. A parameter is whole only while it is initialized or read. Raises
    RecipeError like `find_cut_and_split`.
    """
    config = training_configuration(recipe)
    cut, split = find_cut_and_split(recipe, stages, tensor, sequence_parallel)
    trained = adapter.select_trained(recipe, config)

    def build(index: int, group: Communicator | None = None, more: Sequence[Sharding] = ()) -> Stage:
        shardings = [*([TensorParallel(split, group)] if group else []), *more]
        whole = partial(made_whole, shardings)
        packed = trained.packed if trained else ()
        home = torch.device("cpu") if packed else device  # as in `build_model`
        stage = build_stage(config, index, cut, recipe.model.attention_kernel, dtype, home, shardings)
        weights = {whole: stage.get_parameter(name) for name, whole in stage.hf_names.items() if whole not in packed}
        _set_weights(stage.model, weights, recipe, config, whole)
        if packed:
            names = {name: whole for name, whole in stage.hf_names.items() if whole in packed}
            nf4.pack_weights(stage, names, _reader(recipe, config, shardings), device, dtype)
            stage.to(device)
        adapter.apply_adapter_to_stage(stage, trained, recipe, shardings)
        return stage

    return build


def stage_names(recipe: Recipe, stages: int) -> list[list[str]]:
    """Returns, for each stage, the names of its weights in the whole model. Nothing is allocated.

    Raises RecipeError like `find_cut_and_split`.
    """
    config, (cut, _) = training_configuration(recipe), find_cut_and_split(recipe, stages)
    meta = torch.device("meta")
    built = (
        build_stage(config, index, cut, recipe.model.attention_kernel, torch.float32, meta) for index in range(stages)
    )
    return [sorted(stage.hf_names.values()) for stage in built]


@torch.no_grad()
def _set_weights(
    model: PreTrainedModel,
    weights: Mapping[str, torch.nn.Parameter],
    recipe: Recipe,
    config: PreTrainedConfig,
    gather: Gather | None,
    is_reader: bool = True,
) -> None:
    """Draws the initial weights of a model or stage, or copies pretrained ones, one at a time; a new head is drawn.

    weights: the parameters to copy, by their names in the whole model. Of the ranks that share a partitioned parameter,
    one reads it (`is_reader`) and the others receive their part; every rank holds whole buffers. Raises RecipeError
    like `read_pretrained`.
    """
    if recipe.model.architecture is not None:
        draw_all_weights(model, recipe.train.seed, gather)
        return
    buffers = persistent_buffers(model)
    if recipe.model.pretrained is not None:
        source: Pretrained | InitialWeights = (files := read_pretrained(recipe.model, config))
        if HEAD in weights and not files.has(HEAD):
            draw_all_weights(model, recipe.train.seed, gather, only=MODULE)
            weights = {name: parameter for name, parameter in weights.items() if name != HEAD}
    elif is_reader or buffers:
        source = InitialWeights(config)
    for name, parameter in weights.items():
        with gather([parameter]) if gather else nullcontext():
            if is_reader:
                source.copy_to(name, parameter.data)
    for name, buffer in buffers.items():
        source.copy_to(name, buffer)
