"""Every strategy continues a text as the plain loop does, and training does not change by it."""

from __future__ import annotations

import pytest

from tests.helpers.batches import MIXTRAL
from tests.helpers.continued_texts import check_texts

CHUNKED = {"kernels.loss": "chunked"}
CASES = {
    "zero0": (2, {}),
    "zero1": (2, {"parallel.zero_stage": 1}),
    "zero3": (2, {"parallel.zero_stage": 3, **CHUNKED}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.zero_stage": 1, **CHUNKED}),
    "tensor": (2, {"parallel.tensor": 2, "parallel.zero_stage": 1}),
    "sequence": (2, {"parallel.sequence": 2, "parallel.zero_stage": 2}),
    "expert": (2, {**MIXTRAL, "parallel.expert": 2, "parallel.zero_stage": 2}),
    "ddp": (2, {"parallel.backend": "accelerate"}),
    "fsdp2": (2, {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}),
    "fsdp2 zero2": (2, {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 2}),
    "accelerate deepspeed": (
        2,
        {"parallel.backend": "accelerate", "parallel.accelerate": "deepspeed", "parallel.zero_stage": 1},
    ),
    "data_parallel": (1, {"parallel.backend": "data_parallel"}),
    "pipeline tensor": (4, {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.zero_stage": 1}),
    "pipeline sequence": (4, {"parallel.pipeline": 2, "parallel.sequence": 2, "parallel.zero_stage": 1}),
    "tensor sequence": (4, {"parallel.tensor": 2, "parallel.sequence": 2, "parallel.zero_stage": 3}),
    "bf16 zero3": (2, {"parallel.precision": "bf16", "parallel.zero_stage": 3}),
}
SOME = ("pipeline", "sequence", "fsdp2")


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, SOME),
        *(
            pytest.param(ranks, [name for name in CASES if CASES[name][0] == ranks], marks=pytest.mark.breadth)
            for ranks in (1, 2, 4)
        ),
    ],
    ids=["some", "one rank", "two ranks", "four ranks"],
)
def test_samples_match_the_weights_and_do_not_change_training(ranks, names, tmp_path):
    check_texts(ranks, {name: CASES[name][1] for name in names}, tmp_path)
