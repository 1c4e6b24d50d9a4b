"""The log-probabilities of completions under the weights from which training starts, computed once and kept on disk.

The engine of the plan computes them before its first step, in passes without gradients, as it evaluates. So no
second model is in memory, and under every strategy the reference has exactly the weights from which training starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmtrain.data import BatchLoader, Prepared, PreparedSource
from llmtrain.data.arrays import ArrayWriter, open_array
from llmtrain.data.cache import META, Cache, cache_folder, key_of
from llmtrain.data.progress import Progress
from llmtrain.data.samples import PackedSamples, Samples
from llmtrain.data.sources.corpus import SPLITS, Split
from llmtrain.data.sources.files import fingerprints
from llmtrain.engines.engine import Engine
from llmtrain.engines.runtime.agree import all_reduce_max, broadcast, gather
from llmtrain.engines.runtime.distributed import rank
from llmtrain.models import Objective
from llmtrain.models.adapter_files import ADAPTER_FILE
from llmtrain.models.pretrained import weight_files
from llmtrain.plan import Plan
from llmtrain.recipe import Recipe
from llmtrain.system.hub import stored_file

FORMAT = 1
"""Version of their computation and format; part of their key."""
KIND = "references"

Values = NDArray[np.float64]
Beat = Callable[[], object]


def with_references(engine: Engine, plan: Plan, prepared: Prepared, beat: Beat = lambda: None) -> Prepared:
    """Returns the data with the log-probabilities of all completions, read from the cache or computed.

    All ranks call it, before the engine has taken a step or loaded a checkpoint. beat: called after each pass.
    """
    if not plan.recipe.objective.needs_reference:
        return prepared
    cache = Cache(cache_folder(plan.recipe.data), Progress())
    weights = broadcast(_identity(plan.recipe, cache) if rank() == 0 else {})

    def cached(source: PreparedSource, split: Split, view: PackedSamples) -> Values:
        name, values = "" if view is getattr(source, split) else "mismatched", np.empty(0)
        key = key_of(KIND, FORMAT, source.key, split, weights, *([name] if name else []))
        if not all(gather((cache.folder / KIND / key / META).exists())):
            values = log_probs(engine, plan, prepared, view, beat=beat)

        def build(folder: Path) -> dict[str, Any]:
            with ArrayWriter(folder, KIND, np.float64) as writer:
                writer.append(values)
            return {"source": source.name, "split": split, "weights": weights, "completions": name}

        entry = cache.entry(KIND, key, build)
        return open_array(entry.path, KIND, np.float64, len(view.starts))

    return attach(prepared, cached)


def attach(prepared: Prepared, values_of: Callable[[PreparedSource, Split, PackedSamples], Values]) -> Prepared:
    """Returns the data with the log-probabilities that `values_of` returns for each view of each split of each source.

    The views of a split are its sequences and, if there are any, those of mismatched completions.
    """

    def attached(source: PreparedSource) -> PreparedSource:
        views = {}
        for split in SPLITS:
            view: PackedSamples = getattr(source, split)
            other = view.mismatched
            if other is not None:
                other = replace(other, references=values_of(source, split, other))
            views[split] = replace(view, references=values_of(source, split, view), mismatched=other)
        return replace(source, train=views["train"], eval=views["eval"])

    return replace(
        prepared,
        sources=tuple(attached(source) for source in prepared.sources),
        evaluation_sources=tuple(attached(source) for source in prepared.evaluation_sources),
        sets={name: tuple(attached(source) for source in sources) for name, sources in prepared.sets.items()},
    )


def log_probs(
    engine: Engine,
    plan: Plan,
    prepared: Prepared,
    view: Samples,
    sequences: NDArray[np.int64] | None = None,
    beat: Beat = lambda: None,
) -> Values:
    """Returns the log-probability of each completion of a view, [completions], on all ranks, which all call it.

    sequences: indices of those to compute, by default all; completions of the others have NaN.
    """
    assert isinstance(view, PackedSamples), "completions are packed"
    assert isinstance(engine.objective, Objective), "the loss is one of completions"
    schedule = BatchLoader.of(plan, prepared, engine.data_parallel_rank)
    values = torch.full((len(view.starts),), -torch.inf, dtype=torch.float64)
    for indices, batch in schedule.passes(view, np.arange(len(view)) if sequences is None else sequences):
        engine.eval_step(batch)
        for log_probs_of_rows in engine.objective.log_probs:  # only the last stage of a pipeline has any
            for row, sequence in zip(log_probs_of_rows.cpu(), indices.tolist(), strict=False):
                first, end = (int(offset) for offset in view.offsets[sequence : sequence + 2])
                values[first:end] = row[: end - first]
        beat()
    values = all_reduce_max(values, engine.device)  # ranks that share a sequence have equal values
    return values.masked_fill(values == -torch.inf, torch.nan).numpy()


def _identity(recipe: Recipe, cache: Cache) -> dict[str, Any]:
    """Returns what determines the initial weights, and the precision in which they compute."""
    identity = {"model": recipe.model.model_dump(mode="json"), "precision": recipe.parallel.precision}
    if recipe.model.pretrained is None:
        return identity | {"vocab_size": recipe.vocab_size, "seed": recipe.train.seed}
    files = weight_files(recipe.model)
    if (lora := recipe.model.adapter) and lora.pretrained:
        file = stored_file(lora.pretrained, ADAPTER_FILE, lora.revision)
        assert file is not None, "the engine has read it"
        files.append(file)
    return identity | {
        "files": [fingerprint.hash for fingerprint in fingerprints(cache, recipe.model.pretrained, files)]
    }
