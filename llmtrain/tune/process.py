"""The measuring process: `python -m llmtrain.tune.process REQUEST`.

It is a separate process: a kernel that crashes ends it and not a rank, and what it has compiled and allocated is freed
with it. It prints lines of JSON: {"trying": "FIELD=VALUE"}, and at the end {"choice": ...}, {"problems": [...]} or
{"busy": MESSAGE}.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from llmtrain.errors import RecipeError
from llmtrain.tune.request import Request


def main() -> None:
    """Answers a request, which is a JSON file."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # output of libraries is not part of the answer
        try:
            _answer(request, output)
        except RecipeError as error:
            _tell(output, problems=[asdict(problem) for problem in error.problems])


def _answer(request: Request, output: TextIO) -> None:
    import torch

    from llmtrain.data import Schedule, prepare
    from llmtrain.plan import Plan
    from llmtrain.tune.search import tune
    from llmtrain.tune.trial import BusyError

    plan = Plan.model_validate_json(request.plan)
    device = torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    batch = Schedule.of(plan, prepare(plan.recipe), dp_rank=0).train_batch(0).micro_batches[0]
    try:
        choice = tune(plan, batch, device, request.threads, request.always, lambda one: _tell(output, trying=one))
    except BusyError as error:
        _tell(output, busy=str(error))
    else:
        _tell(output, choice=choice.model_dump(mode="json"))


def _tell(output: TextIO, **line: object) -> None:
    print(json.dumps(line), file=output, flush=True)


if __name__ == "__main__":
    main()
