"""Decides which kernels a run uses, and measures them in another process, which ends with this one.

The process is `python -m llmtrain.train.tune.request REQUEST`: a kernel that crashes ends it and not a rank,
and what it has compiled and allocated is freed with it. It prints lines of JSON: {"trying": "FIELD=VALUE"}, and at the
end {"choice": ...}, {"problems": [...]} or {"busy": MESSAGE}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, TextIO

import torch

from llmtrain.engines.runtime.agree import broadcast
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch import Rank
from llmtrain.launch.local import environment_without_rank
from llmtrain.plan import KernelChoice, Plan
from llmtrain.system.kernel_caches import use_kernel_caches
from llmtrain.system.parent import start_child
from llmtrain.system.streams import reserved_stdout
from llmtrain.train.tune.choice import (
    apply,
    device_name,
    key_of_run,
    open_kernels,
    read_cached,
    threads_of_a_rank,
    write_cached,
)

WORTH_FLOPS = 1e15
"""FLOPs of a rank in a run, below which no device is slow enough for measuring to be worthwhile."""


class NotMeasuredError(Exception):
    """The measuring process died, or others used the cores meanwhile."""


def with_kernels(plan: Plan, device: torch.device, rank: Rank, say: Callable[[str], None]) -> Plan:
    """Returns the plan with the kernels that its recipe leaves open; called by all ranks before an engine is built.

    say: called with the value that is measured next. Raises RecipeError on all ranks if the model cannot be computed,
    or if it is slower in the fp8 that its recipe chooses.
    """
    if not open_kernels(plan.recipe) and plan.recipe.kernels.fp8 == "off":
        return plan
    choice, problems = None, []
    if rank.is_main:
        try:
            choice = _choose(plan, device, threads_of_a_rank(rank.local_world_size), say)
        except RecipeError as error:
            problems = list(error.problems)
    choice, problems = broadcast((choice, problems))
    if problems or choice is None:
        raise RecipeError(problems)
    return apply(plan, choice)


def _choose(plan: Plan, device: torch.device, threads: int, say: Callable[[str], None]) -> KernelChoice:
    name = device_name(device, threads)
    key = key_of_run(plan, name)
    if plan.kernels is not None and plan.kernels.key == key:
        return plan.kernels
    if cached := read_cached(plan.recipe.data, key):
        return cached
    steps = plan.recipe.train.steps * plan.batch.tokens_per_step / plan.cluster.world_size
    if plan.flops_per_token * steps < WORTH_FLOPS and plan.recipe.kernels.fp8 == "off":
        why = "chosen by the rules, because the run is too short to measure; run `llmtrain tune` to measure"
        return KernelChoice(key=key, device=name, why=why, values={})
    try:
        return measure(plan, str(device), threads, always=False, say=say)
    except NotMeasuredError as error:
        why = f"chosen by the rules, because measuring failed: {error}"
        return KernelChoice(key=key, device=name, why=why, values={})


def measure(plan: Plan, device: str, threads: int, always: bool, say: Callable[[str], None]) -> KernelChoice:
    """Measures which kernels are fastest, which takes a minute or more.

    device: as torch names it. threads: those of a rank. always: whether to measure for a short run, too. say: is called
    with what is being tried. Raises RecipeError if the model cannot be computed, NotMeasuredError if the process dies
    or others use the cores.
    """
    request = {"plan": plan.model_dump_json(), "device": device, "threads": threads, "always": always}
    environment = environment_without_rank()
    use_kernel_caches(environment)
    environment["DS_ACCELERATOR"] = device.partition(":")[0]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as errors:
        file = Path(name) / "request.json"
        file.write_text(json.dumps(request))
        command = [sys.executable, "-m", "llmtrain.train.tune.request", str(file)]
        with start_child(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            try:
                answer = _listen(process.stdout, say)
            except BaseException:
                process.kill()
                raise
        if answer is None:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:]
            raise NotMeasuredError(f"the measuring process died, exit code {process.returncode}: {' '.join(last)}")
    if answer.milliseconds or answer.failed:
        write_cached(plan.recipe.data, answer)
    return answer


def _listen(lines: IO[str], say: Callable[[str], None]) -> KernelChoice | None:
    for line in lines:
        message = json.loads(line)
        if "trying" in message:
            say(f"measuring kernels: {message['trying']}")
        elif "problems" in message:
            raise RecipeError(Problem(**problem) for problem in message["problems"])
        elif "busy" in message:
            raise NotMeasuredError(message["busy"])
        else:
            return KernelChoice.model_validate_json(json.dumps(message["choice"]))
    return None


def main() -> None:
    """Answers a request, which is a JSON file, as the measuring process."""
    request = json.loads(Path(sys.argv[1]).read_text())
    with reserved_stdout() as output:
        try:
            _answer(output, **request)
        except RecipeError as error:
            _reply(output, problems=[asdict(problem) for problem in error.problems])


def _answer(output: TextIO, plan: str, device: str, threads: int, always: bool) -> None:
    """Prints what is measured. plan: as JSON; the others as for `measure`."""
    from llmtrain.data import BatchLoader, MicroBatch, prepare
    from llmtrain.train.tune.search import tune
    from llmtrain.train.tune.trial import BusyError

    run, where = Plan.model_validate_json(plan), torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    prepared = prepare(run.recipe)

    def batch_of(candidate: Plan) -> MicroBatch:
        return BatchLoader.of(candidate, prepared, dp_rank=0).train_batch(0).micro_batches[0]

    try:
        choice = tune(run, batch_of, where, threads, always, lambda trying: _reply(output, trying=trying))
    except BusyError as error:
        _reply(output, busy=str(error))
    else:
        _reply(output, choice=choice.model_dump(mode="json"))


def _reply(output: TextIO, **line: object) -> None:
    print(json.dumps(line), file=output, flush=True)


if __name__ == "__main__":
    main()
