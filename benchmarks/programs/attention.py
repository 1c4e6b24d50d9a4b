"""Times passes of compiled layers with `varlen` beside those with PyTorch's attention; prints a line of JSON.

python -m benchmarks.programs.attention --set data.sequence_length=1024

Both take turns in one process, as in `llmtrain tune`.
"""

from __future__ import annotations

import argparse
import json
import statistics

RECIPE = "recipes/tiny.py"
FIELDS = ("kernels.threads=2", "kernels.blocks=compiled", "kernels.loss=compiled")


def main() -> None:
    """Measures the passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="fields")
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    import torch

    from llmtrain.data import BatchLoader, prepare
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import Cluster
    from llmtrain.train.tune.trial import TURN_S, Trial

    trials = []
    for attention in ("sdpa", "varlen"):
        recipe, _ = load_recipe(RECIPE, [*FIELDS, f"model.attention={attention}", *options.fields])
        plan = resolve(recipe, Cluster())
        batch = BatchLoader.of(plan, prepare(recipe), dp_rank=0).train_batch(0).micro_batches[0]
        trials.append(Trial(plan, batch, torch.device("cpu")))
        trials[-1].warm()
    taken = [tuple(trial.seconds(TURN_S) for trial in trials) for _ in range(options.turns)]
    ratio = statistics.median(after / before for before, after in taken)
    print(json.dumps({"pass_ms": 1000 * statistics.median(after for _, after in taken), "ratio": ratio}))


if __name__ == "__main__":
    main()
