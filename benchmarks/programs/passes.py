"""Times forward and backward passes of a recipe's first layers and head as `llmtrain tune` does; prints a line of JSON.

python -m benchmarks.programs.passes --set kernels.blocks=compiled [--transposed]

With --transposed, the matrices of linear layers are stored column by column.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics

RECIPE = "recipes/tiny.py"
TURNS = 15


def main() -> None:
    """Measures the passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="fields")
    parser.add_argument("--transposed", action="store_true")
    options = parser.parse_args()
    import torch

    from llmtrain.data import BatchLoader, prepare
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import Cluster
    from llmtrain.train.tune.trial import ALONE_S, Trial

    recipe, _ = load_recipe(RECIPE, options.fields)
    plan = resolve(recipe, Cluster())
    batch = BatchLoader.of(plan, prepare(recipe), dp_rank=0).train_batch(0).micro_batches[0]
    trial = Trial(plan, batch, torch.device("cpu"))
    if options.transposed:
        for module in trial.model.modules():
            if isinstance(module, torch.nn.Linear) and module is not trial.model.get_output_embeddings():
                module.weight.data = module.weight.data.t().contiguous().t()
    trial.warm()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [trial.seconds() for _ in range(TURNS)]
    used = resource.getrusage(resource.RUSAGE_SELF)
    passes = sum(ALONE_S / seconds for seconds in taken)
    found = {"pass_ms": 1000 * statistics.median(taken), "page_faults": (used.ru_minflt - before) / passes}
    print(json.dumps({**found, "peak_gib": used.ru_maxrss / 2**20}))


if __name__ == "__main__":
    main()
