"""Attention in tiles computes what torch's kernel computes, in the graphs of compiled layers that are meant to."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.models import compiled
from llmtrain.models.compiled import attend_in_tiles, causal_attention, compile_layers
from llmtrain.plan.described import kernel_lines
from llmtrain.plan.kernels import LONGEST_IN_TILES, SHORTEST_IN_TILES, attends_in_tiles, tiles_of
from llmtrain.predict.activations import layer_bytes
from tests.helpers.small_plan import small_plan

FIELDS = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TILED = {
    "model.attention": "sdpa",
    "kernels.blocks": "compiled",
    "parallel.precision": "fp32",
    "data.packing": "concat",
    "data.mask_documents": False,
    "data.sequence_length": 256,
    "model.config.max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("length", "heads", "shared", "width"), [(1, 2, 2, 8), (77, 4, 4, 8), (256, 8, 4, 24), (521, 4, 2, 16)]
)
def test_results_and_gradients_are_those_of_the_kernel(length, heads, shared, width):
    torch.manual_seed(0)
    states = [
        torch.randn(2, number, length, size, dtype=torch.float64, requires_grad=True)
        for number, size in ((heads, width), (shared, width), (shared, width + 3))
    ]
    own = causal_attention(*states, scale=0.3)
    expected = functional.scaled_dot_product_attention(*states, is_causal=True, enable_gqa=True, scale=0.3)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(own, expected)
    for one, other in zip(*(torch.autograd.grad(output, states, weights) for output in (own, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_no_result_depends_on_a_later_token():
    states = [torch.randn(1, 2, 200, 8) for _ in range(3)]
    before = causal_attention(*states)
    for one in states:
        one[:, :, 130:] += 100
    after = causal_attention(*states)
    assert torch.equal(after[:, :, :130], before[:, :, :130])
    assert not torch.equal(after[:, :, 130:], before[:, :, 130:])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 256, 1000, 1024])
def test_tiles_cover_a_sequence_without_overlap(length):
    tiles = tiles_of(length)
    assert [at for start, end in tiles for at in range(start, end)] == list(range(length))
    assert len(tiles) <= 8


def _kernels(monkeypatch, in_tiles: bool, **inputs) -> tuple[list[str], torch.Tensor]:
    """Attention functions in the compiled graphs of a model, and its logits."""
    found = []

    def backend(graph, arguments):
        found.extend(getattr(node.target, "__name__", "") for node in graph.graph.nodes)
        return compiled.run_graph(graph, arguments)

    monkeypatch.setattr(compiled, "_inductor", backend)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **FIELDS))
    compile_layers(model, "sdpa", in_tiles)
    logits = model(torch.arange(80)[None], use_cache=False, **inputs).logits
    return [name for name in found if "attention" in name], logits


def test_only_plain_causal_attention_is_replaced(monkeypatch):
    kernel = functional.scaled_dot_product_attention.__name__
    plain, expected = _kernels(monkeypatch, False)
    tiled, logits = _kernels(monkeypatch, True)
    assert (plain, tiled) == ([kernel], [causal_attention.__name__])
    torch.testing.assert_close(logits, expected)
    documents = torch.cat([torch.arange(30), torch.arange(50)])[None]
    assert _kernels(monkeypatch, True, position_ids=documents)[0] == [kernel]


@pytest.mark.parametrize(
    ("arguments", "named", "is_replaced"),
    [
        ((), {"is_causal": True}, True),
        ((), {}, False),
        ((None,), {"is_causal": True}, False),
        ((), {"is_causal": True, "dropout_p": 0.1}, False),
        ((), {"is_causal": True, "keys": 9}, False),
    ],
)
def test_other_calls_of_the_kernel_are_left_as_they_are(arguments, named, is_replaced):
    named = dict(named)
    keys = named.pop("keys", 8)
    found = []

    def backend(graph, _):
        found.extend(node.target for node in attend_in_tiles(graph).graph.nodes)
        return graph

    def attend(query, key, value):
        return functional.scaled_dot_product_attention(query, key, value, *arguments, **named)

    states = [torch.randn(1, 2, length, 4) for length in (8, keys, keys)]
    torch.compile(attend, backend=backend, dynamic=False)(*states)
    assert (causal_attention in found) is is_replaced


@pytest.mark.parametrize(
    "other",
    [
        {"kernels.blocks": "eager"},
        {"model.attention": "eager"},
        {"parallel.precision": "autocast_bf16"},
        {"data.mask_documents": True},
        {"parallel.activation_checkpointing": "selective"},
        {"data.sequence_length": SHORTEST_IN_TILES - 1},
        {"data.sequence_length": LONGEST_IN_TILES + 1},
    ],
)
def test_plans_use_tiles_where_they_are_exact_and_faster(other):
    assert attends_in_tiles(small_plan(**TILED))
    assert kernel_lines(small_plan(**TILED)) == ["kernels  layers compiled; attention in tiles"]
    assert not attends_in_tiles(small_plan(**TILED | other))


def test_the_plan_counts_the_probabilities_that_are_kept():
    length = 512
    fields = TILED | {"data.sequence_length": length}
    fields |= {"batch.micro_batch_size": 2, "batch.global_batch_size": 4}
    tiled, whole = (small_plan(**fields | {"kernels.blocks": blocks}) for blocks in ("compiled", "eager"))
    heads, width = tiled.model.heads, tiled.model.head_dim
    states = [torch.randn(2, heads, length, width, requires_grad=True) for _ in range(3)]
    kept, shapes = {}, {(end - start, end) for start, end in tiles_of(length)}

    def pack(tensor):
        if tensor.is_floating_point() and tuple(tensor.shape[-2:]) in shapes:  # not the mask
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    # This backend chooses what is kept as the compiler does, but compiles nothing.
    function = torch.compile(causal_attention, dynamic=False, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*states)
    counted = [layer_bytes(one, one.model.weights, 0, 2 * length) for one in (tiled, whole)]
    sums = 4 * heads * 2 * length  # the kernel's log-sum-exp
    assert sum(kept.values()) == counted[0] - counted[1] + sums
    assert output.shape == (2, heads, length, width)
