"""Times forward and backward passes that compute something again beside those that do not; prints a line of JSON.

python -m benchmarks.programs.recompute selective --set model.config.hidden_size=1024

Both take turns in one process, as in `llmtrain tune`. `kept_share` is what the plan counts for a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics

RECIPE = "recipes/tiny.py"


def main() -> None:
    """Measures the passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("again", choices=("selective", "full"))
    parser.add_argument("--set", action="append", default=[], dest="fields")
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    import torch

    from llmtrain.data import BatchLoader, prepare
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.predict.activations import kept_bytes, layer_bytes
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import Cluster
    from llmtrain.train.tune.trial import TURN_S, Trial

    recipe, _ = load_recipe(RECIPE, options.fields)
    plain = resolve(recipe, Cluster())
    selected = resolve(recipe.with_(**{"parallel.activation_checkpointing": options.again}), Cluster())
    batch = BatchLoader.of(plain, prepare(recipe), dp_rank=0).train_batch(0).micro_batches[0]
    trials = [Trial(plan, batch, torch.device("cpu")) for plan in (plain, selected)]
    for trial in trials:
        trial.warm()
    taken = [tuple(trial.seconds(TURN_S) for trial in trials) for _ in range(options.turns)]
    ratio = statistics.median(after / before for before, after in taken)
    weights, tokens = selected.model.weights, batch.input_ids.numel()
    assert weights is not None
    kept = kept_bytes(selected, weights, 0, tokens).size / layer_bytes(plain, weights, 0, tokens)
    milliseconds = 1000 * statistics.median(after for _, after in taken)
    print(json.dumps({"pass_ms": milliseconds, "ratio": ratio, "kept_share": kept}))


if __name__ == "__main__":
    main()
