"""The chunked loss equals the whole loss: value, gradients, and order of parameters."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.errors import RecipeError
from llmtrain.models import ChunkedLoss, chunked, chunked_loss, target_loss_sum
from llmtrain.models.chunked import check_chunks
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.model import build_tiny_model
from tests.helpers import own_losses

VOCABULARY = 97
FIELDS = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def _model(dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **FIELDS), dtype=dtype)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, 19), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[0, 3:9] = -100
    return tokens, labels


def _gradients(loss, model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gpt2",
        "opt",
        "bloom",
        "gemma2",
        "cohere",
        "granite",
        "falcon_h1",
        "qwen3_moe",
        "modernbert-decoder",
        "zamba",
    ],
)
def test_families_are_split_into_backbone_and_head(family):
    """Tied and untied heads, capped and scaled logits, a decoder within a backbone, a router's loss."""
    check_chunks(AutoConfig.for_model(family))


def test_a_lost_router_loss_is_detected(monkeypatch):
    config = AutoConfig.for_model("qwen3_moe", output_router_logits=True)
    check_chunks(config)
    own = chunked.Losses
    monkeypatch.setattr(chunked, "Losses", lambda loss_sum, aux_loss: own(loss_sum=loss_sum))
    with pytest.raises(RecipeError, match="deviate by"):
        check_chunks(config)


@pytest.mark.parametrize("tokens", [5, chunked.ONE_CHUNK])
def test_the_router_loss_is_that_of_the_model(tokens):
    config = AutoConfig.for_model("qwen3_moe", output_router_logits=True)
    model, (inputs, labels) = build_tiny_model(shrink_configuration(config, LAYERS), "eager"), _batch()
    expected = model(inputs, use_cache=False).aux_loss
    ChunkedLoss(model, tokens, recomputed=False)
    assert torch.equal(model(inputs, use_cache=False, targets=labels).aux_loss, expected)


def test_a_family_whose_head_has_other_inputs_is_refused(monkeypatch):
    part = ChunkedLoss._chunk_loss
    monkeypatch.setattr(ChunkedLoss, "_chunk_loss", lambda self, hidden, targets: part(self, hidden * 1.01, targets))
    with pytest.raises(RecipeError, match=r"losses or gradients deviate by .*\n.*kernels\.loss=whole"):
        check_chunks(AutoConfig.for_model("llama"))


def test_a_family_without_a_head_of_its_own_is_refused():
    with pytest.raises(RecipeError, match="trocr has no head that can be called on its own"):
        check_chunks(AutoConfig.for_model("trocr"))


def test_a_missing_gradient_is_detected(monkeypatch):
    monkeypatch.setattr(chunked._Backbone, "parameters", lambda self: [])
    with pytest.raises(RecipeError, match="deviate by inf"):
        check_chunks(AutoConfig.for_model("llama", tie_word_embeddings=False))


def test_bf16_sums_the_heads_gradient_in_fp32():
    """Each side rounds its result once, by 2⁻⁹ at most; the hidden states' gradients each once more, on their way."""
    tokens, labels = _batch()
    model = _model(torch.bfloat16)
    whole = _gradients(target_loss_sum(model(tokens).logits, labels), model)
    ChunkedLoss(model, tokens=4, recomputed=False)
    chunks = _gradients(model(tokens, targets=labels).loss_sum, model)
    for name, gradient in whole.items():
        assert (chunks[name] - gradient).abs().max() <= 2**-7 * gradient.abs().max(), name


@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_of_one_chunk_are_left_to_autograd(recomputed, monkeypatch):
    for name in ("_Fused", "checkpoint"):
        monkeypatch.setattr(chunked, name, None)
    tokens, labels = _batch()
    model = _model()
    whole = _gradients(target_loss_sum(model(tokens).logits, labels), model)
    ChunkedLoss(model, tokens=tokens.numel(), recomputed=recomputed)
    for name, gradient in _gradients(model(tokens, targets=labels).loss_sum, model).items():
        assert torch.equal(gradient, whole[name]), name


@pytest.mark.parametrize("chunk", [5, chunked.ONE_CHUNK])
def test_chunks_are_given_the_numbers_of_their_tokens(chunk):
    tokens, labels = _batch()
    values = torch.rand(*labels.shape, 2)

    def loss_of(logits, labels, values):
        weighted = own_losses.losses_of(logits, labels) * values[..., 0] / (1 + values[..., 1])
        return torch.stack([weighted.sum(), values[labels >= 0].sum()])

    model = _model()
    expected = loss_of(model(tokens).logits, labels, values)
    whole = _gradients(expected[0], model)
    ChunkedLoss(model, tokens=chunk, recomputed=True, loss_of=loss_of)
    sums = model(tokens, targets=labels, values=values).loss_sum
    torch.testing.assert_close(sums, expected)
    for name, gradient in _gradients(sums[0], model).items():
        torch.testing.assert_close(gradient.float(), whole[name].float())


def test_the_loss_without_gradients_is_the_same():
    tokens, labels = _batch()
    model = _model()
    with torch.no_grad():
        whole = target_loss_sum(model(tokens).logits, labels)
        ChunkedLoss(model, tokens=4, recomputed=False)
        assert model(tokens, targets=labels).loss_sum.item() == pytest.approx(whole.item(), rel=1e-6)


def test_the_model_is_not_changed():
    tokens, labels = _batch()
    model = _model()
    assert chunked_loss(model) is None
    names, logits = [name for name, _ in model.named_parameters()], model(tokens).logits
    loss = ChunkedLoss(model, tokens=4, recomputed=False)
    model(tokens, targets=labels).loss_sum.backward()
    assert chunked_loss(model) is loss
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(tokens).logits, logits)


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_tensor_holds_all_logits(recomputed):
    """Of 38 tokens, in chunks of 4: nothing of more than 4 rows of the vocabulary but weights and their gradients."""
    tokens, labels = _batch()
    model = _model()
    ChunkedLoss(model, tokens=4, recomputed=recomputed)
    seen = set()

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple | list) else [result]:
                if isinstance(one, torch.Tensor) and one.dim() and one.size(-1) == VOCABULARY:
                    seen.add(one.numel() // VOCABULARY)
            return result

    with Shapes():
        model(tokens, targets=labels).loss_sum.backward()
    assert seen - {FIELDS["hidden_size"]}
    assert max(seen - {FIELDS["hidden_size"]}) <= 4
