"""The items that a loss is a mean over, counted in the data before any pass, and documents as rows of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.samples import NO_TARGET, READ_ROWS, Samples
from llmtrain.recipe import ObjectiveConfig, Recipe
from llmtrain.recipe.own_code import import_object, own_code_errors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Items:
    """Counts the items of an objective in sequences."""

    recipe: Recipe | None = None
    """None: of the kind that the data contain, completions or target tokens."""

    def count(self, view: Samples, sequences: NDArray[np.int64]) -> int | None:
        """Returns the number of items in sequences of a view; None if items are target tokens.

        Every rank counts those of the whole global batch. For a user's own `count`, it reads the labels of the batch.
        Raises RecipeError, with file and line, if that function fails.
        """
        objective = self.recipe.objective if self.recipe else ObjectiveConfig()
        if self.recipe and objective.count is not None:
            counted = partial(_counted_by, objective.count, self.recipe, view)
            return sum(counted(part) for part in np.split(sequences, range(READ_ROWS, len(sequences), READ_ROWS)))
        if objective.unit == "document":
            return int(view.count_documents(sequences).sum())
        return int(view.count_examples(sequences).sum()) if view.of_completions else None


def _counted_by(path: str, recipe: Recipe, view: Samples, sequences: NDArray[np.int64]) -> int:
    """Returns the result of a user's own count, which only processes that read batches import."""
    import torch  # imported here, since preparing data in a launcher must not load it

    objective, rows, field = recipe.objective, view.read(sequences), "objective.count"
    labels = torch.from_numpy(rows.labels)
    values = None if rows.values is None else torch.from_numpy(rows.values)
    if objective.unit != "token":
        bounds = document_bounds(torch.from_numpy(rows.position_ids))
        kept = documents_with_targets(labels, bounds)
        labels = document_rows(labels, bounds, kept, NO_TARGET)
        values = None if values is None else document_values(values, bounds, kept)
    count = import_object(path, recipe.code_dir, field)
    with own_code_errors(path, recipe.code_dir, field, "fails"):
        return int(count(labels, **column_arguments(objective, values), **objective.options))


def column_arguments(objective: ObjectiveConfig, values: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Returns the arguments for `objective.columns` of a user's own loss or count. values: [..., columns]."""
    return {} if values is None else dict(zip(objective.columns, values.unbind(-1), strict=True))


def document_bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns int32 [documents + 1]: 0, then the end of each document, with the rows of the sequences concatenated.

    position_ids: [batch, T], of whole sequences, on the host; they increase by one within a document.
    """
    import torch

    positions = position_ids.numpy()
    begins = np.ones(positions.shape, dtype=bool)
    begins[:, 1:] = np.diff(positions, axis=1) != 1
    return torch.from_numpy(np.append(np.flatnonzero(begins), positions.size).astype(np.int32))


def documents_with_targets(labels: torch.Tensor, bounds: torch.Tensor) -> list[bool]:
    """Returns whether each document has a target. labels: [batch, T], on the host; bounds: as `document_bounds`."""
    import torch

    before = torch.nn.functional.pad((labels.flatten() >= 0).cumsum(0), (1, 0))
    return (before[bounds.long()].diff() > 0).tolist()


def document_rows(values: torch.Tensor, bounds: torch.Tensor, kept: list[bool], padding: float) -> torch.Tensor:
    """Returns documents as rows, [documents, longest, ...], padded at their ends.

    values: [batch, T, ...]; bounds: as `document_bounds`; kept: [documents], those to return.
    """
    import torch

    parts = torch.split(values.flatten(0, 1), bounds.diff().tolist())
    rows = [part for part, is_kept in zip(parts, kept, strict=True) if is_kept]
    if not rows:
        return values.new_zeros((0, 1, *values.shape[2:]))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)


def document_values(values: torch.Tensor, bounds: torch.Tensor, kept: list[bool]) -> torch.Tensor:
    """Returns the numbers of documents, [documents, columns].

    values: [batch, T, columns], as in `MicroBatch`; bounds, kept: as for `document_rows`.
    """
    import torch

    return values.flatten(0, 1)[bounds[:-1].long()[torch.tensor(kept)].to(values.device)]
