"""Attention by document boundaries: its results, its refusals, and the arguments of torch's kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.data import Documents
from llmtrain.errors import FamilyError, RecipeError
from llmtrain.models import cpu, varlen
from llmtrain.models.tiny import varlen_check
from llmtrain.models.tiny.varlen_check import check_attention
from llmtrain.models.varlen import varlen_attention, varlen_operator
from tests.helpers.small_plan import small_plan

POSITIONS = torch.stack([torch.arange(12) % 7, torch.arange(12)])
BOUNDS = [0, 7, 12, 24]


@pytest.fixture(autouse=True)
def _without_kernel(monkeypatch):
    """Documents are computed one at a time, even if this process has compiled the kernel for CPUs."""
    monkeypatch.setattr(cpu, "_library", None)


class _Module(nn.Module):
    is_causal = True


def _states(heads: int = 4, keys: int = 2, width: int = 8, values: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, 12, width), (2, keys, 12, width), (2, keys, 12, values))
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _expected(query, key, value, scale: float, window: int | None, sinks=None) -> torch.Tensor:
    """By a mask of all rows: [batch, T, heads, width]."""
    document = torch.bucketize(torch.arange(24), torch.tensor(BOUNDS), right=True).view(2, 12)
    distance = torch.arange(12)[:, None] - torch.arange(12)
    allowed = (document[:, :, None] == document[:, None]) & (distance >= 0)
    if window:
        allowed &= distance < window
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : value.shape[2]] @ value).transpose(1, 2)


@pytest.mark.parametrize(("heads", "keys", "values"), [(4, 4, 8), (4, 2, 8), (3, 1, 8), (4, 4, 6)])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_varlen_equals_attention_with_a_document_mask(heads, keys, values, window, scale):
    states = _states(heads, keys, values=values)
    arguments = Documents.of(POSITIONS).arguments(torch.device("cpu"))
    output, weights = varlen_attention(_Module(), *states, None, scaling=scale, sliding_window=window, **arguments)
    expected = _expected(*states, scale or 8**-0.5, window)
    assert weights is None
    # fp64: a hundred terms of up to about ten, in another order, are off by 100 · 10 · 2⁻⁵³ at most.
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for own, other in zip(
        *(torch.autograd.grad((one * direction).sum(), states) for one in (output, expected)), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("longest", [12, torch.tensor([12])], ids=["eager", "in a graph"])
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_take_a_share_of_the_weights(window, longest):
    """As `transformers` computes them: one more score of each head, whose weight is dropped."""
    states, sinks = _states(), torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    arguments = Documents.of(POSITIONS).arguments(torch.device("cpu")) | {"max_length_q": longest}
    output, _ = varlen_attention(_Module(), *states, None, sliding_window=window, s_aux=sinks, **arguments)
    expected = _expected(*states, 8**-0.5, window, sinks)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for own, other in zip(
        *(torch.autograd.grad((one * direction).sum(), [*states, sinks]) for one in (output, expected)), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_varlen_under_autocast_computes_in_its_type():
    arguments = Documents.of(POSITIONS).arguments(torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert varlen_attention(_Module(), *_states(), None, **arguments)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"softcap": 50.0}, "caps its scores"),
        ({"position_bias": torch.zeros(1)}, "a bias"),
        ({"dropout": 0.1}, "attention dropout of 0.1"),
        ({"is_causal": False}, "does not attend causally"),
        ({"attention_mask": torch.zeros(2, 1, 12, 12)}, "a mask of its own"),
        ({"cu_seq_lens_q": None}, "do not reach"),
    ],
)
def test_unsupported_arguments_are_refused(given, reason):
    arguments = {"attention_mask": None} | Documents.of(POSITIONS).arguments(torch.device("cpu")) | given
    with pytest.raises(ValueError, match=reason):
        varlen_attention(_Module(), *_states(), **arguments)


@pytest.mark.parametrize(("keys", "width", "values", "window"), [(4, 8, 8, None), (2, 8, 8, 3), (4, 12, 6, None)])
def test_torchs_kernel_gets_valid_arguments(monkeypatch, keys, width, values, window):
    """No GPU: a stand-in has the kernel's signature and conditions, and computes document by document."""

    def kernel(query, key, value, first, second, most, again, *, return_aux, scale, window_size, **groups):
        assert return_aux.lse
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert query.shape[-1] % 8 == 0
        assert first is second
        assert (first.tolist(), most, again) == (BOUNDS, 12, 12)
        assert first.dtype == torch.int32
        assert groups == ({"enable_gqa": keys != 4} if varlen.GROUPS_ANNOUNCED else {})
        assert window_size[1] == 0
        own = None if window_size[0] < 0 else window_size[0] + 1
        return varlen._attend_per_document(query, key, value, first, scale, own), None

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    states = [state.detach() for state in _states(4, keys, width, values)]
    bounds = Documents.of(POSITIONS)
    joined = [varlen.flatten_batch(state).bfloat16() for state in states]
    output = varlen._attend_by_kernel(*joined, bounds.bounds, bounds.longest, width**-0.5, window)
    expected = _expected(*(state.bfloat16().float() for state in states), width**-0.5, window)
    # The weights, which add up to 1, and the sum are rounded to 8 bits; values go up to about 4.
    torch.testing.assert_close(output.view(2, 12, 4, values).float(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("longest", [12, torch.tensor([12])], ids=["eager", "in a graph"])
def test_torch_accepts_the_call_and_differentiates_it(longest):
    """The real operator, on tensors without memory: its arguments, its shapes and its backward pass, no numbers."""
    states = [state.detach().to("meta", torch.bfloat16).requires_grad_() for state in _states(4, 2, 12, 6)]
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="meta")
    output = varlen._attend_by_kernel(
        *(state.transpose(1, 2).flatten(0, 1) for state in states), bounds, longest, 0.3, 3
    )
    assert output.shape == (24, 4, 6)
    output.sum().backward()
    assert [state.grad.shape for state in states] == [state.shape for state in states]


def test_the_kernel_does_not_get_fp32():
    state = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match=r"bf16 or fp16, not in torch\.float32"):
        varlen._attend_by_kernel(state, state, state, torch.tensor([0, 4]), 4, 1.0, None)


@pytest.mark.parametrize(("keys", "width", "values", "window"), [(4, 8, 8, None), (2, 8, 8, 3), (4, 12, 6, 50)])
def test_the_operator_of_a_graph_changes_no_bit(keys, width, values, window):
    states = [varlen.flatten_batch(state).detach().requires_grad_() for state in _states(4, keys, width, values)]
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    given = (*states, bounds, torch.tensor([12]), 0.3, window)
    output, _ = varlen_operator(*given)
    expected = varlen._attend_per_document(*states, bounds, 0.3, window)
    assert torch.equal(output, expected)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    for own, other in zip(*(torch.autograd.grad(one, states, direction) for one in (output, expected)), strict=True):
        assert torch.equal(own, other)
    torch.library.opcheck(varlen_operator, given)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *(
            (family, {})
            for family in ("llama", "qwen3", "gemma3_text", "cohere2", "mixtral", "deepseek_v3", "gpt_neox", "gpt_oss")
        ),
        ("mistral", {"sliding_window": 4096}),
        ("gpt2", {"attn_pdrop": 0.0}),
        ("opt", {"attention_dropout": 0.0}),  # whose masks do not know of documents
        ("llama4_text", {}),  # chunks
        ("nemotron", {}),  # whose layers drop the boundaries
    ],
)
def test_families_equal_eager_attention(family, fields):
    check_attention(AutoConfig.for_model(family, **fields), "varlen")


@pytest.mark.parametrize(
    ("family", "attention", "reason"),
    [
        ("gemma2", "varlen", "it caps its scores"),
        ("gpt2", "varlen", "it has attention dropout of 0.1, which the kernel does not support"),
        ("bloom", "varlen", "is not called through the table"),
        ("deepseek_v32", "varlen", "its own code reads the mask, which is not made"),
        ("falcon", "flash_attention_3", "it computes attention itself"),
    ],
)
def test_unsupported_families_are_refused(family, attention, reason):
    with pytest.raises(FamilyError, match=rf"(?s){reason}.*--set model\.attention=auto"):
        check_attention(AutoConfig.for_model(family), attention)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2", "nemotron", "stablelm"])
def test_document_boundaries_reach_a_flash_kernel(family):
    check_attention(AutoConfig.for_model(family), "flash_attention_2")


def test_boundaries_that_do_not_reach_attention_are_detected(monkeypatch):
    monkeypatch.setattr(varlen_check, "pass_boundaries", lambda model: None)
    with pytest.raises(FamilyError, match="the document boundaries do not reach its attention"):
        check_attention(AutoConfig.for_model("nemotron"), "flash_attention_2")


def test_chunks_that_are_not_cut_are_detected(monkeypatch):
    monkeypatch.setattr(varlen, "chunk_size", lambda module: None)
    with pytest.raises(FamilyError, match="logits deviate from those of 'eager'"):
        check_attention(AutoConfig.for_model("llama4_text"), "varlen")


def test_a_family_with_deviating_attention_is_refused(monkeypatch):
    own = varlen._attend_per_document
    monkeypatch.setattr(varlen, "_attend_per_document", lambda *states: own(*states) * 1.001)
    with pytest.raises(FamilyError, match="logits deviate from those of 'eager' by"):
        check_attention(AutoConfig.for_model("llama"), "varlen")


def test_a_wrong_gradient_is_detected(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.01

    own = varlen._attend_per_document
    monkeypatch.setattr(varlen, "_attend_per_document", lambda *states: Wrong.apply(own(*states)))
    with pytest.raises(FamilyError, match=r"the gradient of .* deviates from that of 'eager' by"):
        check_attention(AutoConfig.for_model("llama"), "varlen")


def test_the_random_state_is_not_changed():
    before = torch.get_rng_state()
    check_attention(AutoConfig.for_model("llama"), "varlen")
    assert torch.equal(torch.get_rng_state(), before)


def test_no_tensor_has_the_size_of_a_mask(monkeypatch):
    """A row of 50 documents of 2 tokens: nothing is 100 × 100."""
    positions = (torch.arange(100) % 2)[None]
    seen = set()

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple | list) else [result]:
                if isinstance(one, torch.Tensor):
                    seen.add(one.numel())
            return result

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=1, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="varlen")
    bounds = Documents.of(positions).arguments(torch.device("cpu"))
    with Shapes():
        output = model(input_ids=positions, position_ids=positions, use_cache=False, **bounds)
        functional.cross_entropy(output.logits[0], positions[0]).backward()
    assert 100 * 16 in seen
    assert max(seen) < 100 * 100


def test_a_plan_says_what_recurrences_in_slices_cost():
    said = {"mamba": "from the beginning of the documents", "mamba2": "1.5 times as long", "llama": ""}
    for architecture, text in said.items():
        fields = {"model.architecture": architecture, "model.config": {"vocab_size": 256}, "parallel.sequence": 2}
        notes = [note["message"] for note in small_plan(**fields).notes]
        assert len(notes) == bool(text)
        assert all(text in note for note in notes)


def test_a_family_that_mixes_documents_is_noted_in_a_plan():
    plan = small_plan(**{"model.architecture": "cpmant", "model.config": {"vocab_size": 256}})
    assert [note["rule"] for note in plan.notes] == ["data.documents_mixed"]
    assert not small_plan(
        **{"model.architecture": "cpmant", "model.config": {"vocab_size": 256}, "data.mask_documents": False}
    ).notes
    assert not small_plan(**{"model.architecture": "mamba", "model.config": {"vocab_size": 256}}).notes


@pytest.mark.parametrize("source", [{"name": "stdlib_chat"}, {"name": "rows.jsonl", "format": "messages"}])
def test_a_plan_refuses_to_pack_conversations_for_families_that_mix_documents(source):
    fields = {"model.architecture": "cpmant", "model.config": {"vocab_size": 256}, "data.sources": [source]}
    with pytest.raises(RecipeError, match=r"'cpmant' lets packed conversations influence(.|\n)*packing=none"):
        small_plan(**fields)
    assert not small_plan(**fields, **{"data.packing": "none"}).notes
    assert small_plan(**(fields | {"model.architecture": "mamba"}))
