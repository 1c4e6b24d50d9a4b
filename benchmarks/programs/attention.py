"""Times passes of compiled layers with attention in tiles beside those with torch's kernel; prints a line of JSON.

python -m benchmarks.programs.attention --set data.sequence_length=1024

Both take turns in one process, as in `llmtrain tune`. `kept_share` is what the plan counts for a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics

RECIPE = "recipes/tiny.py"
FIELDS = (
    *("data.packing=concat", "data.mask_documents=false", "model.attention=sdpa", "kernels.threads=2"),
    *("kernels.blocks=compiled", "kernels.loss=compiled"),
)


def main() -> None:
    """Measures the passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="fields")
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    import torch

    from llmtrain.cluster import Cluster
    from llmtrain.data import Schedule, prepare
    from llmtrain.plan import kernels
    from llmtrain.plan.load import load_recipe
    from llmtrain.predict.activations import layer_bytes
    from llmtrain.rules import resolve
    from llmtrain.tune.trial import TURN_S, Trial

    recipe, _ = load_recipe(RECIPE, [*FIELDS, *options.fields])
    plan = resolve(recipe, Cluster())
    assert plan.model.weights is not None
    batch = Schedule.of(plan, prepare(recipe), dp_rank=0).train_batch(0).micro_batches[0]
    trials, kept = [], []
    for kernels.LONGEST_IN_TILES in (0, 2**20):  # torch's kernel, then tiles, whatever the length
        kept.append(layer_bytes(plan, plan.model.weights, 0, batch.input_ids.numel()))
        torch.compiler.reset()
        trials.append(Trial(plan, batch, torch.device("cpu")))
        trials[-1].warm()
    taken = [tuple(trial.seconds(TURN_S) for trial in trials) for _ in range(options.turns)]
    ratio = statistics.median(after / before for before, after in taken)
    milliseconds = 1000 * statistics.median(after for _, after in taken)
    print(json.dumps({"pass_ms": milliseconds, "ratio": ratio, "kept_share": kept[1] / kept[0]}))


if __name__ == "__main__":
    main()
