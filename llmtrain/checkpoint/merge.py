"""Merges a LoRA adapter into its base, in one process, on the CPU, one weight at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.checkpoint.contents import read_plan
from llmtrain.checkpoint.export import (
    QUANTIZED,
    SHARD_BYTES,
    Dtype,
    export,
    read_tokenizer,
    write_configuration,
    write_weights,
)
from llmtrain.checkpoint.folder import check_new, new_folder, scratch_folder
from llmtrain.checkpoint.multimodal import WholeExporter, check_alone, copy_processors
from llmtrain.errors import CheckpointError, Problem, abbreviate
from llmtrain.models.adapter import (
    adapter_configuration,
    of_text_model,
    rank_of,
    saved_modules,
    scale_of,
    targeted_layers,
    targeted_parameters,
)
from llmtrain.models.adapter_files import ADAPTER_FILE, FILE_PREFIX, from_file, stored_modules, to_file
from llmtrain.models.build import configuration_of
from llmtrain.models.experts import is_transposed, update_shapes
from llmtrain.models.hub_names import WeightExporter, aliases, empty_model
from llmtrain.models.inference.load import load_tokenizer, reading
from llmtrain.models.nf4 import round_trip
from llmtrain.models.pretrained import Pretrained, is_finite, meta_tensor_like, read_pretrained
from llmtrain.overrides.transformers import unsaved_names
from llmtrain.plan.facts.model import TextPart
from llmtrain.plan.facts.model_facts import part_of, wrapper_of
from llmtrain.plan.facts.pretrained_config import pretrained_folder
from llmtrain.recipe import LoraConfig, ModelConfig
from llmtrain.system.hub import probe_hub_for
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json

if TYPE_CHECKING:
    import peft

LORA = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""Tensors that the file of an adapter has for each layer or parameter; the last one only with DoRA."""
Into = Literal["trained", "full"]


def merge_checkpoint(
    checkpoint: Path,
    tokenizer: Path,
    out: Path,
    *,
    dtype: Dtype | None = None,
    most_bytes: int = SHARD_BYTES,
    base: str | None = None,
    into: Into = "trained",
    text_only: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Writes the model of a checkpoint of an adapter, with the adapter in its weights. Other arguments: as for `merge`.

    Raises like `merge`.
    """
    check_new(out)
    model = read_plan(checkpoint).recipe.model
    if model.adapter is None:
        message = "contains no adapter to merge"
        raise CheckpointError(Problem("merge.adapter", str(checkpoint), message, "export it without --merge"))
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(out.absolute().parent, out.name) as folder:
        adapter = folder / "adapter"
        # Rounded only once, after it was added.
        how: dict[str, Any] = {"base": base, "text_only": text_only, "trust_remote_code": trust_remote_code}
        export(checkpoint, tokenizer, adapter, dtype="float32", **how)
        trusts = trust_remote_code and model.trust_remote_code
        merge(adapter, out, tokenizer, dtype=dtype, most_bytes=most_bytes, into=into, trust_remote_code=trusts)


def merge(
    adapter: Path,
    out: Path,
    tokenizer: Path | None = None,
    *,
    base: str | None = None,
    dtype: Dtype | None = None,
    most_bytes: int = SHARD_BYTES,
    into: Into = "trained",
    text_only: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Writes base + adapter to `out`, for `from_pretrained`, with configuration and tokenizer.

    adapter: a folder of PEFT. tokenizer: default: that of the adapter's folder, else the base's. base: folder or hub
    name; default: the one that the adapter names. dtype: of the weights; default: the base's. into: the weights to add
    an adapter of 4-bit weights to: `trained`, the values of the 4-bit weights, which gives the model that was trained;
    or `full`, the original weights of the base, as other tools do. text_only: whether to write the text model of a
    multimodal base alone. trust_remote_code: whether the base's own code may
    be run. Each weight is added in fp32 and rounded once. Memory holds the largest weight three times in fp32, never
    the model. Raises RecipeError for an adapter or a base that cannot be read, or whose code may not be run, and
    CheckpointError for weights that do not belong together, or if `out` has content or cannot be written.
    """
    check_new(out)
    with reading(adapter, "its configuration cannot be read"):
        lora = adapter_configuration(LoraConfig(pretrained=str(adapter)))
    model = ModelConfig(
        pretrained=base or lora.base_model_name_or_path,
        revision=None if base else lora.revision,
        trust_remote_code=trust_remote_code,
    )
    pretrained_folder(model, fix="--base FOLDER names the folder that holds the adapter's base now")
    probe_hub_for(str(model.pretrained), model.revision)
    config = configuration_of(model, {})
    weights = getattr(torch, dtype) if dtype else config.dtype or torch.float32
    empty = empty_model(config, weights, trust_remote_code)
    if not lora.ensure_weight_tying and _unties(adapter, empty, part_of(model, config)):
        model = model.model_copy(update={"config": {"tie_word_embeddings": False}})
        config = configuration_of(model, model.config)
        empty = empty_model(config, weights, trust_remote_code)
    packed = read_quantized(adapter) if into == "trained" else frozenset()
    weights_of_base, wrapper = read_pretrained(model, config), wrapper_of(model, config, weights)
    part = wrapper.part if wrapper else None
    if text_only:
        check_alone(adapter, part, config)
    with reading(adapter, "it cannot be added to its base"):
        lora = of_text_model(lora, empty, part) if part else lora
        merged = MergedWeights(adapter, lora, empty, weights_of_base, packed, part)
    groups = aliases(empty)
    ignored = unsaved_names(empty)
    names = [name for name in empty.state_dict() if groups[name][0] == name and name not in ignored]
    own_tokenizer = tokenizer or (adapter if (adapter / "tokenizer_config.json").is_file() else None)
    text = read_tokenizer(own_tokenizer) if own_tokenizer else load_tokenizer(str(model.pretrained))
    with reading(str(model.pretrained), "its generation_config.json cannot be read"):
        empty.generation_config = _generation(model, empty.config)
    with new_folder(out) as folder:
        outgoing: WeightExporter | WholeExporter = WeightExporter(empty, names)
        written = empty
        if wrapper and not text_only:
            written = wrapper.model
            written.generation_config = empty.generation_config
            outgoing = WholeExporter(wrapper, model, names)
        write_configuration(written, folder)
        text.save_pretrained(folder)
        if written is not empty:
            copy_processors(model, folder)
        write_weights(outgoing, merged.read, written.num_parameters(), most_bytes, folder)


def _unties(adapter: Path, base: PreTrainedModel, part: TextPart | None) -> bool:
    """Whether an adapter holds an embedding and a head that its base ties, because it was trained with both."""
    names = {*_names(_opened(adapter), part)}
    return any(len(group) > 1 and names.issuperset(group) for group in aliases(base).values())


def _generation(model: ModelConfig, config: PreTrainedConfig) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(model.pretrained, revision=model.revision)
    except OSError:  # it has none
        return GenerationConfig.from_model_config(config)


def read_quantized(adapter: Path) -> frozenset[str]:
    """Returns the names of the 4-bit weights that an adapter was trained with, as an export lists them."""
    if not (file := adapter / QUANTIZED).is_file():
        return frozenset()
    try:
        return frozenset(read_json(file, list[str]))
    except UNREADABLE as error:
        raise CheckpointError(
            Problem("merge.file", str(adapter), f"{QUANTIZED} cannot be read: {file_fault(error)}")
        ) from None


def _opened(folder: Path) -> Any:
    try:
        return safe_open(folder / ADAPTER_FILE, framework="pt")
    except (SafetensorError, OSError) as error:
        message = f"{ADAPTER_FILE} cannot be read: {error}"
        raise CheckpointError(Problem("merge.file", str(folder), message)) from error


def _names(file: Any, part: TextPart | None) -> dict[str, str]:
    """Maps the names of the weights that an adapter's file holds, as those of the model, to those in the file.

    part: the place of the model in a multimodal one, whose names the file may have.
    """
    plain = {name: name.removeprefix(FILE_PREFIX) for name in file.keys()}  # noqa: SIM118
    return {(part and part.own(name)) or name: stored for stored, name in plain.items()}


def _meta(part: Any) -> Tensor:
    return meta_tensor_like(part.get_dtype(), part.get_shape())


class MergedWeights:
    """The weights of a base with an adapter."""

    def __init__(
        self,
        folder: Path,
        lora: peft.LoraConfig,
        model: PreTrainedModel,
        base: Pretrained,
        packed: frozenset[str],
        part: TextPart | None = None,
    ) -> None:
        """model: the base on the meta device. packed: names of the weights whose 4-bit values are used. part: the place
        of the base in a multimodal model.

        Raises CheckpointError for an adapter of another model.
        """
        self._lora, self._base, self._folder, self._packed = lora, base, folder, packed
        self._modules = dict(model.named_modules())
        self._parameters = targeted_parameters(model, lora)
        self._stored = stored_modules(self._parameters)
        self._file = _opened(folder)
        self._names = _names(self._file, part)
        heads = {name: _meta(self._file.get_slice(stored)) for name, stored in self._names.items()}
        self._shapes = {name: tuple(head.shape) for name, head in heads.items()}
        self._check(model, [name for name, head in heads.items() if not head.is_floating_point()])

    def read(self, name: str, like: Tensor) -> Tensor:
        """Returns a weight in fp32, flat. Raises CheckpointError if it is not finite, or not in the dtype of `like`."""
        merged = self._merged(name)
        if not is_finite(merged.to(like.dtype)):
            message = f"'{name}' is not finite in {str(like.dtype).removeprefix('torch.')} after the merge"
            raise self._not_finite(message, "merge with --dtype float32" if is_finite(merged) else "")
        return merged.flatten()

    def _merged(self, name: str) -> Tensor:
        if name in self._shapes:  # of a module that was trained as a whole
            return self._tensor(name)
        weight, module = self._base.tensor(name).float(), name.removesuffix(".weight")
        if not is_finite(weight):
            raise self._not_finite(f"'{name}' of its base contains NaN or infinity")
        weight = round_trip(weight) if name in self._packed else weight
        if name in self._parameters:
            return weight + self._update(name) * scale_of(self._lora, name)
        if not name.endswith(".weight") or f"{module}.{LORA[0]}" not in self._shapes:
            return weight
        is_transposed = isinstance(self._modules[module], Conv1D)
        weight = weight.T if is_transposed else weight
        down, up = (self._tensor(f"{module}.{part}") for part in LORA[:2])
        weight = weight + (up @ down) * scale_of(self._lora, module)
        if self._lora.use_dora:
            magnitude = self._tensor(f"{module}.{LORA[2]}")
            weight *= (magnitude / torch.linalg.norm(weight, dim=1)).unsqueeze(1)
        return weight.T if is_transposed else weight

    def _update(self, name: str) -> Tensor:
        """Returns the product of the two matrices that an adapter has for a parameter, for each expert."""
        a, b = (from_file(part, self._tensor(part), shape) for part, shape in self._update_parts(name))
        update, module = b @ a, self._modules[name.rpartition(".")[0]]
        return update.transpose(-2, -1) if is_transposed(module, update.ndim) else update

    def _update_parts(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the names of these matrices in the file, and the shapes in which they are multiplied."""
        module, stored = self._modules[name.rpartition(".")[0]], self._stored[name.removesuffix(".weight")]
        shapes = update_shapes(module, self._parameters[name], rank_of(self._lora, name))
        yield from zip((f"{stored}.{part}" for part in LORA[:2]), shapes, strict=True)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._names[name])
        if not is_finite(tensor):
            raise self._not_finite(f"'{name}' of the adapter contains NaN or infinity")
        return tensor.float()

    def _not_finite(self, message: str, fix: str = "") -> CheckpointError:
        return CheckpointError(Problem("merge.finite", str(self._folder), message, fix))

    def _needed(self, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights that the adapter's configuration asks for, by their names in its file."""
        saved, _ = saved_modules(model, self._lora)
        parts = LORA if self._lora.use_dora else LORA[:2]
        needed = {
            f"{name}.{parameter}": tuple(weight.shape)
            for name in saved
            for parameter, weight in model.get_submodule(name).named_parameters()
        }
        for module in targeted_layers(model, self._lora):
            rank = rank_of(self._lora, module)
            layer = model.get_submodule(module)
            out, width = layer.weight.shape[:: -1 if isinstance(layer, Conv1D) else 1]
            shapes = {LORA[0]: (rank, width), LORA[1]: (out, rank), LORA[2]: (out,)}
            needed |= {f"{module}.{part}": shapes[part] for part in parts}
        return needed | {
            part: tuple(to_file(part, torch.empty(shape, device="meta")).shape)
            for name in self._parameters
            for part, shape in self._update_parts(name)
        }

    def _check(self, model: PreTrainedModel, integers: list[str]) -> None:
        """Raises CheckpointError if the adapter lacks weights, or has others than its configuration and base need."""
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
        needed, groups = self._needed(model), aliases(model)
        known = shapes | needed
        changed = {
            name: next((name.removesuffix(suffix) + "weight" for suffix in LORA if name.endswith(f".{suffix}")), name)
            for name in self._shapes
        }
        wrong = {
            "lacks weights that its configuration names": [name for name in needed if name not in self._shapes],
            "contains weights that its configuration and its base do not have": [
                name for name in self._shapes if name not in known
            ],
            "contains weights with other shapes than in its base": [
                f"{name} is {list(shape)}, not {list(known[name])}"
                for name, shape in self._shapes.items()
                if name in known and shape != known[name]
            ],
            "contains integers, not floating point numbers": integers,
            "changes one of two weights that its base ties to each other, and would change both": [
                name
                for name in self._shapes
                if len(groups.get(changed[name], ())) > 1 and not self._lora.ensure_weight_tying
            ],
        }
        problems = [
            Problem("merge.weights", str(self._folder), f"{message}: {abbreviate(names)}")
            for message, names in wrong.items()
            if names
        ]
        if not needed:
            message = f"its configuration adapts no layer of {model.config.model_type}"
            problems.append(Problem("merge.weights", str(self._folder), message))
        if problems:
            raise CheckpointError(problems)
