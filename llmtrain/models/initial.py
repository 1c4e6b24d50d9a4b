"""Initial weights that depend only on the seed and on the names of modules.

Each module draws from its own generator, in fp32, on the device on which it will be used. A model therefore starts from
the same weights whether it is built whole, partitioned by ZeRO-3, or in pipeline stages with one stage per rank. This
is what makes strategies comparable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.models.stages import AbsentModule
from llmtrain.overrides.transformers import draw_weights

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[object]]
"""Makes parameters whole inside the context; when it ends, each rank keeps its part of what was written.

ZeRO-3 uses what rank 0 wrote. Tensor parallelism uses what each rank wrote, since all write the same.
"""


@torch.no_grad()
def draw_all_weights(model: PreTrainedModel, seed: int, gather: Gather | None = None, only: str | None = None) -> None:
    """Draws every weight of `model` with its family's own `_init_weights`, module by module.

    only: the name of a module, if no other is drawn.
    """
    devices = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, module, owner in _children_first(model, "", model):
            if only is not None and name != only:
                continue
            reached = _initialized_parameters(name, module)
            parameters = [parameter for _, parameter in reached]
            if not parameters and any(isinstance(child, AbsentModule) for child in module.children()):
                continue  # a part that another stage has
            # A tied weight is drawn by the module under whose name the model lists it, not by every module that uses
            # it: ModernBERT would otherwise draw its head, and thus its embedding, with a smaller variance.
            elsewhere = [parameter for path, parameter in reached if names[id(parameter)] != path]
            with (
                gather(parameters) if gather and parameters else nullcontext(),
                _in_fp32(parameters),
                _restoring(elsewhere),
            ):
                if isinstance(module, Conv1D):
                    _start_draws(seed_for_name(seed, name))
                    _draw_by_constructor(module)
                _start_draws(seed_for_name(seed, name))
                draw_weights(owner, module)


def _start_draws(seed: int) -> None:
    """Seeds the generators of the CPU and of this rank's GPU.

    `torch.manual_seed` also notes the seed, with the call stack, for each kind of device that is not in use. That takes
    milliseconds, and a large model has thousands of modules.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def _draw_by_constructor(module: Conv1D) -> None:
    """Does what `Conv1D.__init__` does, whose draws are disabled while a model is built; GPT (1) draws nothing else."""
    nn.init.normal_(module.weight, std=0.02)
    nn.init.zeros_(module.bias)


def _initialized_parameters(name: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters, with their names, that a family's initializer may modify when it is given a module.

    A family may modify the children of a module (GPT-2 scales `c_proj` from its block), but nothing deeper.
    """
    children = ((_join(name, child_name), child) for child_name, child in module.named_children())
    return [
        (full_name, parameter)
        for prefix, part in ((name, module), *children)
        for full_name, parameter in part.named_parameters(prefix, recurse=False)
    ]


def _children_first(
    module: nn.Module, name: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yields each module after its children, with the model whose `_init_weights` applies to it."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _children_first(child, _join(name, child_name), child_owner)
    yield name, module, owner


@contextmanager
def _in_fp32(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Lets an initializer draw in fp32, so that a bf16 model starts from the rounded fp32 weights."""
    stored = [(parameter, parameter.data) for parameter in parameters if parameter.dtype != torch.float32]
    for parameter, data in stored:
        parameter.data = data.float()
    try:
        yield
    finally:
        for parameter, data in stored:
            data.copy_(parameter.data)
            parameter.data = data


@contextmanager
def _restoring(parameters: list[nn.Parameter]) -> Iterator[None]:
    stored = [(parameter, parameter.data.clone()) for parameter in parameters]
    yield
    for parameter, data in stored:
        parameter.data.copy_(data)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def seed_for_name(seed: int, name: str) -> int:
    """Returns the seed of the generator that draws the weights of this name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
