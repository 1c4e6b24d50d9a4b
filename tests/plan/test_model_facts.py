"""Sizes and parameters that are computed without torch equal those of `transformers`."""

import json
import os
import random
import socket

import pytest
from huggingface_hub import constants

from llmtrain.errors import RecipeError
from llmtrain.plan.facts.families import FAMILIES
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.flops import attention_flops
from llmtrain.recipe import ModelConfig
from llmtrain.system import hub

PUBLISHED = {
    "gpt2": ({"vocab_size": 50257}, 124_439_808),
    "llama": (
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        8_030_261_248,
    ),
    "mistral": ({"vocab_size": 32000}, 7_241_732_096),
    "mixtral": ({"vocab_size": 32000}, 46_702_792_704),
    "gemma": ({"vocab_size": 256000}, 8_537_680_896),
    "gemma2": ({"vocab_size": 256000}, 2_614_341_888),
}


def sizes(family: str, draw: random.Random) -> dict:
    """A tiny configuration of a family, drawn over its switches."""
    head_dim, kv_heads = draw.choice([4, 8]), draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 2, 3])
    layers = draw.choice([1, 2, 5])
    tied = {"tie_word_embeddings": draw.choice([True, False])}
    if family == "gpt2":
        inner = draw.choice([None, 24])
        own = {"n_embd": heads * head_dim, "n_layer": layers, "n_head": heads, "n_positions": 32, "n_inner": inner}
        return {"vocab_size": draw.choice([50, 64]), **own, **tied}
    config = {
        "vocab_size": draw.choice([50, 64]),
        "hidden_size": heads * head_dim,
        "intermediate_size": draw.choice([24, 40]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **tied,
    }
    keys = FAMILIES[family].keys
    if ("head_dim" in keys and draw.random() < 0.5) or FAMILIES[family].defaults.get("head_dim"):
        config["head_dim"] = draw.choice([4, 12])
    for switch in ("attention_bias", "mlp_bias"):
        if switch in keys:
            config[switch] = draw.choice([True, False])
    if "moe_intermediate_size" in keys:
        own = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
        dense = {"decoder_sparse_step": draw.choice([1, 2]), "mlp_only_layers": draw.choice([[], [0]])}
        config |= own | dense
    elif "num_local_experts" in keys:
        config |= {draw.choice(["num_experts", "num_local_experts"]): 3, "num_experts_per_tok": 2}
    return config


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_computed_sizes_equal_those_of_transformers(family):
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    draw = random.Random(family)
    for _ in range(8):
        config = sizes(family, draw)
        facts = model_facts(ModelConfig(architecture=family, config=config), None)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**config))
        built = dict(model.named_parameters())
        assert facts.parameters == sum(p.numel() for p in built.values()), config
        assert facts.largest_parameter == max(p.numel() for p in built.values()), config
        tables = sum(
            p.numel() for name, p in built.items() if name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight"))
        )
        assert facts.embedding_parameters == tables, config
        experts = sum(p.numel() for name, p in built.items() if ".experts." in name)
        if experts:
            met = experts * model.config.num_experts_per_tok // model.config.num_experts
            assert facts.active_parameters == facts.parameters - experts + met, config
        assert (facts.experts > 0) == (experts > 0)
        assert facts.source == "arithmetic"
        # One by one too, in the model's order; GPT-2 holds its matrices transposed.
        ours = list(facts.weights.of_layers(0, facts.layers, first=True, last=True))
        shapes = [(sorted(one.shape), one.is_expert) for one in ours]
        assert shapes == [(sorted(p.shape), ".experts." in name) for name, p in built.items()], config


@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_computed_sizes_equal_published_ones(family):
    config, parameters = PUBLISHED[family]
    assert model_facts(ModelConfig(architecture=family, config=config), None).parameters == parameters


def test_other_families_are_built_on_the_meta_device():
    tiny = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = {**tiny, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    phi = model_facts(ModelConfig(architecture="phi3", config=config), None)
    assert (phi.source, phi.layers, phi.heads, phi.kv_heads, phi.vocab_size) == ("meta device", 2, 4, 2, 50)
    # Phi 3 is a Llama with joined projections: as many parameters.
    llama = model_facts(ModelConfig(architecture="llama", config=config), None)
    assert (phi.parameters, phi.embedding_parameters) == (llama.parameters, llama.embedding_parameters)


def test_sizes_that_differ_between_layers_are_the_largest():
    """Gemma 4 has heads of 256 numbers in layers with a window, and of 512 in the others."""
    model = ModelConfig(architecture="gemma4_text", config={"num_hidden_layers": 6, "hidden_size": 64})
    assert model_facts(model, 99).head_dim == 512


def test_keys_that_a_configuration_turns_into_others_are_known():
    names = {"num_hidden_layers": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 512}
    assert model_facts(ModelConfig(architecture="gemma4_text", config=names), 99).head_dim == 512


def problems(**model) -> dict[str, str]:
    with pytest.raises(RecipeError) as error:
        model_facts(ModelConfig(**model), model.pop("vocab_size", None))
    return {problem.field: problem.message for problem in error.value.problems}


def test_misspelt_keys_name_the_nearest():
    found = problems(architecture="llama", config={"hiden_size": 64, "num_layers": 2, "rms_norm_eps": 1e-5})
    assert "did you mean 'hidden_size'" in found["model.config.hiden_size"]
    assert {"model.config.num_layers", "model.config.vocab_size"} < set(found)
    found = problems(architecture="llama", config={"hiden_size": 64, "num_hidden_layers": 0})
    assert {"model.config.hiden_size", "model.config.num_hidden_layers"} < set(found)
    found = problems(architecture="phi3", config={"hiden_size": 64, "vocab_size": 8})
    assert "did you mean 'hidden_size'" in found["model.config.hiden_size"]


def test_invalid_sizes_are_refused():
    given = {"vocab_size": "many", "hidden_size": 0, "num_hidden_layers": True, "intermediate_size": None}
    found = problems(architecture="llama", config=given)
    assert set(found) == {f"model.config.{key}" for key in given}


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        *(("mixtral", "num_local_experts", value) for value in ("8", 2.5, None, -1)),
        ("mixtral", "num_experts_per_tok", None),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("llama", "max_position_embeddings", "many"),
        ("llama", "rope_parameters.original_max_position_embeddings", "long"),
    ],
)
def test_what_else_is_no_size_is_refused(family, field, value):
    key, _, inner = field.partition(".")
    longrope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], inner: value}
    config = {"vocab_size": 8, key: longrope if inner else value}
    assert set(problems(architecture=family, config=config)) == {f"model.config.{field}"}


def test_indivisible_numbers_of_heads_are_refused():
    config = {"vocab_size": 8, "hidden_size": 30, "num_attention_heads": 4, "num_key_value_heads": 3}
    assert set(problems(architecture="llama", config=config)) == {
        "model.config.num_attention_heads",
        "model.config.num_key_value_heads",
    }


def test_one_setting_by_two_names_is_refused():
    found = problems(architecture="gpt2", config={"vocab_size": 8, "n_embd": 12, "hidden_size": 24})
    assert "n_embd" in found["model.config.hidden_size"]


def test_an_unknown_architecture_suggests_the_nearest():
    assert "did you mean 'llama'" in problems(architecture="lama", config={"vocab_size": 8})["model.architecture"]


def test_facts_are_read_from_a_pretrained_folder(tmp_path):
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "odd_key": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "intermediate_size": 48}))
    facts = model_facts(ModelConfig(pretrained=str(tmp_path), config={"rms_norm_eps": 1e-5}), 8)
    assert (facts.layers, facts.hidden_size, facts.vocab_size) == (2, 32, 64)
    assert set(problems(pretrained=str(tmp_path), config={"layers": 3})) == {"model.config.layers"}


def test_a_multimodal_model_has_the_fields_of_its_text_model_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    fields = {"head_dim": 8, "mm_tokens_per_image": 4}
    assert set(problems(pretrained=str(tmp_path), config=fields)) == {"model.config.mm_tokens_per_image"}


def test_a_missing_pretrained_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no folder" in problems(pretrained=str(tmp_path / "gone"))["model.pretrained"]
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in problems(pretrained=str(tmp_path))["model.pretrained"]
    (tmp_path / "config.json").write_text("{}")
    assert "model_type" in problems(pretrained=str(tmp_path))["model.pretrained"]


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model"])
def test_pretrained_weights_missing_on_the_hub_are_reported(name, tmp_path):
    import huggingface_hub.constants
    import transformers.utils.hub

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        assert transformers.utils.hub is not None
        found = problems(pretrained=name)
    assert name in found["model.pretrained"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_computed_sizes_include_each_layer(family):
    from transformers import CONFIG_MAPPING

    from llmtrain.plan.facts.model_facts import _meta_facts

    draw = random.Random(f"{family} layers")
    for _ in range(4):
        config = sizes(family, draw)
        counted = model_facts(ModelConfig(architecture=family, config=config), None)
        # Those of the model itself, which the other families have.
        given = dict(config)
        if "num_experts" in given and "num_local_experts" in CONFIG_MAPPING[family].__dataclass_fields__:
            given["num_local_experts"] = given.pop("num_experts")
        built = _meta_facts(ModelConfig(architecture=family, config=given), family, given)
        assert counted.layer_parameters == built.layer_parameters, config
        assert counted.layer_idle_parameters == built.layer_idle_parameters, config
        assert len(counted.layer_parameters) == counted.layers


def test_a_model_without_attention_has_facts_as_well():
    config = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    facts = model_facts(ModelConfig(architecture="mamba", config=config), None)
    assert (facts.heads, facts.kv_heads, facts.layers) == (0, 0, 2)
    assert attention_flops(facts, 128) == 0


def test_a_hub_that_never_answers_is_asked_once(monkeypatch):
    """Its client would try again for minutes, for each file."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        template = f"http://127.0.0.1:{silent.getsockname()[1]}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.1)
        assert hub.hub_has("owner/name") is None
    assert constants.is_offline_mode()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    hub.probe_hub_for("owner/name")


@pytest.mark.parametrize("name", ["clip_text_model", "t5", "nothing"])
def test_a_model_that_is_no_causal_lm_is_refused_in_two_lines(name, tmp_path):
    """transformers lists the names of all classes instead."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(RecipeError) as error:
        model_facts(ModelConfig(pretrained=str(tmp_path)), None)
    (problem,) = error.value.problems
    assert problem.rule == "model.architecture"
    assert "docs/reference/families.md" in problem.fix
    assert len(str(problem)) < 300
