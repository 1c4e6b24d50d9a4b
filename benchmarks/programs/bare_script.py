"""A bare training script, as people start it: `torchrun ... bare_script.py FOLDER --steps 60`.

FOLDER is the output of `subject`. Rank 0 prints one line of JSON: the seconds from the start of the process until torch
and other packages are imported, until the first step begins and until it ends, and the median time of the later steps.
"""

import time

STARTED = time.time()

import argparse  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402

WARM = 10


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    started = float(os.environ.get("BENCHMARK_STARTED", STARTED))
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank = int(os.environ.get("RANK", "0"))

    import deepspeed
    import torch
    from deepspeed.ops import __compatible_ops__
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.programs.bare import deepspeed_steps

    __compatible_ops__["deepspeed_shm_comm"] = False  # otherwise the first start compiles for a minute
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29533")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    imported = time.time()
    values = json.loads((options.folder / "model.json").read_text())
    train = SimpleNamespace(**json.loads((options.folder / "train.json").read_text()))
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=train.attention, dtype=torch.float32)
    batches = iter(torch.load(options.folder / f"batches_{rank}.pt"))
    ds_config = json.loads((options.folder / "ds_config.json").read_text())
    steps = deepspeed_steps(model, ds_config, batches, train, options.steps, train.log_every)
    times = [time.time()]
    for _ in range(options.steps):
        next(steps)
        times.append(time.time())
    if rank == 0:
        lengths = [after - before for before, after in itertools.pairwise(times)][WARM:]
        found = {"imported_s": imported - started, "first_step_s": times[1] - started}
        if lengths:
            found["step_ms"] = statistics.median(lengths) * 1000
        print(json.dumps(found))


if __name__ == "__main__":
    main()
