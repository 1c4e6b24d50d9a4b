"""Finds the weights of a model among those of a folder, and names the states of optimizers that only number them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmtrain.checkpoint.foreign.state import (
    PREFIXES,
    ForeignGroup,
    ForeignState,
    ForeignTensor,
    UnnamedOptimizer,
    unwrapped,
)
from llmtrain.errors import CheckpointError, Problem, abbreviate
from llmtrain.models.hub_names import WeightImporter, aliases
from llmtrain.system.piece_headers import WEIGHT

UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_", re.IGNORECASE)
"""What the Trainer does not decay, by name."""


TORCHTITAN = {
    r"tok_embeddings\.": "model.embed_tokens.",
    r"layers\.(\d+)\.attention\.w([qkvo])\.": r"model.layers.\1.self_attn.\2_proj.",
    r"layers\.(\d+)\.feed_forward\.w1\.": r"model.layers.\1.mlp.gate_proj.",
    r"layers\.(\d+)\.feed_forward\.w2\.": r"model.layers.\1.mlp.down_proj.",
    r"layers\.(\d+)\.feed_forward\.w3\.": r"model.layers.\1.mlp.up_proj.",
    r"layers\.(\d+)\.attention_norm\.": r"model.layers.\1.input_layernorm.",
    r"layers\.(\d+)\.ffn_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"norm\.": "model.norm.",
    r"output\.": "lm_head.",
}
"""Beginnings of names in torchtitan's Llama 3 → those of transformers."""
INTERLEAVED = re.compile(r"(?:.*\.)?layers\.\d+\.attention\.w([qk])\.weight")
"""Weights whose rows torchtitan has in pairs of rotary positions, where transformers has two halves of each head."""


class Names:
    """The weights of a model, made from those of a folder."""

    def __init__(
        self, state: ForeignState, model: PreTrainedModel, renames: Sequence[tuple[str, str]], folder: str
    ) -> None:
        """model: on the meta device. renames: patterns of names in the folder, and what replaces them.

        Raises CheckpointError with all weights that are missing, not known to the model, or of another shape.
        """
        self._state = state
        self.shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        self.groups = {name: group for name, group in aliases(model).items() if name == group[0]}
        self.parameters = list(dict(model.named_parameters()))
        """Names of the model's parameters, tied ones once, in its order."""
        self.origin = {new: old for old, new in self._mapped(renames, folder).items()}
        """Name after renaming → name in the folder."""
        meta = {
            new: torch.empty(state.weights[old].shape, dtype=_kind(state.weights[old]), device="meta")
            for new, old in self.origin.items()
        }
        self.importer = WeightImporter(model, meta)
        self._heads = _heads_of(model) if self.is_torchtitan else {}
        self._check(folder)

    def _mapped(self, renames: Sequence[tuple[str, str]], folder: str) -> dict[str, str]:
        """Maps each name of a weight in the folder to one that hub files of the model may have."""
        names = {name: unwrapped(name) for name in self._state.weights}
        for pattern, replacement in renames:
            try:
                names = {name: re.sub(pattern, replacement, new) for name, new in names.items()}
            except re.error as error:
                message = f"{pattern!r} is not a regular expression: {error}"
                raise CheckpointError(Problem("import.rename", "--rename", message)) from None
        self.is_torchtitan = any(name.endswith("tok_embeddings.weight") for name in names.values())
        if self.is_torchtitan:
            names = {name: _of_torchtitan(new) for name, new in names.items() if not new.endswith("freqs_cis")}
        by_prefix = {prefix: self._known(names.values(), prefix) for prefix in PREFIXES}
        best = max(PREFIXES, key=lambda prefix: by_prefix[prefix])
        names = {name: new.removeprefix(best) for name, new in names.items()}
        shapes = {new: self._state.weights[old].shape for old, new in names.items()}
        parameters = {name: self.shapes[name] for name in self.parameters}
        layers = _of_pipeline(list(names.values()), shapes, parameters)
        names = {name: layers.get(new, new) for name, new in names.items()}
        twice = sorted(name for name, count in Counter(names.values()).items() if count > 1)
        if twice:
            message = f"has several weights for {len(twice)} of the model's, such as {abbreviate(twice)}"
            raise CheckpointError(Problem("import.names", folder, message, RENAME))
        return names

    def _known(self, names: Iterable[str], prefix: str) -> int:
        return sum(name.startswith(prefix) and name.removeprefix(prefix) in self.shapes for name in names)

    def _check(self, folder: str) -> None:
        problems = []
        if missing := [name for name in self.groups if not self.importer.has(name)]:
            message = f"lacks {len(missing)} of {len(self.groups)} weights of the recipe's model: {abbreviate(missing)}"
            problems.append(Problem("import.missing", folder, message, RENAME))
        if unused := [
            self.origin[name] for name in self.importer.unused if self.origin[name] not in self._state.buffers
        ]:
            message = f"has {len(unused)} tensors that the recipe's model does not have: {abbreviate(unused)}"
            problems.append(Problem("import.unexpected", folder, message, "use the recipe of this model"))
        present = [name for name in self.groups if self.importer.has(name)]
        wrong = [name for name in present if tuple(self.importer.shape(name)) != self.shapes[name]]
        if wrong:
            shown = [f"{name} {list(self.importer.shape(name))}, not {list(self.shapes[name])}" for name in wrong]
            message = f"has {len(wrong)} weights of another shape than the recipe's model: {abbreviate(shown)}"
            problems.append(Problem("import.shapes", folder, message, "use the recipe of this model"))
        if whole := [
            name for name in present if name in self.parameters and not self.importer.like(name).is_floating_point()
        ]:
            message = f"has {len(whole)} weights that are integers: {abbreviate(whole)}"
            problems.append(Problem("import.types", folder, message, "import plain weights"))
        if problems:
            raise CheckpointError(problems)

    def files_of(self, name: str) -> list[str]:
        """Returns the names in the folder of what a weight is made from."""
        keys: list[str] = []

        def note(key: str) -> Tensor:
            keys.append(self.origin[key])
            return torch.empty(self._state.weights[self.origin[key]].shape, device="meta")

        self.importer.tensor(name, note)
        return keys

    def tensor(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Returns a weight, or a state of it. read: returns a tensor by its name in the folder."""

        def in_halves(key: str) -> Tensor:
            value, match = read(self.origin[key]), INTERLEAVED.fullmatch(self.origin[key])
            if not match or not self._heads:
                return value
            heads = self._heads[match[1]]
            pairs = value.view(heads, len(value) // heads // 2, 2, -1)
            return pairs.transpose(1, 2).reshape(value.shape)

        return self.importer.tensor(name, in_halves)

    def stored_twice(self) -> Iterator[tuple[str, list[str]]]:
        """Yields tied weights that the folder holds under several names, with these."""
        for name, group in self.groups.items():
            if len(stored := self.importer.stored(group)) > 1:
                yield name, stored


def _of_pipeline(
    names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], model: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Maps names of DeepSpeed's `PipelineModule`, which numbers its layers, to those of a model; {} for other names.

    shapes: of the folder's weights. model: shapes of the model's. Layers of the pipeline that have the weights of a
    decoder layer are those of the model, in their order. Of the others, those before them are the embedding, and those
    after them norm and head: of a shape that several of the model's have, the first or the last.
    """
    numbers = {name: int(name.split(".")[0]) for name in names if name.split(".")[0].isdigit()}
    if not numbers:
        return {}
    layers: dict[str, list[str]] = {}
    for name in model:
        if match := re.fullmatch(r"(.*?\.\d+\.)(.+)", name):
            layers.setdefault(match[1], []).append(match[2])
    left = list(layers.items())
    mapped: dict[str, str] = {}
    first = None
    for number in sorted(set(numbers.values())):
        own = [name for name in names if numbers.get(name) == number]
        prefix, rests = left[0] if left else ("", [])
        found = {rest: name for rest in rests for name in own if name.endswith(f".{rest}")}
        if rests and len(found) == len(rests):
            mapped |= {name: prefix + rest for rest, name in found.items()}
            first = number if first is None else first
            del left[0]
    for name in sorted(set(names) - mapped.keys(), key=lambda name: numbers.get(name, -1)):
        last_word = name.rsplit(".", 1)[-1]
        fitting = [
            one
            for one, shape in model.items()
            if one not in mapped.values() and shape == shapes[name] and one.endswith(last_word)
        ]
        if fitting:
            mapped[name] = fitting[0] if numbers.get(name, -1) < (first or 0) else fitting[-1]
    return mapped


def _of_torchtitan(name: str) -> str:
    """Returns the name that transformers has for a weight of torchtitan's Llama 3."""
    name = name.removeprefix("model.")
    for pattern, replacement in TORCHTITAN.items():
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", replacement, name)
    return name


def _heads_of(model: PreTrainedModel) -> dict[str, int]:
    """Returns the number of heads of queries (q) and of keys (k)."""
    config = model.config.get_text_config(decoder=True)
    heads = int(config.num_attention_heads)
    return {"q": heads, "k": int(getattr(config, "num_key_value_heads", None) or heads)}


RENAME = "use the recipe of this model, or map names with --rename 'PATTERN=REPLACEMENT' (regular expressions)"


def _kind(tensor: ForeignTensor) -> torch.dtype:
    return torch.float32 if tensor.dtype.is_floating_point else torch.int64


def name_states(state: ForeignState, names: Names, trained: Sequence[str]) -> None:
    """Names the states of an optimizer that numbers its weights, by their order in the model.

    trained: names of the trained weights in the model's order. Raises CheckpointError unless one order of the usual
    ones, and only one, fits the shapes.
    """
    optimizer = state.unnamed
    if optimizer is None:
        return
    of_model: dict[str, str] = {}
    for name in trained:
        files = names.files_of(name)
        if len(files) != 1:
            message = "numbers its weights, and the model here joins several of them (experts); their order is unknown"
            raise CheckpointError(Problem("import.order", optimizer.file, message, "import its weights alone"))
        of_model[name] = files[0]
    fitting: list[list[list[str]]] = []
    for groups in _orders(trained, names.shapes, len(optimizer.groups)):
        if groups not in fitting and _fits(groups, optimizer, names.shapes):
            fitting.append(groups)
    if len(fitting) != 1:
        counts = ", ".join(str(len(numbers)) for numbers, _ in optimizer.groups)
        found = "no usual order of the model's weights fits them" if not fitting else "several orders fit them"
        message = f"numbers its weights, in groups of {counts}, and {found}; the model trains {len(trained)}"
        fix = "save it with a library that names them, such as torch.distributed.checkpoint"
        raise CheckpointError(Problem("import.order", optimizer.file, message, fix))
    for group, (numbers, options) in zip(fitting[0], optimizer.groups, strict=True):
        files = [of_model[name] for name in group]
        state.groups.append(ForeignGroup(tuple(files), options))
        for file, number in zip(files, numbers, strict=True):
            tensors = {kind: ForeignTensor.of(stored) for kind, stored in optimizer.states[number].items()}
            if WEIGHT in tensors:
                state.weights[file] = tensors.pop(WEIGHT)
            state.states[file] = tensors
            state.updates[file] = optimizer.updates[number]


def _orders(trained: Sequence[str], shapes: Mapping[str, tuple[int, ...]], count: int) -> Iterator[list[list[str]]]:
    """Yields the usual divisions of weights into a number of groups."""
    if count == 1:
        yield [list(trained)]
    by_name = [name for name in trained if not UNDECAYED.search(name)]
    matrices = [name for name in trained if len(shapes[name]) >= 2]
    for decayed in (by_name, matrices) if count == 2 else ():
        others = [name for name in trained if name not in decayed]
        yield [decayed, others]
        yield [others, decayed]
    if count == len(trained):
        yield [[name] for name in trained]


def _fits(groups: Sequence[Sequence[str]], optimizer: UnnamedOptimizer, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    for group, (numbers, _) in zip(groups, optimizer.groups, strict=True):
        if len(group) != len(numbers):
            return False
        for name, number in zip(group, numbers, strict=True):
            tensors = optimizer.states[number].values()
            if any(tensor.shape != shapes[name] for tensor in tensors if math.prod(tensor.shape) != 1):
                return False
    return True
