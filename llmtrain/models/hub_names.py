"""Translates between the names of weights in files of the hub and in modules of `transformers`, which may differ.

The experts of a layer are one tensor in a module but one tensor per expert in a file; a head may be missing because it
is tied; a prefix may be missing. `transformers` can translate a whole model. Here it translates one weight at a time,
or the few that belong together, and only these are in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    WeightConverter,
    conversion_mapping,
    core_model_loading,
)

from llmtrain.errors import Problem, RecipeError
from llmtrain.models.classifier import decoder_of
from llmtrain.overrides.torch import persistent_buffers
from llmtrain.overrides.transformers import skipped_patterns
from llmtrain.plan.facts.wrapper import Wrapper

Read = Callable[[str], Tensor]
"""Returns a tensor, given its name."""
OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"attn\.(masked_)?bias$")
"""Patterns of tensors in old checkpoints that a model computes by itself."""


@contextmanager
def remote_code_errors(model: str) -> Iterator[None]:
    """Raises RecipeError, with the option that permits it, if `transformers` refuses to run the code of a model.

    model: its folder or hub name.
    """
    try:
        yield
    except ValueError as error:
        if "`trust_remote_code=True`" not in str(error):
            raise
        message = "comes with its own code, which is not run unless you permit it"
        fix = "inspect the code, and permit it with --trust-remote-code"
        raise RecipeError(Problem("model.remote_code", model, message, fix)) from None


def empty_model(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Builds a model on the meta device."""
    with torch.device("meta"):
        model = decoder_of(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model


def aliases(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Maps each name of a weight to all names of that weight; a tied weight has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group} | {
        name: (name,) for name in persistent_buffers(model)
    }


class WeightExporter:
    """The weights of a model with the names, order and layout of `save_pretrained`."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        """model: on the meta device, with the dtypes that are written. names: its weights, tied ones once."""
        self._model = model
        self._meta = dict(model.named_parameters(remove_duplicate=False)) | persistent_buffers(model)
        self._sources: dict[str, tuple[str, ...]] = {}
        self.like: dict[str, Tensor] = {}
        """Maps each name in a file, in the order of the files, to a meta tensor of that shape and dtype."""
        for group in self._groups(names):
            for name, tensor in core_model_loading.revert_weight_conversion(
                model, {weight: self._meta[weight].data for weight in group}
            ).items():
                self._sources[name], self.like[name] = group, tensor
        self._converted: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})

    def tensor(self, name: str, read: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Returns a tensor of a file.

        read: is given a weight's name and a meta tensor like it, and returns the weight flattened, in any precision.
        Tensors made from the same weights are kept for the next call; nothing else is.
        """
        group = self._sources[name]
        if self._converted[0] != group:
            self._converted = ((), {})
            weights = {
                weight: read(weight, self._meta[weight]).view(self._meta[weight].shape).to(self._meta[weight].dtype)
                for weight in group
            }
            self._converted = (group, dict(core_model_loading.revert_weight_conversion(self._model, weights)))
        return self._converted[1][name]

    def _groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """Yields the weights that are translated together, in the order of `transformers`."""
        conversions = [
            conversion
            for conversion in conversion_mapping.get_model_conversion_mapping(self._model, add_legacy=False)
            if not isinstance(conversion, core_model_loading.PrefixChange)
        ]
        if not conversions:
            yield from ((name,) for name in names)
            return
        back = [conversion.reverse_transform() for conversion in reversed(conversions)]
        converters = [conversion for conversion in back if isinstance(conversion, WeightConverter)]
        groups: dict[str, list[str]] = {}
        for name in sorted(names, key=core_model_loading.dot_natural_key):
            translated, pattern = core_model_loading.apply_converters(name, converters)
            groups.setdefault(translated if pattern else name, []).append(name)
        yield from map(tuple, groups.values())


@dataclass
class _FileTensors:
    """The tensors that a weight is made of."""

    target: str
    """The model's name for the weight made from these tensors; the first of several if a converter makes them."""
    converter: WeightConverter | None
    keys: list[tuple[str, str]] = field(default_factory=list)
    """Names in the files, each with the pattern that it matches."""


class WeightImporter:
    """The weights of a model, made from the tensors of files as `from_pretrained` does."""

    def __init__(self, model: PreTrainedModel, files: Mapping[str, Tensor]) -> None:
        """model: whole, on the meta device. files: maps each name to a meta tensor of that shape and dtype."""
        self._model = model
        self.unused: list[str] = []
        """Names in the files of what is neither a weight nor a buffer of the model, nor skipped by its class."""
        self._file_tensors: dict[str, _FileTensors] = {}
        self._meta: dict[str, Tensor] = {}
        self._aliases = aliases(model)
        for origin in self._match_files(files):
            for name, tensor in self._converted(origin, lambda key: files[key]).items():
                self._file_tensors[name] = origin
                self._meta[name] = tensor

    def untie(self) -> None:
        """Lets a head that the files lack, because it is tied there, begin as a copy of the embedding."""
        names = {
            id(weight): name for name, weight in reversed(list(self._model.named_parameters(remove_duplicate=False)))
        }
        head, table = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        if head is not None and head.weight is not table.weight:
            head_name, table_name = names[id(head.weight)], names[id(table.weight)]
            self._aliases[head_name] = (*self._aliases[head_name], *self._aliases[table_name])

    def stored(self, group: Iterable[str]) -> list[str]:
        """Returns those names of a weight under which the files hold it."""
        return [name for name in group if name in self._file_tensors]

    def has(self, name: str) -> bool:
        """Returns whether the files hold a weight, under any of its names."""
        return self._own_name(name) is not None

    def like(self, name: str) -> Tensor:
        """Returns a meta tensor like a weight that the files hold."""
        return self._meta[self._own_name(name) or name]

    def shape(self, name: str) -> torch.Size:
        """Returns the shape of a weight that the files hold."""
        return self.like(name).shape

    def tensor(self, name: str, read: Read) -> Tensor:
        """Returns a weight. read: returns a tensor of the files. Raises KeyError if the files lack the weight."""
        stored_name = self._own_name(name)
        if stored_name is None:
            raise KeyError(name)
        return self._converted(self._file_tensors[stored_name], read)[stored_name]

    def origins(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Yields weights with the tensors that they are made from: their names, and the patterns that these match.

        Several weights that are made together are yielded once, by the first of their names.
        """
        for origin in {id(origin): origin for origin in self._file_tensors.values()}.values():
            yield origin.target, origin.keys

    def _own_name(self, name: str) -> str | None:
        """Returns the name under which the files hold a weight."""
        return next((alias for alias in (name, *self._aliases.get(name, ())) if alias in self._file_tensors), None)

    def _match_files(self, files: Iterable[str]) -> Iterable[_FileTensors]:
        """Makes the same choice as `transformers.core_model_loading.convert_and_load_state_dict_in_model`."""
        mapping = conversion_mapping.get_model_conversion_mapping(self._model)
        renamings = [conversion for conversion in mapping if isinstance(conversion, core_model_loading.WeightRenaming)]
        converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
        by_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
        state, prefix = self._model.state_dict(), self._model.base_model_prefix
        buffers = {name for name, _ in self._model.named_buffers()}
        skipped = re.compile("|".join((*skipped_patterns(self._model), *OLD_BUFFERS)))
        origins: dict[str, _FileTensors] = {}
        for key in sorted(files, key=core_model_loading.dot_natural_key):
            target, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = core_model_loading.rename_source_key(key, [], [], prefix, state)
            if target in state:
                converter = by_pattern[pattern] if pattern is not None else None
                origins.setdefault(target, _FileTensors(target, converter)).keys.append((pattern or key, key))
            elif target not in buffers and not skipped.search(key):
                self.unused.append(key)
        return origins.values()

    def _converted(self, origin: _FileTensors, read: Read) -> dict[str, Tensor]:
        if origin.converter is None:
            return {origin.target: read(origin.keys[-1][1])}
        converter = deepcopy(origin.converter)
        for pattern, key in origin.keys:
            converter.add_tensor(origin.target, key, pattern, read(key))
        converted = converter.convert(origin.target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


class PartImporter(WeightImporter):
    """The weights of a text model, made from the files of the multimodal model of which it is a part."""

    def __init__(self, wrapper: Wrapper, files: Mapping[str, Tensor]) -> None:
        """wrapper: the multimodal model; other arguments: as for `WeightImporter`."""
        super().__init__(wrapper.model, files)
        self._part = wrapper.part

    def stored(self, group: Iterable[str]) -> list[str]:
        """Returns those names of a weight of the text model under which the files hold it."""
        return [name for name in group if self._part.whole(name) in self._file_tensors]

    def _own_name(self, name: str) -> str | None:
        return super()._own_name(self._part.whole(name))
