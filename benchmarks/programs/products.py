"""Times the matrix products of a linear layer in fp32 on a CPU; prints a line of JSON, in GFLOP/s.

python -m benchmarks.programs.products --matmul onednn --tokens 2048 --inputs 384 --outputs 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from llmtrain.overrides.onednn import multiply_by_onednn

TURNS, TURN_S = 9, 0.1


def main() -> None:
    """Measures the result, the gradient of the inputs and the gradient of the weight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matmul", choices=("torch", "onednn"), required=True)
    for name in ("tokens", "inputs", "outputs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    multiply_by_onednn(options.matmul == "onednn")
    tokens, weight = torch.randn(options.tokens, options.inputs), torch.randn(options.outputs, options.inputs)
    gradient = torch.randn(options.tokens, options.outputs)
    operations = 2 * options.tokens * options.inputs * options.outputs
    products: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: tokens @ weight.t(),
        "of_inputs": lambda: gradient @ weight,
        "of_weight": lambda: gradient.t() @ tokens,
    }
    print(json.dumps({name: operations / _seconds(product) / 1e9 for name, product in products.items()}))


def _seconds(product: Callable[[], Tensor]) -> float:
    taken = []
    for _ in range(TURNS):
        started, times = time.perf_counter(), 0
        while time.perf_counter() - started < TURN_S:
            product()
            times += 1
        taken.append((time.perf_counter() - started) / times)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
