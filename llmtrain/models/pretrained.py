"""Reads the weights of a model, by name, from a Hugging Face folder or a repository on the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.errors import Problem, RecipeError, abbreviate, reason
from llmtrain.models.classifier import declare_head
from llmtrain.models.hub_names import PartImporter, WeightImporter, aliases, empty_model
from llmtrain.models.quantized import QuantizedFiles, QuantizedWeight, Stored, fault_in
from llmtrain.plan.facts.classifier import HEAD, is_classifier
from llmtrain.plan.facts.model_facts import wrapper_of
from llmtrain.plan.facts.pretrained_config import quantization_of
from llmtrain.recipe import ModelConfig
from llmtrain.system.durable import fingerprint
from llmtrain.system.hub import INDEX, SINGLE
from llmtrain.system.untrusted import UNREADABLE, file_fault, open_regular, read_json

ROWS_AT_ONCE = 4096
"""Rows of a table that are held in fp64 to compute their mean."""


class WeightFiles:
    """The tensors of a folder or repository by name; quantized ones as the plain weights that they stand for."""

    def __init__(self, source: ModelConfig) -> None:
        """Reads the headers of the files. Raises RecipeError for files or quantized weights that cannot be read."""
        self._files = tensor_files(source)
        self._open: dict[Path, Any] = {}
        headers = {file: _headers(file) for file in dict.fromkeys(self._files.values())}
        stored = {name: headers[file][name] for name, file in self._files.items() if name in headers[file]}
        self.like = {name: meta_tensor_like(*tensor) for name, tensor in stored.items()}
        """Maps each name to a meta tensor of that shape, of an integer type if it holds integers."""
        self._quantized: dict[str, QuantizedWeight] = {}
        if (quantization := quantization_of(source)) is not None:
            if quantization.fault:
                raise fault_in(f"{source.pretrained} is quantized by {quantization}: {quantization.fault}")
            found = QuantizedFiles(stored, quantization, self._read)
            if found.faults:
                count, named = len(found.faults), abbreviate(found.faults)
                raise fault_in(f"{source.pretrained} has {count} faults in its quantized weights: {named}")
            self._quantized = found.weights
            self.like = {name: self.like[name] for name in found.plain} | {
                name: torch.empty(weight.shape, device="meta") for name, weight in found.weights.items()
            }

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor, in the dtype of the file; a quantized weight in that of its value."""
        weight = self._quantized.get(name)
        if weight is None:
            return self._read(name)
        return weight.value({role: self._read(part) for role, part in weight.parts.items()})

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor stands for a quantized weight."""
        return name in self._quantized

    def _read(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


class Pretrained:
    """The weights of a folder. Only one, or the few that belong together, are in memory at a time."""

    def __init__(self, incoming: WeightImporter, files: WeightFiles, tables: frozenset[str], kept_rows: int) -> None:
        """tables: names of the weights with a row for each token, if new ones are needed; kept_rows: as in `grow`."""
        self._incoming = incoming
        self._files = files
        self._vocabulary_weights = tables
        self._kept_rows = kept_rows

    def has(self, name: str) -> bool:
        """Whether the files hold a weight: all but, perhaps, a head that replaces that over the vocabulary."""
        return self._incoming.has(name)

    def tensor(self, name: str) -> Tensor:
        """Returns a weight, given its name in the model, in the dtype of the file, or of its dequantized value."""
        return self._incoming.tensor(name, self._files.tensor)

    @torch.no_grad()
    def copy_to(self, name: str, weight: Tensor) -> None:
        """Copies a weight, given its name in the model, into a tensor of the model's shape and dtype."""
        value = self.tensor(name)
        if name not in self._vocabulary_weights:
            weight.copy_(value)
            return
        # Rounded first, so that the mean is that of the rows that the model has.
        grow(value.to(weight.dtype), self._kept_rows, weight)

    def check_equal(self, names: Sequence[str], source: ModelConfig) -> None:
        """Raises RecipeError if a tied weight has different values under the names under which the files hold it."""
        for name in names[1:]:
            if not torch.equal(self.tensor(name), self.tensor(names[0])):
                message = (
                    f"{source.pretrained} has different values for {names[0]} and {name}, which its configuration ties"
                )
                fix = "to train them separately, as transformers would: --set model.config.tie_word_embeddings=false"
                raise RecipeError(Problem("model.pretrained_tied", "model.pretrained", message, fix))


def grow(table: Tensor, kept_rows: int, into: Tensor) -> None:
    """Copies the first rows of a table into a larger one, and sets all others to the mean of these.

    The logits of such a row are the mean of those of the old tokens at every position, and thus never the largest.
    Those of random rows could be arbitrarily large (https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Padding
    rows are such rows, too: as in Megatron-LM, they take part in the softmax, and since they are never targets their
    logits only decrease.
    """
    kept = table[:kept_rows]
    total = torch.zeros(kept.shape[1:], dtype=torch.float64, device=kept.device)
    for first in range(0, len(kept), ROWS_AT_ONCE):
        total += kept[first : first + ROWS_AT_ONCE].double().sum(0)
    into[: len(kept)] = kept
    into[len(kept) :] = (total / len(kept)).to(into.dtype)


def read_pretrained(source: ModelConfig, config: PreTrainedConfig) -> Pretrained:
    """Opens the weights of `model.pretrained`. Only the headers of its files are read, and tied weights stored twice.

    Raises RecipeError if the files lack a weight of the model, which `transformers` would initialize at random, if a
    weight has a different shape or is not floating point, if they hold tensors that the model does not have, or if they
    hold different values for one weight under two names. Raises it also for quantized weights that cannot be read.
    """
    files = WeightFiles(source)
    model = empty_model(config, torch.float32, source.trust_remote_code)
    wrapper = wrapper_of(source, config)
    incoming = WeightImporter(model, files.like) if wrapper is None else PartImporter(wrapper, files.like)
    if source.config.get("tie_word_embeddings") is False and source.num_labels is None:
        incoming.untie()
    names = {name: group for name, group in aliases(model).items() if name == group[0]}
    unused = incoming.unused
    missing = [name for name in names if not incoming.has(name)]
    if source.num_labels is not None:  # files of a causal LM lack this head, and have that over the vocabulary
        missing = [name for name in missing if name != HEAD]
        unused = [name for name in unused if name not in _causal_names(config)]
    problems = wrong_names(source, missing, unused, len(names))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tables = _vocabulary_weights(model) if source.kept_rows else frozenset()
    wrong = [
        name
        for name in names
        if incoming.has(name)
        and incoming.shape(name) != shapes[name]
        and not (name in tables and _has_fewer_rows(incoming.shape(name), shapes[name]))
    ]
    if wrong:
        name = wrong[0]
        message = (
            f"{source.pretrained} has {len(wrong)} weights whose shape differs from the model's, such as '{name}': "
            f"{list(incoming.shape(name))}, not {list(shapes[name])}"
        )
        fix = "leave out the fields of model.config that change sizes"
        problems.append(Problem("model.pretrained_shapes", "model.pretrained", message, fix))
    if integers := _integer_weights(incoming, dict(model.named_parameters())):
        message = (
            f"{source.pretrained} has weights that are integers, not floating point numbers: {abbreviate(integers)}"
        )
        problems.append(Problem("model.pretrained_kinds", "model.pretrained", message, "write or fetch it again"))
    if problems:
        raise RecipeError(problems)
    pretrained = Pretrained(incoming, files, tables, source.kept_rows or 0)
    for group in names.values():
        pretrained.check_equal(incoming.stored(group), source)
    return pretrained


def _causal_names(config: PreTrainedConfig) -> frozenset[str]:
    """Returns the names of the weights of the family's causal LM."""
    causal = deepcopy(config)
    declare_head(causal, None)
    return frozenset(empty_model(causal, torch.float32).state_dict())


def wrong_names(source: ModelConfig, missing: Sequence[str], unused: Sequence[str], weights: int) -> list[Problem]:
    """Returns problems with the names in the files of a model that has some number of weights.

    missing: weights that the files lack. unused: tensors that the model does not have.
    """
    problems = []
    if missing:
        message = f"{source.pretrained} lacks {len(missing)} of {weights} weights of the model: {abbreviate(missing)}"
        fix = "use a folder that contains them; model.config must not add weights"
        problems.append(Problem("model.pretrained_names", "model.pretrained", message, fix))
    patterns = source.unused_weights
    if unused := [name for name in unused if not any(fnmatchcase(name, pattern) for pattern in patterns)]:
        message = f"{source.pretrained} has {len(unused)} tensors that the model does not have: {abbreviate(unused)}"
        fix = f"to train without them, name them: --set 'model.unused_weights=[\"{unused[0]}\"]', or with patterns"
        problems.append(Problem("model.pretrained_unused", "model.pretrained", message, fix))
    return problems


def _vocabulary_weights(model: PreTrainedModel) -> frozenset[str]:
    """Returns all names of the weights that have a row for each token: those of the embedding and of the head."""
    head = None if is_classifier(model.config) else model.get_output_embeddings()
    modules = (model.get_input_embeddings(), head)
    ids = {id(weight) for module in modules if module is not None for weight in module.parameters()}
    return frozenset(name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in ids)


def _has_fewer_rows(before: torch.Size, after: torch.Size) -> bool:
    return len(before) == len(after) and before[0] <= after[0] and before[1:] == after[1:]


def hash_of_weights(source: ModelConfig) -> str:
    """Returns a hash of the files of `model.pretrained`.

    In the hub's cache a file links to one whose name is its hash; all others are read. Raises RecipeError if there are
    none.
    """
    digest = hashlib.sha256()
    for file in weight_files(source):
        target = file.resolve()
        is_named = file.is_symlink() and target.parent.name == "blobs"
        digest.update(f"{file.name} {target.name if is_named else fingerprint(file).xxh3_128}\n".encode())
    return digest.hexdigest()[:16]


def weight_files(source: ModelConfig) -> list[Path]:
    """Returns the files of the weights of `model.pretrained`."""
    return sorted(set(tensor_files(source).values()))


def tensor_files(source: ModelConfig) -> dict[str, Path]:
    """Maps each tensor of `model.pretrained`, in a local folder or hub repository, to its file.

    Raises RecipeError if they cannot be found.
    """
    assert source.pretrained is not None
    folder = Path(source.pretrained)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        patterns = ["model*.safetensors", INDEX]  # a repository may hold the weights again under other names
        try:
            folder = Path(snapshot_download(source.pretrained, revision=source.revision, allow_patterns=patterns))
        except (HfHubHTTPError, ValueError, OSError) as error:
            message = f"'{source.pretrained}' is not a folder, and cannot be fetched from the hub: {reason(error)}"
            raise RecipeError(Problem("model.pretrained", "model.pretrained", message)) from error
    # As `transformers`, which reads a single file even if there is an index.
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        files = {name: folder / file for name, file in _index(folder / INDEX).items()}
        if gone := sorted({file.name for file in files.values() if not file.is_file()}):
            message = f"{folder} lacks {len(gone)} of the files that its index names: {abbreviate(gone)}"
            raise RecipeError(Problem("model.safetensors", "model.pretrained", message, "complete the folder"))
        return files
    single_files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not single_files:
        raise RecipeError(Problem("model.safetensors", "model.pretrained", f"there are no safetensors in {folder}"))
    return {name: file for file in single_files for name in _headers(file)}


class _Index(BaseModel):
    weight_map: dict[str, str]


def _index(file: Path) -> dict[str, str]:
    try:
        return read_json(file, _Index).weight_map
    except UNREADABLE as error:
        message = f"{file} cannot be read: {file_fault(error)}"
    raise RecipeError(Problem("model.safetensors", "model.pretrained", message, "fetch it again"))


def stored_as_integers(folder: Path, model: PreTrainedModel) -> list[str]:
    """Returns the names of the parameters that the safetensors of a folder hold as integers."""
    tensors = {
        name: meta_tensor_like(*tensor)
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in _headers(file).items()
    }
    if all(tensor.is_floating_point() for tensor in tensors.values()):
        return []
    return _integer_weights(WeightImporter(model, tensors), [name for name, _ in model.named_parameters()])


def _integer_weights(incoming: WeightImporter, names: Iterable[str]) -> list[str]:
    return [name for name in names if incoming.has(name) and not incoming.like(name).is_floating_point()]


def is_finite(weight: Tensor) -> bool:
    """Whether a tensor contains neither NaN nor infinity."""
    if not weight.is_floating_point() or not weight.numel():
        return True
    low, high = torch.aminmax(weight.detach() if weight.element_size() > 1 else weight.detach().float())
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _headers(file: Path) -> dict[str, Stored]:
    """Maps each name in a file to what its header says. Raises RecipeError if it is not a safetensors file."""
    try:
        open_regular(file).close()  # safetensors would block on a FIFO
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: Stored(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        message = f"{file} cannot be read: {error}"
    raise RecipeError(Problem("model.safetensors", "model.pretrained", message, "fetch it again"))


def meta_tensor_like(dtype: str, shape: Sequence[int]) -> Tensor:
    """Returns a meta tensor of a shape, of an integer type if safetensors names one.

    dtype: as safetensors names it.
    """
    kind = torch.float32 if dtype.startswith(("F", "BF")) else torch.int64
    return torch.empty(tuple(shape), dtype=kind, device="meta")
