"""Any module from tokens to logits can be trained; what would train something else is refused, with the user's line."""

import json
import os
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmtrain import Cluster, ModelConfig
from llmtrain.checkpoint.hub.own_code import relative_imports, write_own_code
from llmtrain.errors import RecipeError
from llmtrain.models.activation_bytes import traced_layers
from llmtrain.models.build import build_model, causal_lm, model_configuration, stage_builder
from llmtrain.models.own_facts import answer
from llmtrain.models.own_parts import check_module
from llmtrain.plan.facts import own_code, own_model
from llmtrain.plan.facts.own_code import OwnCode
from llmtrain.plan.facts.own_model import KnownModel
from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict.activations import layer_bytes
from llmtrain.plan.rules import resolve
from llmtrain.recipe.own_code import import_object
from tests.helpers.batches import tiny_recipe
from tests.helpers.own_models import SPLIT

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/own_models"
CPU = torch.device("cpu")


def own(name: str, **fields):
    """Returns a recipe with a model of tests/helpers/own_models.py."""
    model = {"build": f"tests.helpers.own_models:{name}", "config": {"vocab_size": 300}, **fields}
    return tiny_recipe().with_(model=ModelConfig(**model), code_dir=str(ROOT))


def facts(recipe):
    """Returns what the helper process finds."""
    return _facts(recipe.model.model_dump_json(), recipe.vocab_size, recipe.code_dir)


@cache
def _facts(model, vocab_size, folder):
    request = {"model": json.loads(model), "vocab_size": vocab_size, "folder": folder}
    return KnownModel.model_validate_json(answer(request)["known"]).facts


@pytest.fixture
def example(monkeypatch):
    """Returns a function that loads a recipe of `examples/own_models`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda name: load_recipe(f"{EXAMPLES / name}.py:verify", [])[0]


@pytest.mark.parametrize(
    ("name", "embedding", "layers", "head", "auxiliary"),
    [
        ("nanogpt", "wte", "h", "lm_head", False),
        ("recurrence", "embedding", "layers", "head", False),
        ("experts", "wte", "layers", "lm_head", True),
    ],
)
def test_the_parts_of_the_examples_are_found(name, embedding, layers, head, auxiliary, example):
    recipe = example(name)
    found = model_configuration(recipe).found
    assert (found.embedding, found.layers, found.head) == (embedding, layers, head)
    known = facts(recipe)
    assert (known.layers, known.vocab_size) == (4, 2048)
    assert known.trials.auxiliary_loss is auxiliary
    assert known.trials.documents == known.trials.chunks == ""
    assert bool(known.trials.stages) is auxiliary, "the loss of all layers is no sum that each stage could compute"
    assert known.tied_embeddings is (name == "nanogpt")
    module = causal_lm(model_configuration(recipe), recipe.model, torch.float32)
    assert known.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.slow
def test_the_initial_weights_are_those_of_the_constructor(example):
    recipe = example("nanogpt")
    model = import_object(recipe.model.build, recipe.code_dir)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.train.seed)
        expected = model(**recipe.model.config, vocab_size=2048).state_dict()
    built = build_model(recipe, torch.float32, CPU).state_dict()
    assert built.keys() == expected.keys()
    assert all(torch.equal(built[name], weight) for name, weight in expected.items())
    rounded = build_model(recipe, torch.bfloat16, CPU).state_dict()
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in expected.items())
    stages = [stage_builder(recipe, 2, torch.float32, CPU)(index) for index in range(2)]
    for stage in stages:
        for path, name in stage.hf_names.items():
            assert torch.equal(stage.get_parameter(path), expected[name]), name


def test_a_split_model_without_a_head_of_its_own_can_be_divided_in_every_way():
    known = facts(own("Decoder", tp_plan=SPLIT))
    assert known.trials.model_dump(exclude={"saved"}) == dict.fromkeys(("documents", "stages", "tensor"), "") | {
        "sequence": "",
        "auxiliary_loss": False,
        "is_random": False,
        "chunks": "tests.helpers.own_models:Decoder has no linear layer whose result is the logits",
    }
    assert known.tied_embeddings


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LastLogits", "returns logits of shape [2, 1, 99] for tokens of shape [2, 16]"),
        ("Raises", f"{ROOT}/tests/helpers/own_models.py, line 102: tests.helpers.own_models:Raises fails for tokens"),
        ("ReturnsHidden", "returns 32 logits for a token, but its embedding has 99 tokens"),
        ("NoEmbedding", "passes its tokens to no torch.nn.Embedding"),
        ("MixesRows", "the logits of a row depend on the other rows of the batch"),
        ("LooksAhead", "the logits of a position depend on later tokens"),
        ("KeepsState", "it keeps a state between calls that its state_dict does not have"),
        ("TiedByData", "two parameters with the same memory: table.weight and head.weight"),
        ("not_a_module", "returned int, not a torch.nn.Module"),
        ("needs_more", "is required by tests.helpers.own_models:needs_more"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(name, message):
    with pytest.raises(RecipeError) as error:
        facts(own(name))
    assert message in str(error.value)


def test_arguments_and_names_that_do_not_exist_are_refused_with_the_nearest_ones():
    for fields, message in (
        ({"config": {"vocab_size": 300, "dept": 3}}, "has no such argument; did you mean 'depth'?"),
        ({"parts": {"layers": "layer"}}, "has no module layer; did you mean 'layers'?"),
    ):
        with pytest.raises(RecipeError) as error:
            facts(own("Decoder", **fields))
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "field", "reason"),
    [
        ("MixesDocuments", "sequence", "something other than scaled_dot_product_attention with is_causal=True mixes"),
        ("OwnMask", "sequence", "something other than scaled_dot_product_attention with is_causal=True mixes"),
        ("CountsPositions", "sequence", "something other than scaled_dot_product_attention with is_causal=True mixes"),
        ("Auxiliary", "sequence", "its own loss is computed from all tokens of a micro-batch"),
        ("MixesDocuments", "documents", "its attention has to be scaled_dot_product_attention with is_causal=True"),
        ("OwnMask", "documents", "its attention has to be scaled_dot_product_attention with is_causal=True"),
        ("Skips", "stages", "parts deviate from the whole model's"),
        ("ScalesLogits", "chunks", "losses or gradients deviate by"),
        ("ReadsFirstLayer", "stages", "its forward pass fails on a part of the layers"),
    ],
)
def test_what_a_model_does_not_support_is_a_reason_of_the_plan(name, field, reason):
    assert reason in getattr(facts(own(name)).trials, field)


def test_a_fused_projection_cannot_be_split_by_columns(example):
    plan = {"h.*.c_attn": "colwise", "h.*.c_proj": "rowwise"}
    recipe = example("nanogpt").with_(**{"model.tp_plan": plan})
    assert facts(recipe).trials.tensor


def test_dropout_that_no_field_turns_off_is_noticed():
    assert facts(own("Drops")).trials.is_random
    assert not facts(own("Decoder")).trials.is_random


def test_what_a_layer_saves_is_predicted_from_short_traces(example):
    """The trace of a whole micro-batch of 4 sequences of 128 tokens finds the same bytes."""
    recipe = example("nanogpt").with_(**{"data.sequence_length": 128, "batch.micro_batch_size": 4})
    plan = resolve(recipe, Cluster(nodes=1, devices_per_node=1, device="cpu"), facts(recipe))
    weights = plan.model.weights
    assert traced_layers(plan) == tuple(layer_bytes(plan, weights, index, 4 * 128) for index in range(4))
    assert not dict(facts(example("experts")).trials.saved)["fp32"], "its experts choose their tokens by values"


def test_rules_read_the_trials(example, monkeypatch, tmp_path):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(own_code, "run_helper", lambda module, request, what: own_code.answer(request))
    recipe = example("experts").with_(**{"data.packing": "best_fit", "data.mask_documents": True})
    known = KnownModel(code=OwnCode(), facts=facts(recipe)).model_dump_json()
    monkeypatch.setattr(own_model, "run_helper", lambda module, request, what: {"known": known})
    cluster = Cluster(nodes=1, devices_per_node=2, device="cpu")
    with pytest.raises(RecipeError) as error:
        resolve(recipe.with_(**{"parallel.pipeline": 2, "parallel.zero_stage": 1}), cluster)
    assert "own.stages" in {problem.rule for problem in error.value.problems}
    with pytest.raises(RecipeError) as error:
        resolve(recipe.with_(**{"parallel.tensor": 2}), cluster)
    assert "model.tp_plan" in str(error.value)
    monkeypatch.setattr(os, "environ", {})  # the facts are in the cache now, so no process is started
    assert resolve(recipe, cluster).model.parameters == 994_112


def test_an_export_is_loaded_with_its_code(example, tmp_path, monkeypatch):
    recipe = example("recurrence")
    model = build_model(recipe, torch.float32, CPU)
    model.save_pretrained(tmp_path / "own", state_dict=dict(model.named_parameters()))
    code = OwnCode(files={"recurrence.py": "", "nanogpt.py": ""})
    write_own_code(model, code, tmp_path / "own")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own", trust_remote_code=True)
    tokens = torch.randint(0, 2048, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
        assert loaded.generate(tokens[:1], max_new_tokens=3, do_sample=False).shape == (1, 12)
    assert str(ROOT) not in (tmp_path / "own/config.json").read_text()


def test_a_head_that_the_model_does_not_call_is_applied():
    recipe = own("ReturnsHidden", parts={"head": "score"})
    assert facts(recipe).trials.chunks == facts(recipe).trials.documents == ""
    model = build_model(recipe, torch.float32, CPU).eval()
    user, tokens = model._user[0], torch.randint(0, 300, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, user.score(user(tokens)))
        assert torch.equal(model(tokens, logits_to_keep=2).logits, user.score(user(tokens)[:, -2:]))


@pytest.mark.parametrize(("name", "parts"), [("Decoder", {}), ("ReturnsHidden", {"head": "score"})])
def test_buffers_that_are_not_saved_and_tied_weights_are_there_after_loading(name, parts, tmp_path):
    recipe = own(name, parts=parts)
    model = build_model(recipe, torch.float32, CPU)
    model.save_pretrained(tmp_path / "own", state_dict=dict(model.named_parameters()))
    write_own_code(model, OwnCode(), tmp_path / "own")  # a package, which is imported where it is
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own", trust_remote_code=True)
    tokens = torch.randint(0, 300, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def test_imports_of_neighbours_become_relative():
    text = "import os, mine as m\nfrom mine import (\n    a,\n)\n    # from mine import b\ndef f():\n    import other\n"
    assert relative_imports(text.replace("    # from", "# from"), {"mine", "other"}) == (
        "import os; from . import mine as m\nfrom .mine import (\n    a,\n)\n# from mine import b\n"
        "def f():\n    from . import other\n"
    )


def test_a_checked_model_is_checked_once():
    origin = model_configuration(own("Decoder")).origin
    assert check_module(origin) is None
    assert check_module.cache_info().currsize > 0
