"""Runs DeepSpeed configurations on a tiny model and compares the weights with a plain torch loop.

A script, since an engine needs a process of its own: reads a JSON list of cases from the file named
first, writes {case id: outcome} to the second. Started once per rank, with the usual variables of
torch.distributed. Starting costs seconds, a case some hundredths, so cases come in batches.
"""

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast

STEPS, WIDTH, LR = 4, 16, 1e-2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, WIDTH))


def batches(case):
    """inputs[step][micro-batch of all ranks], shape (micro, WIDTH)"""
    generator = torch.Generator().manual_seed(1)
    total = case["config"]["gradient_accumulation_steps"] * world_size()
    shape = (STEPS, total, case["config"]["train_micro_batch_size_per_gpu"], WIDTH)
    return torch.randn(shape, generator=generator)


def loss_of(model, inputs, dtype):
    """The loss is so small that a gradient scaled by 2**16, the initial loss scale, is finite in fp16."""
    return 0.3 * (model(inputs.to(dtype)).float() - inputs).square().mean()


def param_groups(parameters):
    """Groups parameters with and without decay, as the trainer does."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def optimizer_of(case, parameters):
    block = case["config"]["optimizer"]
    keys = {"torch_adam", "fused", "adam_w_mode"}
    params = {key: value for key, value in block["params"].items() if key not in keys}
    name = "AdamW" if block["type"] == "Adam" and block["params"]["adam_w_mode"] else block["type"]
    return getattr(torch.optim, name)(param_groups(parameters), **params)


def plain_run(case, accumulate_in):
    """fp32 master weights, forward and backward in the case's precision, gradients summed in a given type."""
    precision = case["precision"]
    weights_in = DTYPES.get(precision, torch.float32)
    autocast = DTYPES.get(precision.removeprefix("autocast_")) if precision.startswith("autocast") else None
    model = new_model().to(weights_in)
    master = copy.deepcopy(model).float()  # DeepSpeed too copies its master weights from the rounded ones
    optimizer = optimizer_of(case, master.parameters())
    norms = []
    for step in batches(case):
        summed = [torch.zeros_like(p, dtype=accumulate_in) for p in model.parameters()]
        for inputs in step:
            with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
                loss = loss_of(model, inputs, weights_in)
            for total, grad in zip(summed, torch.autograd.grad(loss / len(step), model.parameters()), strict=True):
                total.add_(grad.to(accumulate_in))
        for parameter, total in zip(master.parameters(), summed, strict=True):
            parameter.grad = total.float()
        clip = case["config"]["gradient_clipping"] or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(master.parameters(), clip)))
        optimizer.step()
        for parameter, source in zip(model.parameters(), master.parameters(), strict=True):
            parameter.data.copy_(source.data)
    return [p.detach().float() for p in model.parameters()], norms


def engine_run(case):
    model = new_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups(model.parameters()), config=copy.deepcopy(case["config"])
    )
    norms, weights_in = [], DTYPES.get(case["precision"], torch.float32)
    for step in batches(case):
        for inputs in step[rank() :: world_size()]:
            engine.backward(loss_of(engine, inputs, weights_in))
            engine.step()
        norms.append(engine.get_global_grad_norm())  # None where the engine takes none: ZeRO 0 with fp32 weights
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=engine.zero_optimization_stage() == 3):
        weights = [p.detach().float().clone() for p in model.parameters()]
    facts = {
        "wrapper": type(engine.optimizer).__name__,
        "optimizer": type(engine.basic_optimizer).__name__,
        "offloads_optimizer": bool(
            getattr(engine.optimizer, "cpu_offload", False) or getattr(engine.optimizer, "offload_optimizer", False)
        ),
        "offloads_param": bool(getattr(engine.optimizer, "offload_param", False)),
        "swaps": bool(getattr(engine.optimizer, "swap_optimizer", False)),
    }
    engine.destroy()
    return weights, norms, facts


def outcome(case):
    """Returns the largest deviations of a weight after the run, relative to the distance that the run moved the
    weights."""
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # DeepSpeed keeps it for the life of a process
    torch_autocast.TORCH_AUTOCAST_DTYPE = None
    get_accelerator().is_fp16_supported = lambda: case.get("allow_fp16", False)
    try:
        weights, norms, facts = engine_run(case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    told = DTYPES[case["config"]["data_types"]["grad_accum_dtype"]]
    expected, expected_norms = plain_run(case, told)
    exact, _ = plain_run(case, torch.float32)
    norm_apart = (
        None if None in norms else max(abs(float(a) - b) / b for a, b in zip(norms, expected_norms, strict=True))
    )
    return {
        "deviation": deviation(weights, expected),
        "deviation_from_fp32_sum": deviation(weights, exact),
        "norm_deviation": norm_apart,
        **facts,
    }


def deviation(weights, expected):
    moved = max((e - s.detach()).abs().max() for e, s in zip(expected, new_model().parameters(), strict=True))
    apart = max((w - e).abs().max() for w, e in zip(weights, expected, strict=True))
    return float(apart / moved)


def rank():
    return int(os.environ.get("RANK", "0"))


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def main(cases_file, results_file):
    torch.set_num_threads(1)
    # The shared-memory operator would be compiled first, which takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    results = {case["id"]: outcome(case) for case in json.loads(Path(cases_file).read_text())}
    if rank() == 0:
        Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
