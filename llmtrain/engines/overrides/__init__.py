"""What llmtrain replaces in DeepSpeed, `transformers`, accelerate and torch, or reads of their private parts.

If the installed version lacks one of these places, no engine is built: without its replacement, a run would continue
and compute something else. `docs/design/overrides.md` shows this list.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from llmtrain.errors import Problem, RecipeError

TRIED = {"deepspeed": "0.19.8", "transformers": "5.22.2", "accelerate": "1.15.0", "torch": "2.13.0"}
"""The versions with which the tests were run."""


@dataclass(frozen=True)
class Override:
    """A private part of another library that llmtrain depends on."""

    place: str
    """`module:attribute`, or `module:Class.attribute` for an attribute of a class."""
    why: str
    """What goes wrong without it."""
    ours: str
    """The module that replaces or reads it."""
    test: str
    """The test that fails if the reason no longer exists, or if the place has another meaning."""

    @property
    def package(self) -> str:
        """The library's package name."""
        return self.place.partition(".")[0].partition(":")[0]

    @property
    def is_there(self) -> bool:
        """Whether the installed version has the place."""
        module, _, attributes = self.place.partition(":")
        try:
            found: object = importlib.import_module(module)
            for name in attributes.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            return False
        return True


_DS = "engines/overrides/deepspeed.py"
OVERRIDES = (
    Override(
        "deepspeed.runtime.engine:DeepSpeedEngine.allreduce_no_retain",
        "A group of one rank copies all gradients into a buffer and back.",
        _DS,
        "tests/engines/test_reduction.py",
    ),
    Override(
        "deepspeed.runtime.engine:DeepSpeedEngine.clip_fp32_gradients",
        "At ZeRO-0 the norm is taken twice, and averaged over ranks that have different experts.",
        "engines/deepspeed/engine.py",
        "tests/engines/test_expert.py",
    ),
    Override(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.scaled_global_norm",
        "The norm takes a sum over ranks for each group of parameters, and the loss one more.",
        _DS,
        "tests/engines/test_norm.py",
    ),
    Override(
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._get_norm_groups",
        "The same at ZeRO-3.",
        _DS,
        "tests/engines/test_norm.py",
    ),
    Override(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._average_expert_grad_norms",
        "With experts and tensor slices over the same ranks, only the experts of each group's first rank are counted.",
        _DS,
        "tests/engines/test_expert_tensor.py",
    ),
    Override(
        "deepspeed.module_inject.auto_ep_folding:clear_autoep_folding_gradient_corrected",
        "BF16_Optimizer leaves a mark on gradients, and those of later micro-batches are not scaled.",
        _DS,
        "tests/engines/test_expert_tensor.py",
    ),
    Override(
        "deepspeed.runtime.bf16_optimizer:is_invalid_grad_norm",
        "The host waits for the device in each step; the guard's verdict is on the device.",
        _DS,
        "tests/engines/test_host_waits.py",
    ),
    Override(
        "deepspeed.runtime.zero.stage_1_and_2:is_invalid_grad_norm",
        "The same at ZeRO-1 and 2.",
        _DS,
        "tests/engines/test_host_waits.py",
    ),
    Override(
        "deepspeed.runtime.zero.stage3:is_invalid_grad_norm",
        "The same at ZeRO-3.",
        _DS,
        "tests/engines/test_host_waits.py",
    ),
    Override(
        "deepspeed.runtime.bf16_optimizer:clip_tensors_by_global_norm",
        "The host waits for the device to learn whether the gradient is clipped.",
        _DS,
        "tests/engines/test_host_waits.py",
    ),
    Override(
        "deepspeed.utils.groups:_TENSOR_MODEL_PARALLEL_GROUP",
        "The groups of a process's first engine are taken for those of every later one.",
        _DS,
        "tests/engines/test_tensor.py",
    ),
    Override(
        "deepspeed.utils.groups:_init_tp_mesh_device",
        "Tensor parallel groups are needed before the model is built.",
        _DS,
        "tests/engines/test_tensor.py",
    ),
    Override(
        "deepspeed.runtime.pipe.module:PipelineModule._index_tied_modules",
        "A tied weight would tie the whole stage that holds it.",
        "engines/deepspeed/pipeline.py",
        "tests/engines/test_pipeline.py",
    ),
    Override(
        "deepspeed.sequence.layer:_dim_zero_all_to_all",
        "Its public adapter drops attention masks, so packed documents would see each other.",
        "engines/deepspeed/ulysses.py",
        "tests/engines/test_sequence.py",
    ),
    Override(
        "deepspeed.ops:__compatible_ops__",
        "Its collective for CPUs is compiled for a minute at the first start.",
        "runtime/distributed.py",
        "tests/engines/test_overrides.py",
    ),
    Override(
        "transformers.masking_utils:_preprocess_mask_arguments",
        "Some families give their masks no positions, and packed documents see each other; slices need whole masks.",
        "engines/overrides/transformers.py",
        "tests/engines/test_documents.py",
    ),
    Override(
        "transformers.masking_utils:find_packed_sequence_indices",
        "Each forward pass waits for the device to learn whether there are several documents.",
        "engines/forward.py",
        "tests/engines/test_documents.py",
    ),
    Override(
        "accelerate.state:AcceleratorState._reset_state",
        "Accelerate keeps the state of a process's first engine.",
        "engines/accelerated.py",
        "tests/engines/test_accelerate.py",
    ),
    Override(
        "torch._C._distributed_c10d:Work.wait",
        "Nothing tells how long a rank waits for others.",
        "engines/own_time.py",
        "tests/engines/test_own_time.py",
    ),
    Override(
        "torch.nn:Module.register_parameter",
        "A stage would allocate the parameters of all stages.",
        "models/stages.py",
        "tests/models/test_stages.py",
    ),
)


@cache
def check_overrides() -> None:
    """Raises RecipeError for places that the installed versions do not have."""
    problems = [
        Problem(
            "versions.override",
            one.package,
            f"{one.package} {_installed(one.package)} has no {one.place.replace(':', '.')}, which llmtrain replaces. "
            f"Without it: {one.why[0].lower()}{one.why[1:]}",
            f"pip install {one.package}=={TRIED[one.package]}",
        )
        for one in OVERRIDES
        if _installed(one.package) and not one.is_there
    ]
    if problems:
        raise RecipeError(problems)


def untried_versions() -> Iterator[str]:
    """Yields a line for each installed library of another minor version than the one that the tests were run with."""
    for package, tried in TRIED.items():
        installed = _installed(package)
        if installed and installed.split(".")[:2] != tried.split(".")[:2]:
            places = [one.place.partition(":")[2] for one in OVERRIDES if one.package == package]
            yield f"{package} {installed} was not tried with llmtrain, {tried} was; check {', '.join(places)}"


def _installed(package: str) -> str:
    """Returns the version of a library; empty if it is not installed, since accelerate is optional."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
