"""The kernels for CPUs: attention by document boundaries and cross-entropy, against plain formulas in fp64."""

from __future__ import annotations

import math
import platform
import re

import pytest
import torch
from torch._dynamo import lookup_backend
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.data import NO_TARGET, Documents
from llmtrain.engines.forward import check_kernels
from llmtrain.errors import RecipeError
from llmtrain.models import compiled, cpu, varlen
from llmtrain.models.build import model_configuration
from llmtrain.models.chunked import check_chunks
from llmtrain.models.compiled import compile_for_cpu, compiled_loss
from llmtrain.models.loss import target_loss_sum, target_losses
from llmtrain.models.varlen import varlen_operator
from llmtrain.overrides.torch import compile_cpp
from llmtrain.plan.predict.activations import layer_bytes
from tests.helpers.small_plan import small_plan

UNIT = 2.0**-24
"""Largest relative error of rounding to fp32."""
FLUSHED = 1e-30
"""More than weights that are 0 instead of e⁻⁸⁷ change any result."""
LONGEST = torch.tensor([0])  # which the kernel for CPUs does not read
# Documents of one token, within a block of 64 queries, that end with a block, and across several.
CASES = {
    "one document": ([0, 130], 2, 2, 24, 24, None),
    "documents": ([0, 1, 2, 33, 97, 161, 400], 4, 2, 8, 8, None),
    "an empty document": ([0, 40, 40, 60], 2, 1, 8, 8, None),
    "window": ([0, 70, 300], 4, 1, 16, 16, 50),
    "window of a token": ([0, 5, 80], 2, 2, 8, 8, 1),
    "window larger than a document": ([0, 70, 100], 2, 2, 8, 8, 4096),
    "odd widths": ([0, 90, 100], 3, 1, 7, 13, 33),
    "wide heads": ([0, 66, 200], 2, 1, 128, 64, None),
}

PROCESSORS = {"of this processor": ""}
"""Lines before the source, so that it is compiled for processors with shorter vectors."""
if platform.machine() == "x86_64":
    PROCESSORS["AVX2"] = '#pragma GCC target("no-avx512f")\n#undef __AVX512F__\n'
    PROCESSORS["SSE"] = '#pragma GCC target("no-avx")\n#undef __AVX512F__\n#undef __AVX__\n'


@pytest.fixture(autouse=True, scope="module")
def _with_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_library", None)
        compile_for_cpu("varlen", "whole")
        yield


def _compile_for(prefix: str, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "_library", None)
    cpu.set_library(compile_cpp(prefix + cpu.SOURCE.read_text()))


def _states(bounds, heads, keys, width, values, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (keys, width), (keys, values))
    return [torch.randn(bounds[-1], *one, generator=generator).to(dtype).requires_grad_() for one in shapes]


def _allowed(bounds: list[int], window: int | None) -> torch.Tensor:
    tokens = bounds[-1]
    document = torch.bucketize(torch.arange(tokens), torch.tensor(bounds), right=True)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (document[:, None] == document) & (distance >= 0) & (distance < (window or tokens))


def _expected(states, direction, scale, allowed):
    """Output and gradients of queries, keys and values in fp64, and a bound of the error of each in fp32.

    Sums of n terms are off by n units of the sum of their absolute values (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1), the exponential by two, to first order.
    """
    query, key, value, direction = (one.detach().double().transpose(0, 1) for one in (*states, direction))
    group = len(query) // len(key)
    key, value = (one.repeat_interleave(group, dim=0) for one in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~allowed, -torch.inf)
    weights = scores.softmax(-1)
    output = weights @ value
    of_weights = direction @ value.mT
    of_scores = weights * (of_weights - (direction * output).sum(-1, keepdim=True))
    exact = [output, of_scores @ key * scale, of_scores.mT @ query * scale, weights.mT @ direction]

    terms, width, values = allowed.sum(-1).max(), query.shape[-1], value.shape[-1]
    of_score = (width + 3) * UNIT * (query.abs() @ key.abs().mT * scale).masked_fill(~allowed, 0)
    sums = scores.logsumexp(-1, keepdim=True).abs()
    relative = of_score + of_score.amax(-1, keepdim=True) + (terms + 4 + sums) * UNIT
    of_output = weights * relative @ value.abs() + (terms + 2) * UNIT * (weights @ value.abs())
    products = direction.abs() @ value.abs().mT
    mean = (direction.abs() * (of_output + (values + 2) * UNIT * output.abs())).sum(-1, keepdim=True)
    difference = (of_weights - (direction * output).sum(-1, keepdim=True)).abs()
    off = weights * ((relative + 2 * UNIT) * difference + (values + 2) * UNIT * products + mean)
    most, own = of_scores.abs(), (group * terms + 2) * UNIT
    bounds = [
        of_output,
        (off @ key.abs() + own * most @ key.abs()) * scale,
        (off.mT @ query.abs() + own * most.mT @ query.abs()) * scale,
        (weights * relative).mT @ direction.abs() + own * weights.mT @ direction.abs(),
    ]
    return exact[:2] + _of_keys(exact[2:], group), [one + FLUSHED for one in bounds[:2] + _of_keys(bounds[2:], group)]


def _of_keys(gradients: list[torch.Tensor], group: int) -> list[torch.Tensor]:
    return [one.unflatten(0, (-1, group)).sum(1) for one in gradients]


@pytest.mark.parametrize("steepness", [1, 10])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("prefix", PROCESSORS.values(), ids=PROCESSORS)
def test_output_and_gradients_are_those_of_a_mask(monkeypatch, prefix, case, steepness):
    _compile_for(prefix, monkeypatch)
    bounds, *sizes, window = case
    scale = steepness / math.sqrt(sizes[2])
    states = _states(bounds, *sizes)
    output, _ = varlen_operator(*states, torch.tensor(bounds, dtype=torch.int32), LONGEST, scale, window)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    found = [output.detach(), *torch.autograd.grad(output, states, direction)]
    exact, most = _expected(states, direction, scale, _allowed(bounds, window))
    for own, one, bound in zip(found, exact, most, strict=True):
        own = own.transpose(0, 1)
        assert bool(((own - one).abs() <= bound).all()), float(((own - one).abs() / bound).max())


def test_the_log_sums_are_those_of_the_scores():
    query, key, value = _states([0, 100], 2, 2, 8, 8)
    _, log_sums = varlen_operator(query, key, value, torch.tensor([0, 100], dtype=torch.int32), LONGEST, 0.3, None)
    scores = torch.einsum("ihd,jhd->hij", query, key).mul(0.3).masked_fill(~_allowed([0, 100], None), -torch.inf)
    torch.testing.assert_close(log_sums, scores.logsumexp(-1))


@pytest.mark.parametrize("changed", ["later tokens", "other documents"])
def test_no_bit_depends_on_tokens_that_are_not_attended_to(changed):
    bounds = torch.tensor([0, 70, 170, 200], dtype=torch.int32)
    kept = slice(70, 170 if changed == "other documents" else 133)
    states = _states([0, 200], 4, 2, 24, 24)
    others = [one.detach().clone() for one in states]
    for one in others:
        one[: kept.start] = torch.nan
        one[kept.stop :] = torch.nan if changed == "other documents" else 1e4
    outputs = [varlen_operator(*given, bounds, LONGEST, 0.3, None)[0][kept] for given in (states, others)]
    assert torch.equal(*outputs)
    outputs[0].sum().backward()
    for one in states:
        assert not one.grad[: kept.start].any()
        assert not one.grad[kept.stop :].any()
        assert one.grad[kept].any()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("state", range(3))
def test_numbers_that_are_not_finite_are_not_hidden(state, wrong):
    """The guard of a run must see them, in the output of each query that attends to them, and in the gradients."""
    states = [one.detach() for one in _states([0, 100], 1, 1, 8, 8)]
    states[state][40, 0, 3] = wrong
    states = [one.requires_grad_() for one in states]
    output, _ = varlen_operator(*states, torch.tensor([0, 100], dtype=torch.int32), LONGEST, 0.3, None)
    assert not output[40].isfinite().all()
    assert not all(one.isfinite().all() for one in torch.autograd.grad(output.sum(), states))


@pytest.mark.parametrize(
    ("bounds", "heads"),
    [([0, 5], 2), ([1, 9], 2), ([0, 12], 2), ([0, 7, 6, 9], 2), ([-1, 9], 2), ([9], 2), ([0, 9], 3)],
)
def test_invalid_boundaries_and_heads_are_refused(bounds, heads):
    states = _states([0, 9], heads, 2, 8, 8)
    with pytest.raises(ValueError, match="do not fit its tokens"):
        varlen_operator(*states, torch.tensor(bounds, dtype=torch.int32), LONGEST, 0.3, None)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_added_to_the_log_sums(window):
    """fp64, one document at a time, has the exact numbers; fp32 sums of 50 terms are off by some units of 2⁻²⁴."""
    bounds, sinks = torch.tensor([0, 30, 50], dtype=torch.int32), torch.tensor([0.5, -2.0, 3.0, 0.0])
    given, found = [*_states([0, 50], 4, 2, 24, 24), sinks], []
    direction = torch.randn(50, 4, 24, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.float64):
        *states, last = (one.detach().to(dtype).requires_grad_() for one in given)
        output, _ = varlen_operator(*states, bounds, LONGEST, 0.3, window, last)
        found.append([output, *torch.autograd.grad(output, [*states, last], direction.to(dtype))])
    for own, exact in zip(*found, strict=True):
        torch.testing.assert_close(own, exact.float())
    torch.library.opcheck(varlen_operator, (*given[:3], bounds, LONGEST, 0.3, window, sinks.requires_grad_()))


def test_the_operator_obeys_the_rules_of_torch():
    states = _states([0, 7, 24], 4, 2, 8, 6)
    states[0] = states[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # not contiguous
    torch.library.opcheck(varlen_operator, (*states, torch.tensor([0, 7, 24], dtype=torch.int32), LONGEST, 0.3, 5))


def test_results_do_not_depend_on_the_number_of_threads():
    states = _states([0, 100, 300], 4, 2, 24, 24)
    given = (*states, torch.tensor([0, 100, 300], dtype=torch.int32), LONGEST, 0.3, None)
    found, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        output, _ = varlen_operator(*given)
        found.append((output, *torch.autograd.grad(output.square().sum(), states)))
    torch.set_num_threads(before)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_computed_one_document_at_a_time(dtype):
    states = _states([0, 30, 50], 2, 2, 8, 8, dtype)
    output, log_sums = varlen_operator(*states, torch.tensor([0, 30, 50], dtype=torch.int32), LONGEST, 0.3, None)
    assert output.dtype == dtype
    assert not log_sums.numel()


def test_the_plan_counts_what_is_kept_for_the_backward_pass():
    plan = small_plan(**{"model.attention": "varlen", "batch.micro_batch_size": 2, "batch.global_batch_size": 4})
    fused = small_plan(
        **{"model.attention": "sdpa", "batch.micro_batch_size": 2, "batch.global_batch_size": 4},
        **{"data.mask_documents": False},
    )
    heads, width, tokens = plan.model.heads, plan.model.head_dim, 2 * 128
    kept = {}

    def pack(tensor):
        if tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    states = _states([0, tokens], heads, heads, width, width)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        varlen_operator(*states, torch.tensor([0, tokens], dtype=torch.int32), LONGEST, 0.3, None)
    assert sum(kept.values()) == 4 * tokens * heads * (4 * width + 1)  # what the plan counts for a fused kernel
    assert layer_bytes(plan, plan.model.weights, 0, tokens) == layer_bytes(fused, fused.model.weights, 0, tokens)


def _model_with(attention: str):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def test_plain_and_compiled_layers_call_the_kernel(monkeypatch):
    tokens, positions = torch.arange(40).view(2, 20), torch.stack([torch.arange(20) % 13, torch.arange(20)])
    bounds = Documents.of(positions).arguments(torch.device("cpu"))
    monkeypatch.setattr(varlen, "_attend_per_document", None)
    monkeypatch.setattr(compiled, "_inductor", lookup_backend("aot_eager"))
    torch._dynamo.reset()
    model = _model_with("varlen")
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(tokens, position_ids=positions, use_cache=False, **bounds).logits.square().sum().backward()
        gradients.append([one.grad for one in model.parameters()])
        compiled.compile_layers(model, "varlen")
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("fields", [{"model.attention": "varlen"}, {"kernels.loss": "compiled"}], ids=str)
def test_a_plan_for_cpus_compiles_the_kernels_before_its_checks(monkeypatch, fields):
    monkeypatch.setattr(cpu, "_library", None)
    plan = small_plan(**fields)
    check_kernels(model_configuration(plan.recipe), plan)
    assert cpu.is_compiled()


@pytest.mark.parametrize("fault", ["no compiler", "a compiler that fails"])
def test_without_the_kernels_the_log_or_the_error_says_why(monkeypatch, capsys, fault):
    def fail(source):
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr(cpu, "_library", None)
    if fault == "no compiler":
        monkeypatch.setattr(compiled, "missing_for_compiler", lambda on_cpu: ("no C++ compiler is found", "install"))
    monkeypatch.setattr(compiled, "compile_cpp", fail)
    compile_for_cpu("varlen", "whole")
    why = "no C++ compiler is found" if fault == "no compiler" else "C++ compile error"
    assert capsys.readouterr().out == (
        f"'varlen' computes one document at a time, because its kernel is not compiled: {why}\n"
    )
    states = _states([0, 30, 50], 2, 2, 8, 8)
    assert not varlen_operator(*states, torch.tensor([0, 30, 50], dtype=torch.int32), LONGEST, 0.3, None)[1].numel()
    with pytest.raises(RecipeError, match=rf"kernels.loss: 'compiled' cannot be used: {re.escape(why)}.*\n.*=chunked"):
        compile_for_cpu("sdpa", "compiled")


def _logits(tokens: int, vocabulary: int, steepness: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = steepness * torch.randn(tokens, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::5] = NO_TARGET
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("steepness", [1, 30])
@pytest.mark.parametrize("vocabulary", [1, 5, 16, 997, 4096])
@pytest.mark.parametrize("prefix", PROCESSORS.values(), ids=PROCESSORS)
def test_losses_and_gradients_of_logits_are_those_in_fp64(monkeypatch, prefix, vocabulary, steepness):
    """Bounds as in `_expected`; a vector of at least four sums is added up, and then its numbers."""
    _compile_for(prefix, monkeypatch)
    logits, labels = _logits(12, vocabulary, steepness)
    direction = torch.randn(12, generator=torch.Generator().manual_seed(1))
    exact, has_target = logits.detach().double(), (labels != NO_TARGET)[:, None]
    sums = exact.logsumexp(-1, keepdim=True)
    weights = (exact - sums).exp()
    picked = torch.zeros_like(exact).scatter(1, labels.clamp_min(0)[:, None], 1.0)
    losses = (sums - (exact * picked).sum(-1, keepdim=True)) * has_target
    gradient = direction.double()[:, None] * (weights - picked) * has_target

    below = exact.amax(-1, keepdim=True) - exact
    of_sum = (vocabulary / 4 + 16 + 3) * UNIT + UNIT * (weights * below).sum(-1, keepdim=True)
    of_log_sum = of_sum + 2 * UNIT * ((below * weights).sum(-1, keepdim=True).abs() + math.log(vocabulary) + sums.abs())
    of_weight = weights * (UNIT * (exact - sums).abs() + of_log_sum + 4 * UNIT)
    of_gradient = direction.double()[:, None].abs() * (of_weight + UNIT * (weights - picked).abs() + FLUSHED)

    kept = cpu.cross_entropies(logits * 1.0, labels)  # a copy, because the backward pass overwrites it
    (found,) = torch.autograd.grad(kept, logits, direction)
    assert ((kept.detach()[:, None] - losses).abs() <= of_log_sum + UNIT * losses.abs()).all()
    assert ((found - gradient).abs() <= of_gradient).all(), float(((found - gradient).abs() / of_gradient).max())
    assert not found[::5].any()
    assert not kept[::5].any()


@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_loss_is_the_eager_loss(dtype, of_tokens):
    """A gradient in bf16 is rounded once, by 2⁻⁹ at most, on both sides."""
    logits, labels = _logits(40, 997, 3)
    logits, labels = logits.detach().view(2, 20, 997).to(dtype).requires_grad_(), labels.view(2, 20)
    losses, gradients = [], []
    for loss_of in (compiled_loss(True, of_tokens), target_losses if of_tokens else target_loss_sum):
        loss = loss_of(logits * 1.0, labels)
        losses.append(loss)
        gradients += torch.autograd.grad(loss.square().sum(), logits)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    assert gradients[0].dtype == dtype
    torch.testing.assert_close(*gradients, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 20])
def test_a_logit_that_is_not_finite_has_the_effect_that_it_has_in_torch(wrong, place):
    logits, labels = _logits(4, 21)
    labels[:] = torch.tensor([NO_TARGET, place, 3, 4])
    with torch.no_grad():
        logits[1:3, place] = wrong
    gradients, losses = [], []
    for loss_of in (cpu.cross_entropies, lambda *given: target_losses(given[0][None], given[1][None])[0]):
        losses.append(loss_of(logits * 1.0, labels))
        gradients += torch.autograd.grad(losses[-1].sum(), logits)
    torch.testing.assert_close(*losses, equal_nan=True)
    torch.testing.assert_close(*gradients, equal_nan=True)


@pytest.mark.parametrize("label", [21, -1, -101, 2**40])
def test_a_label_that_is_no_token_is_refused(label):
    logits, labels = _logits(4, 21)
    labels[2] = label
    with pytest.raises(ValueError, match="below the size of the vocabulary, 21"):
        cpu.cross_entropies(logits, labels)


def test_labels_of_another_integer_type_are_read_as_what_they_are():
    logits, labels = _logits(9, 21)
    assert torch.equal(cpu.cross_entropies(logits, labels.int()), cpu.cross_entropies(logits, labels))


def test_losses_do_not_depend_on_the_number_of_threads():
    found, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        logits, labels = _logits(33, 130)
        losses = cpu.cross_entropies(logits * 1.0, labels)
        found.append((losses, *torch.autograd.grad(losses.sum(), logits)))
    torch.set_num_threads(before)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_the_gradient_overwrites_the_logits_and_an_operation_that_kept_them_notices():
    logits, labels = _logits(4, 32)
    output = logits * 1.0
    (gradient,) = torch.autograd.grad(cpu.cross_entropies(output, labels).sum(), output)
    assert gradient.data_ptr() == output.data_ptr()
    kept = logits.tanh()  # whose gradient is computed from its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cpu.cross_entropies(kept, labels).sum().backward()


def test_a_family_that_keeps_its_logits_is_refused_before_a_run(monkeypatch):
    class Capped(torch.nn.Linear):
        def forward(self, states):
            return super().forward(states).tanh()

    plan = small_plan(**{"kernels.loss": "compiled"})
    config = model_configuration(plan.recipe)
    check_chunks(config, compiled_loss(on_cpu=True))
    monkeypatch.setattr("transformers.models.llama.modeling_llama.nn.Linear", Capped)
    check_chunks(config)
    with pytest.raises(RecipeError, match="modified by an inplace operation"):
        check_chunks(config, compiled_loss(on_cpu=True))
