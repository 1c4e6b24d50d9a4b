"""Writes a multimodal model of which the text model was trained: its other tensors stay byte for byte as they were.

Those that are quantized in the files are dequantized, because the export is not quantized. The files have the names and
shapes of those that training began with, which other programs know.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig

from llmtrain.errors import CheckpointError, Problem
from llmtrain.models.hub_names import WeightExporter, WeightImporter, aliases
from llmtrain.models.pretrained import WeightFiles
from llmtrain.plan.facts.model import TextPart
from llmtrain.plan.facts.wrapper import Wrapper, has_causal_lm
from llmtrain.recipe import ModelConfig
from llmtrain.system.hub import stored_file

PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("audio_preprocessor_config.json", "chat_template.json"),
)
"""Files of what prepares images, sound and video, which are copied. A tokenizer's own files are written anew."""


class WholeExporter:
    """The tensors of a multimodal model, with the names of its files: `like` and `tensor` as in `WeightExporter`."""

    def __init__(self, wrapper: Wrapper, source: ModelConfig, names: Iterable[str]) -> None:
        """wrapper: with the dtype that is written. names: of the weights of the text model, tied ones once.

        Raises RecipeError for files of `source` that cannot be read.
        """
        self._part, self._files = wrapper.part, WeightFiles(source)
        self._dtype = wrapper.model.dtype
        self._outgoing = WeightExporter(wrapper.model, map(wrapper.part.whole, names))
        self._written = self._written_names(wrapper)
        self.like: dict[str, Tensor] = {}
        """Maps each name in a file to a meta tensor of that shape and dtype."""
        for name, written in self._written.items():
            self.like[name] = self._copied(name).to("meta") if written is None else self._outgoing.like[written]

    def _written_names(self, wrapper: Wrapper) -> dict[str, str | None]:
        """Maps each name in a file to the name that the exporter gives the tensor, or to None if it is copied."""
        groups = aliases(wrapper.model)

        def first(name: str) -> str:
            return groups.get(name, (name,))[0]

        trained: dict[str, str] = {}
        replaced: set[str] = set()
        made = {first(name): keys for name, keys in WeightImporter(wrapper.model, self._outgoing.like).origins()}
        for name, keys in WeightImporter(wrapper.model, self._files.like).origins():
            if self._part.own(name) is None:
                continue
            replaced |= {key for _, key in keys}
            ours = made[first(name)]
            if len(keys) == len(ours) == 1 or [pattern for pattern, _ in keys] == [pattern for pattern, _ in ours]:
                trained |= {key: own for (_, key), (_, own) in zip(keys, ours, strict=True)}
        missing = self._outgoing.like.keys() - set(trained.values())  # such as a head that is no longer tied
        files = {name: trained.get(name) for name in self._files.like if name in trained or name not in replaced}
        return files | {name: name for name in self._outgoing.like if name in missing}

    def tensor(self, name: str, read: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Returns a tensor of a file. read: as for `WeightExporter`, by the names of the text model."""
        written = self._written[name]
        if written is None:
            return self._copied(name)
        return self._outgoing.tensor(written, lambda whole, like: read(self._part.own(whole) or whole, like))

    def _copied(self, name: str) -> Tensor:
        tensor = self._files.tensor(name)
        return tensor.to(self._dtype) if self._files.is_quantized(name) else tensor


def copy_processors(source: ModelConfig, folder: Path) -> None:
    """Copies the files of a multimodal model's processors to a folder that has those of its tokenizer."""
    for name in PROCESSOR_FILES:
        # The tokenizer's template is the run's own; processors would prefer the older file.
        if name == "chat_template.json" and (folder / "chat_template.jinja").is_file():
            continue
        if (file := stored_file(str(source.pretrained), name, source.revision)) is not None:
            shutil.copyfile(file, folder / name)


def check_alone(checkpoint: Path, part: TextPart | None, text: PreTrainedConfig) -> None:
    """Raises CheckpointError if a checkpoint or adapter is not of a multimodal model whose text model exists alone.

    part: its place in the whole. text: its configuration.
    """
    if part is None:
        message = "is not of a multimodal model: it is written as it is"
        raise CheckpointError(Problem("export.text_only", str(checkpoint), message, "leave --text-only out"))
    if not has_causal_lm(text):
        message = f"cannot be written alone: transformers has no causal LM of '{text.model_type}'"
        raise CheckpointError(Problem("export.text_only", str(checkpoint), message, "leave --text-only out"))
