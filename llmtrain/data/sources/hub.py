"""Corpora from the Hugging Face hub, read through `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.sources.formats import BATCH_ROWS, Document, read_batches, require_column, with_fraction
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import Source
from llmtrain.system.hub import hub_has


@dataclass(frozen=True)
class HubCorpus:
    """The documents of one split of a dataset that `datasets.load_dataset_builder` finds."""

    source: Source
    field: str
    """Recipe field of the source, for error messages."""
    column: str | None
    """Column of the text; None to read whole rows."""
    version: str
    """The version that the name referred to at its first use; for a hub dataset, the commit."""
    columns: tuple[str, ...]
    """The columns of the dataset, if they are known before the download."""

    @property
    def name(self) -> str:
        """The name in the recipe."""
        return self.source.name

    @property
    def is_one_document(self) -> bool:
        """Always False, because this is unknown before the dataset is read."""
        return False

    @property
    def identity(self) -> str:
        """Identifies the content."""
        source = self.source
        return key_of("hub", source.name, source.subset, source.split, self.column, self.version)

    def documents(self) -> Iterator[Document]:
        """Yields the documents; downloads the dataset if necessary. Raises DataError as `hub_corpus` does."""
        source = self.source
        builder = _builder(source, self.field)
        if builder.hash != self.version:
            message = f"'{source.name}' is now at {builder.hash}, but was at {self.version} when it was first prepared"
            fix = f'set {self.field}.revision to "{self.version}" or to the new version'
            raise DataError(Problem("data.hub", f"{self.field}.revision", message, fix))
        import datasets

        try:
            builder.download_and_prepare()
            dataset = builder.as_dataset(split=source.split)
        except (datasets.exceptions.DatasetsError, ConnectionError, ValueError) as error:
            raise DataError(_problem(source, self.field, error)) from error
        require_column(f"{self.field}.text_column", self.column, dataset.column_names)
        if self.column is not None:
            dataset = dataset.select_columns([self.column])
        tables = dataset.with_format("arrow").iter(batch_size=BATCH_ROWS)
        batches = with_fraction((batch for table in tables for batch in table.to_batches()), len(dataset))
        yield from read_batches(batches, self.column, f"{source.name} ({source.split})")


def hub_corpus(source: Source, field: str, cache: Cache, column: str | None) -> HubCorpus:
    """Returns the dataset of a source.

    If the name has no revision, its version is looked up once per cache folder and stored there. A later run therefore
    does not need the hub and cannot silently train on other data.

    Raises DataError if `datasets` does not find the dataset.
    """

    def build(_: Path) -> dict[str, Any]:
        builder = _builder(source, field)
        return {"name": source.name, "version": builder.hash, "columns": list(builder.info.features or ())}

    pin = cache.entry("pins", key_of(source.name, source.subset, source.revision), build).meta
    return HubCorpus(source, field, column, pin["version"], tuple(pin.get("columns", ())))


def _builder(source: Source, field: str) -> Any:
    import datasets

    if hub_has(source.name, source.revision, "dataset") is False:
        message = (
            f"'{source.name}' is not a file, folder or glob on this machine, nor a dataset on the hub, "
            "unless it is private"
        )
        raise DataError(Problem("data.missing", f"{field}.name", message, "check the name, or log in (hf auth login)"))
    try:
        return datasets.load_dataset_builder(source.name, source.subset, revision=source.revision)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        # The message of `datasets` says what failed: no such dataset or subset, no permission, or no network.
        raise DataError(_problem(source, field, error)) from error


def _problem(source: Source, field: str, error: Exception) -> Problem:
    reason = str(error).strip().partition("\n")[0]
    message = (
        f"'{source.name}' is not a file, folder or glob on this machine, nor a dataset that can be loaded: {reason}"
    )
    return Problem("data.missing", f"{field}.name", message, "check the name, the subset, the split and the network")
