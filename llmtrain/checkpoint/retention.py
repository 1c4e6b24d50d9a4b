"""Decides which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.checkpoint.folder import Found
from llmtrain.recipe import CheckpointConfig


def superfluous(found: Sequence[Found], policy: CheckpointConfig, run: str, newest: str) -> list[str]:
    """Returns the names of a run's checkpoints that `policy` does not keep.

    found: in the order they were written. newest: the one that was just published; it is always kept, so that one
    complete checkpoint exists whatever happened to the others. A folder without a manifest of this run is not ours, and
    neither counted nor deleted.
    """
    if policy.keep_last is None:
        return []
    ours = {one.folder.name: one.manifests[0] for one in found if one.manifests and one.manifests[0].run == run}
    kept = {newest, *list(ours)[-policy.keep_last :]}
    if policy.keep_every_steps is not None:
        kept.update(name for name, manifest in ours.items() if manifest.step % policy.keep_every_steps == 0)
    if policy.keep_best is not None:
        evaluated = {name: manifest.eval_loss for name, manifest in ours.items() if manifest.eval_loss is not None}
        kept.update(sorted(evaluated, key=evaluated.__getitem__)[: policy.keep_best])
    return [name for name in ours if name not in kept]
