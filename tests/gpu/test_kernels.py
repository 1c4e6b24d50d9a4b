"""Numbers of the kernels that a GPU runs: attention, compiled code, Liger, fp8 and optimizers."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmtrain.data import Documents
from llmtrain.engines.optim import torch_optimizer
from llmtrain.models.varlen import varlen_attention
from llmtrain.recipe import OptimConfig
from tests.gpu.conftest import needs_kernels
from tests.gpu.test_engines import STEPS, assert_near, reference_of
from tests.gpu.worker import GPU, train
from tests.helpers.batches import tiny_recipe
from tests.helpers.traces import worst

BF16 = {"parallel.zero_stage": 1, "parallel.precision": "bf16", "batch.micro_batch_size": 4}
COMPILED = {"kernels.blocks": "compiled", "kernels.loss": "compiled"}
LENGTHS = (5, 1, 300, 64, 57, 129)
"""Documents of one token, of one tile of a kernel, of a little more, and of several."""
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])
HEADS = {"a key for each head": (4, 4), "grouped keys": (6, 2), "one key": (4, 1)}


class _Module(nn.Module):
    is_causal = True


def _states(heads: int, keys: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value [1, heads, T, width], and the gradient of the output [1, T, heads, width], on the CPU."""
    generator = torch.Generator().manual_seed(heads + width)
    tokens = len(PLACES)
    shapes = [(1, heads, tokens, width), (1, keys, tokens, width), (1, keys, tokens, width), (1, tokens, heads, width)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _attention(states: list[Tensor], window: int | None, sinks: Tensor | None = None) -> list[Tensor]:
    """The output of the kernel, and the gradients of query, key, value, and sinks if there are any."""
    query, key, value, direction = (one.to(GPU) for one in states)
    trained = [one.requires_grad_() for one in (query, key, value)]
    given = Documents.of(PLACES[None]).arguments(GPU)
    if sinks is not None:
        given["s_aux"] = sinks.to(GPU).requires_grad_()
        trained.append(given["s_aux"])
    output, _ = varlen_attention(_Module(), *trained[:3], None, sliding_window=window, **given)
    gradients = torch.autograd.grad(output, trained, direction)
    return [one.detach().cpu() for one in (output, *gradients)]


def _expected(states: list[Tensor], window: int | None, sinks: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Each result in fp64 by a mask, and the sum of the magnitudes of the terms that the kernel rounds."""
    query, key, value, direction = (one.double() for one in states)
    direction = direction.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    document = (PLACES == 0).cumsum(0)
    distance = torch.arange(len(PLACES))[:, None] - torch.arange(len(PLACES))
    allowed = (document[:, None] == document) & (distance >= 0) & (distance < (window or len(PLACES)))
    scale = query.shape[-1] ** -0.5
    scores = (query @ key.mT * scale).masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights, of_sinks = scores.softmax(-1).tensor_split([len(PLACES)], -1)
    output = weights @ value
    of_weights = direction @ value.mT
    of_scores = weights * (of_weights - (direction * output).sum(-1, keepdim=True)) * scale
    # The weights, and then the scores' gradients, which also have the rounding of the output.
    magnitudes = direction.abs() @ value.abs().mT
    rounded = weights * (magnitudes + (direction.abs() * (weights @ value.abs())).sum(-1, keepdim=True)) * scale

    def shared(states: Tensor) -> Tensor:
        return states.unflatten(1, (-1, groups)).sum(2)

    return [
        (output.transpose(1, 2), (weights @ value.abs()).transpose(1, 2)),
        (of_scores @ key, rounded @ key.abs()),
        (shared(of_scores.mT @ query), shared(rounded.mT @ query.abs())),
        (shared(weights.mT @ direction), shared(weights.mT @ direction.abs())),
        *[
            (-(of_sinks * one.sum(-1, keepdim=True)).sum((0, 2, 3)), (of_sinks * one.abs()).sum((0, 2, 3)))
            for one in [direction * output] * (sinks is not None)
        ],
    ]


def assert_close(
    found: list[Tensor],
    states: list[Tensor],
    window: int | None = None,
    kept: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Compares with fp64. Sums are in fp32, and the magnitudes of their terms bound the error.

    The weights and the output are rounded once, each by half a unit in the last place. A gradient has at most five such
    roundings: that of the scores' gradients, in which the output takes part, those two, that of the result, and that of
    each head of a group. kept: tokens to compare.
    """
    half = torch.finfo(states[0].dtype).eps / 2
    kept = torch.ones(len(PLACES), dtype=torch.bool) if kept is None else kept
    results = list(zip(found, _expected(states, window, sinks), strict=True))
    names = ("output", "query", "key", "value", "sinks")[: len(results)]
    for name, (one, (exact, terms)) in zip(names, results, strict=True):
        bound = (2 if name == "output" else 5) * half * terms + 1e-6
        apart = (one.double() - exact).abs() / bound
        if name != "sinks":
            apart = apart[:, kept] if name == "output" else apart[:, :, kept]
        assert (apart <= 1).all(), (name, window, apart.max().item())


@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (24, torch.float16)])
def test_attention_by_boundaries_equals_attention_by_a_mask_in_fp64(gpu, width, dtype):
    for heads, window in itertools.product(HEADS.values(), (None, 1, 40, 1000)):
        states = _states(*heads, width, dtype)
        assert_close(gpu(_attention, states, window), states, window)


def test_sinks_take_a_share_of_the_weights(gpu):
    states, sinks = _states(*HEADS["grouped keys"], 64, torch.bfloat16), torch.linspace(-3, 3, 6)
    for window in (None, 40):
        assert_close(gpu(_attention, states, window, sinks), states, window, sinks=sinks)


@needs_kernels
def test_nan_in_other_documents_has_no_effect(gpu):
    """Also if a document begins and ends within a tile of a kernel."""
    states = _states(*HEADS["grouped keys"], 64, torch.bfloat16)
    index = (PLACES == 0).cumsum(0)
    spoiled = [one.clone() for one in states]
    for one in spoiled[:3]:
        one[:, :, index == 3] = float("nan")
    spoiled[3][:, index == 3] = float("nan")
    assert_close(gpu(_attention, spoiled, None), states, kept=index != 3)


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager", pytest.param("flex_attention", marks=needs_kernels)])
def test_attention_in_bf16_stays_near_the_reference(gpu, attention):
    assert_near_in_bf16(gpu, {"model.attention": attention})


def assert_near_in_bf16(gpu, fields: dict[str, Any], **model: Any) -> None:
    """The bounds are those of `test_parity`: a loss by one unit in its last place, a norm of rounded gradients by
    four."""
    run = gpu(train, tiny_recipe(**BF16 | fields | model), STEPS)
    expected, _ = reference_of(gpu, tiny_recipe(**model))
    assert worst(run.losses, expected.losses) < 2**-8
    assert worst(run.grad_norms, expected.grad_norms) < 2**-6
    assert run.losses != expected.losses


def test_compiled_layers_and_loss_in_fp32_equal_the_reference(gpu):
    fields = {"parallel.zero_stage": 2, "batch.micro_batch_size": 4, **COMPILED}
    assert_near(gpu, gpu(train, tiny_recipe(**fields), STEPS), tiny_recipe(), "compiled")


def test_compiled_layers_and_loss_in_bf16_stay_near_the_reference(gpu):
    window = {"model.architecture": "mistral", "model.config.sliding_window": 5}
    fields = {**COMPILED, "model.attention": "varlen", "parallel.activation_checkpointing": "selective"}
    assert_near_in_bf16(gpu, fields, **window)


@needs_kernels
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs CUDA and Liger: pip install -e '.[liger]'")
def test_ligers_kernels_equal_the_reference(gpu):
    fields = {"kernels.blocks": "liger", "kernels.loss": "liger", "parallel.zero_stage": 1}
    assert_near(gpu, gpu(train, tiny_recipe(**fields), STEPS), tiny_recipe(), "Liger")
    assert_near_in_bf16(gpu, fields)


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


@needs_kernels
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs CUDA and torchao: pip install -e '.[fp8]'")
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_layers_in_fp8_stay_near_the_reference(gpu, kind):
    """Operands have three bits behind the first: a factor of 1 ± 2⁻⁴. The bound is that of `test_fp8`."""
    if gpu(_capability) < (8, 9):
        pytest.skip("needs a CUDA GPU of compute capability 8.9")
    run = gpu(train, tiny_recipe(**BF16, **{"kernels.fp8": kind}), STEPS)
    expected, _ = reference_of(gpu, tiny_recipe())
    assert worst(run.losses, expected.losses) < 0.05
    in_bf16 = gpu(train, tiny_recipe(**BF16), STEPS)
    assert run.losses != in_bf16.losses


UPDATES = 5


def _updates(name: str, weights: Tensor, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The weights after some fused updates, and after another one that is skipped, of a gradient of NaN."""
    parameter = nn.Parameter(weights.to(GPU))
    optim = OptimConfig(name=name, lr=1e-2)
    optimizer = torch_optimizer([{"params": [parameter], "weight_decay": 0.1}], optim)
    for gradient in gradients:
        parameter.grad = gradient.to(GPU)
        optimizer.step()
    updated = parameter.detach().cpu()
    parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones((), device=GPU)  # type: ignore[attr-defined]
    optimizer.step()
    return updated, parameter.detach().cpu()


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("adamw", lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)),
        ("sgd", lambda weights: torch.optim.SGD(weights, lr=1e-2, weight_decay=0.1, momentum=0.9)),
    ],
)
def test_fused_updates_equal_those_in_fp64(gpu, name, plain):
    """Each update rounds the weight four times at most, and what is added to it 64 times."""
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = (torch.randn(1000, 33, generator=generator) for _ in range(UPDATES + 1))
    exact = nn.Parameter(weights.double())
    optimizer = plain([exact])
    for gradient in gradients:
        exact.grad = gradient.double()
        optimizer.step()
    found, kept = gpu(_updates, name, weights, gradients)
    bound = UPDATES * 2**-24 * (4 * exact.abs() + 64 * 1e-2 * 4)  # gradients are at most about 4
    assert ((found - exact).abs() <= bound).all()
    assert torch.equal(kept, found)
