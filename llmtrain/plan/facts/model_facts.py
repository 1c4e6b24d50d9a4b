"""Determines the facts of a model that a plan needs: by arithmetic for known families, else from the model itself.

A plan has to answer immediately on a login node, so `transformers` is imported only for families that
`llmtrain.plan.facts.families` does not contain and for names on the hub. A model that is built here is built on the
meta device: its shapes exist, its weights do not.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from llmtrain.errors import Problem, RecipeError, did_you_mean, reason
from llmtrain.plan.facts.built_model import (
    decoder_lists,
    has_expert_modules,
    has_position_table,
    parameters_of,
    weights_of,
    without_gradient,
)
from llmtrain.plan.facts.classifier import FIELD, MODULE, SUFFIX, with_head
from llmtrain.plan.facts.families import COMMON_KEYS, ENCODERS, FAMILIES, LEGACY_ROPE_KEYS, WRAPPERS, Family, Shape
from llmtrain.plan.facts.images import IMAGE_FAMILIES, whole_with_images
from llmtrain.plan.facts.model import ModelFacts, TextPart, TowerFacts
from llmtrain.plan.facts.own_model import own_model_facts
from llmtrain.plan.facts.pretrained_config import (
    AUTO_CLASS,
    cached_config,
    has_own_code,
    multimodal_whole,
    pretrained_config,
    quantization_of,
    read_config,
)
from llmtrain.plan.facts.quantization import QUANTIZATION_KEYS
from llmtrain.plan.facts.rotary import effective_overrides, following_rotary, rotary_parts, rotary_problems, yarn_length
from llmtrain.plan.facts.trained import with_trained
from llmtrain.plan.facts.wrapper import (
    Wrapper,
    declare_causal_lm,
    has_causal_lm,
    text_configuration,
    with_text,
)
from llmtrain.recipe import ModelConfig
from llmtrain.system.untrusted import expanded, is_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def pretrained_configuration(model: ModelConfig, fields: dict[str, Any]) -> PreTrainedConfig:
    """Returns the configuration of a recipe's pretrained model, with some fields replaced.

    That of a multimodal model is the configuration of its text model, or, with `model.images`, the whole with this text
    model. `transformers` builds a causal LM of it from now on, even if it has no class for one.

    If the recipe trusts the code that comes with it, `transformers` builds that code's class from such a configuration
    from now on in this process. A tiny copy or a stage of it is thus built like that of any other family. Raises what
    `transformers` raises: OSError, ValueError, ….
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    _, declared = pretrained_config(model)
    if not has_own_code(model, declared):
        fields = effective_overrides(fields, declared)
    if (whole := multimodal_whole(model)) is not None:
        text = text_configuration(whole)
        declare_causal_lm(type(text))
        text = type(text).from_dict(text.to_dict(), **fields)
        return whole_with_images(with_text(whole, text)) if model.images else text
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        model.pretrained, revision=model.revision, trust_remote_code=model.trust_remote_code, **fields
    )
    for part in (config, config.get_text_config()):
        for key in QUANTIZATION_KEYS & vars(part).keys():
            delattr(part, key)  # of the files, not of the model
    if has_own_code(model, vars(config)):
        own = get_class_from_dynamic_module(config.auto_map[AUTO_CLASS], model.pretrained, revision=model.revision)
        own.register_for_auto_class(AUTO_CLASS)  # an export includes the code
        AutoModelForCausalLM.register(type(config), own, exist_ok=True)
    return config


def multimodal_configuration(model: ModelConfig) -> PreTrainedConfig | None:
    """Returns the whole configuration of a multimodal model whose text model is trained; None for any other model."""
    return None if model.images else multimodal_whole(model)


def wrapper_of(model: ModelConfig, text: PreTrainedConfig, dtype: Any = None) -> Wrapper | None:
    """Returns the multimodal model of which a recipe's model is the text model; None for any other model.

    text: the configuration of the text model. dtype: as for `Wrapper`. Raises RecipeError if it cannot be built.
    """
    whole = multimodal_configuration(model)
    if whole is None:
        return None
    try:
        return Wrapper(whole, text, dtype)
    except Exception as error:  # a foreign model's constructor may raise anything
        message = f"the text model of '{whole.model_type}' cannot be trained: {type(error).__name__}: {reason(error)}"
        fix = "name a folder with the text model alone"
        raise RecipeError(Problem("model.multimodal", "model.pretrained", message, fix)) from None


def part_of(model: ModelConfig, text: PreTrainedConfig) -> TextPart | None:
    """Returns where a recipe's model is in a multimodal one; None for any other model. Arguments: of `wrapper_of`."""
    wrapper = wrapper_of(model, text)
    return wrapper.part if wrapper else None


_REQUIRED_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
MAX_SIZE = 2**31 - 1
"""Largest size in a model's configuration: beyond it a matrix has more elements than torch can count (63 bits)."""
FAMILIES_PAGE = (
    "docs/reference/families.md lists the causal language models, families_multimodal.md those with a text model"
)
MAX_LAYERS = 1_000
"""Largest number of decoder layers of a model: each is examined by itself."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERT_SIZES = (
    *("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
)


def model_facts(model: ModelConfig, vocab_size: int | None, code_dir: str | None = None) -> ModelFacts:
    """Returns the facts of a recipe's model.

    code_dir: folder of the code of a user's own model (`Recipe.code_dir`). `vocab_size` is the vocabulary size as far
    as the recipe determines it (`Recipe.vocab_size`); pretrained weights have their own. Raises RecipeError with
    every wrong key or size, and for a model that cannot be found.
    """
    if model.build is not None:
        return with_trained(own_model_facts(model, vocab_size, code_dir), model)
    facts = with_trained(with_head(_model_facts(model, vocab_size), model), model)
    quantization = quantization_of(model)
    if quantization is None:
        return facts
    return facts.model_copy(update={"quantization": str(quantization), "quantization_fault": quantization.fault})


def _model_facts(model: ModelConfig, vocab_size: int | None) -> ModelFacts:
    if model.pretrained is not None:
        model_type, declared = pretrained_config(model)
        if has_own_code(model, declared):
            if model.num_labels is not None:
                message = f"{model.pretrained} has code of its own, whose head is not replaced"
                raise RecipeError(Problem("model.classifier", FIELD, message, "use a family of transformers"))
            own = pretrained_configuration(model, {})
            known = frozenset(own.to_dict()) | frozenset(own.attribute_map)
            if problems := _unknown_keys(model.config, known, model_type):
                raise RecipeError(problems)
            return _built_facts(model_type, lambda: pretrained_configuration(model, deepcopy(model.config)))
        if problems := rotary_problems(model.config, declared):
            raise RecipeError(problems)
        overrides = effective_overrides(model.config, declared)
        whole = multimodal_whole(model)
        if whole is not None:
            _check_multimodal(model, whole)
        if model.images:
            return _facts_with_images(model, model_type, {**declared, **overrides})
        facts = _facts(model, model_type, {**declared, **overrides}, declared.get("vocab_size"))
        if whole is None:
            return facts
        text = pretrained_configuration(model, dict(model.config))
        off = facts.router_loss_off if has_causal_lm(text) else 0.0  # it cannot be trained
        return facts.model_copy(update={"part": part_of(model, text), "router_loss_off": off})
    assert model.architecture is not None  # ModelConfig requires one of the two
    if problems := rotary_problems(model.config, None):
        raise RecipeError(problems)
    return _facts(model, model.architecture, deepcopy(model.config), vocab_size)


def _facts_with_images(model: ModelConfig, model_type: str, fields: dict[str, Any]) -> ModelFacts:
    """Returns the facts of a multimodal model that is trained as a whole; the text model's configuration is checked.

    fields: of the text model.
    """
    _facts(model, model_type, fields, fields.get("vocab_size"))
    config = pretrained_configuration(model, dict(model.config))
    facts = _built_facts(config.model_type, lambda: config)
    prefixes = IMAGE_FAMILIES[config.model_type].tower
    outside = facts.weights.outside if facts.weights else ()
    tower = sum(weight.elements for weight in outside if weight.name.startswith(prefixes))
    return facts.model_copy(update={"tower": TowerFacts.of(config.vision_config.to_dict(), prefixes, tower)})


def _check_multimodal(model: ModelConfig, whole: PreTrainedConfig) -> None:
    """Raises RecipeError for what cannot be done with the text model of a multimodal model."""
    problems = []
    if model.num_labels is not None:
        message = f"{model.pretrained} is a multimodal model, whose head is not replaced"
        problems.append(Problem("model.classifier", FIELD, message, "use the text model alone (export --text-only)"))
    text = text_configuration(whole)
    if not has_causal_lm(text) and model.config.get("output_router_logits"):
        message = f"is not supported: transformers has no causal LM of '{text.model_type}' with a router's loss"
        field = "model.config.output_router_logits"
        problems.append(Problem("model.router_loss", field, message, f"--set {field}=false"))
    if problems:
        raise RecipeError(problems)


def family_of(model: ModelConfig) -> str:
    """Returns the `model_type` of the part of a model that reads texts, which is mostly the whole.

    Raises RecipeError for weights that cannot be found.
    """
    if model.build is not None:
        return model.build
    model_type, declared = (model.architecture, model.config) if model.architecture else pretrained_config(model)
    text = declared.get("text_config")
    return str((text.get("model_type") if isinstance(text, dict) else None) or model_type)


def pretrained_vocabulary(model: ModelConfig) -> int | None:
    """Returns the rows of the embedding of pretrained weights, from a configuration on this machine only.

    Raises RecipeError for a folder whose configuration cannot be read.
    """
    assert model.pretrained is not None
    folder = expanded(model.pretrained)
    path = folder / "config.json" if is_folder(folder) else cached_config(model)
    config = {} if path is None else read_config(path)
    text_config = config.get("text_config")
    rows = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    return rows if isinstance(rows, int) else None


def _facts(model: ModelConfig, model_type: str, config: dict[str, Any], vocab_size: int | None) -> ModelFacts:
    """Returns the facts of a configuration; only keys that the recipe sets itself are checked."""
    if vocab_size is not None:
        config.setdefault("vocab_size", vocab_size)
    family = FAMILIES.get(model_type)
    if family is None:
        return _meta_facts(model, model_type, config)
    problems = _unknown_keys(model.config, family.keys, model_type)
    if "vocab_size" not in config:
        message = "is unknown: this recipe does not train the tokenizer, so the size of the embedding has to be given"
        fix = "--set model.config.vocab_size=50304"
        problems.append(Problem("model.vocab_size", "model.config.vocab_size", message, fix))
    return _arithmetic_facts(model_type, family, config, problems)


def _unknown_keys(given: dict[str, Any], known: frozenset[str], model_type: str) -> list[Problem]:
    """Returns a problem for each unknown key.

    `transformers` keeps any key but reads only those that it knows: with a typo it would use the default.
    """
    return [
        Problem(
            "model.config_key",
            f"model.config.{key}",
            f"'{model_type}' has no such configuration{did_you_mean(key, known)}",
        )
        for key in given
        if key not in known
    ]


def _arithmetic_facts(model_type: str, family: Family, given: dict[str, Any], problems: list[Problem]) -> ModelFacts:
    """Returns facts by counting; `problems` are the faults found so far, raised together with new ones."""
    config, named_twice = _with_defaults(family, given)
    problems = [*problems, *named_twice, *_wrong_sizes(family, config)]
    if problems:
        raise RecipeError(problems)
    shape = _shape(family, config)
    if problems := _impossible(family, given, shape):
        raise RecipeError(problems)
    experts = family.experts(config)
    weights = family.weights(config, shape, experts)
    every = list(weights.of_layers(0, shape.layers, first=True, last=True))
    layers = [weights.layer(index) for index in range(shape.layers)]
    in_experts = [sum(weight.elements for weight in layer if weight.is_expert) for layer in layers]
    idle = [inside - inside * experts.per_token // experts.number if inside else 0 for inside in in_experts]
    total = sum(weight.elements for weight in every)
    return ModelFacts(
        model_type=model_type,
        parameters=total,
        active_parameters=total - sum(idle),
        embedding_parameters=sum(weight.elements for weight in weights.embedding),
        largest_parameter=max(weight.elements for weight in every),
        layers=shape.layers,
        layer_parameters=tuple(sum(weight.elements for weight in layer) for layer in layers),
        layer_idle_parameters=tuple(idle),
        hidden_size=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_positions=shape.positions,
        learned_positions=family.learned_positions,
        rotary_follows=following_rotary(config, shape.positions),
        yarn_length=yarn_length(config),
        experts=experts.number if any(in_experts) else 0,
        experts_per_token=experts.per_token if any(in_experts) else 0,
        router_loss_off=_router_loss_off(config) if any(in_experts) else 0.0,
        router_loss=any(in_experts) and bool(config.get("output_router_logits")),
        dropout=tuple(dropout_of(config).items()),
        tied_embeddings=shape.tied,
        weights=weights,
        source="arithmetic",
    )


def _router_loss_off(config: Mapping[str, Any]) -> float:
    """Returns the coefficient of the router's loss if `transformers` would leave it out, or 0."""
    coefficient = config.get("router_aux_loss_coef", config.get("aux_loss_coef"))
    is_off = config.get("output_router_logits") is False
    return float(coefficient) if is_off and isinstance(coefficient, int | float) else 0.0


def dropout_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Returns the rates of dropout in a model's configuration, and of the noise of its routers, if they are not 0."""
    noise = {key: value for key, value in config.items() if "drop" in key or "jitter" in key}
    return {key: value for key, value in noise.items() if isinstance(value, float) and value}


def _with_defaults(family: Family, given: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the configuration under the family's own names, with defaults; two names of one setting are a fault."""
    problems = []
    config = dict(family.defaults)
    for key, value in given.items():
        own = family.aliases.get(key, key)
        if own != key and given.get(own, value) != value:
            message = f"{value!r} contradicts {own}={given[own]!r}: both names mean the same setting"
            problems.append(Problem("model.config_twice", f"model.config.{key}", message, f"keep {own} only"))
        config[own] = value
    return config, problems


def _wrong_sizes(family: Family, config: dict[str, Any]) -> list[Problem]:
    """Returns problems with sizes that are not positive integers; None is valid if the family derives the size."""
    required = ["vocab_size", *(family.aliases.get(key, key) for key in _REQUIRED_SIZES)]
    required += [key for key in _EXPERT_SIZES if key in family.defaults]
    positions = family.aliases.get("max_position_embeddings", "max_position_embeddings")
    optional = [family.inner_key, "num_key_value_heads", "head_dim", positions]
    if family.inner_key == "intermediate_size":
        required.append(optional.pop(0))
    problems = []

    def check(key: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            message = f"must be a positive integer, not {value!r}"
            problems.append(Problem("model.size", f"model.config.{key}", message))

    for key in (*required, *optional):
        if config.get(key) is not None or key in required:
            check(key, config.get(key))
    for rotary in ("rope_parameters", "rope_scaling"):
        for parameters in rotary_parts(config.get(rotary)):
            if "original_max_position_embeddings" in parameters:
                check(f"{rotary}.original_max_position_embeddings", parameters["original_max_position_embeddings"])
    dense = config.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list | tuple) and all(isinstance(layer, int) for layer in dense)):
        message = f"must be a list of layer numbers, not {dense!r}"
        problems.append(Problem("model.size", "model.config.mlp_only_layers", message))
    return problems or _too_large(config)


def _too_large(config: dict[str, Any]) -> list[Problem]:
    """Returns problems with sizes that no machine can compute with, before anything is built or counted."""
    problems = []
    for key, value in config.items():
        most = MAX_LAYERS if key in _LAYERS else MAX_SIZE
        if isinstance(value, int) and value > most:
            message = f"must be at most {most:,}, not {value:,}"
            problems.append(Problem("model.size", f"model.config.{key}", message, "give the size that the model has"))
    return problems


def _shape(family: Family, config: dict[str, Any]) -> Shape:
    def get(key: str) -> Any:
        return config.get(family.aliases.get(key, key))

    width, heads = get("hidden_size"), get("num_attention_heads")
    return Shape(
        vocab=config["vocab_size"],
        width=width,
        layers=get("num_hidden_layers"),
        heads=heads,
        kv_heads=get("num_key_value_heads") or heads,
        head_dim=get("head_dim") or width // heads,
        inner=config[family.inner_key] or 4 * width,
        positions=get("max_position_embeddings"),
        tied=bool(config["tie_word_embeddings"]),
    )


def _impossible(family: Family, given: dict[str, Any], shape: Shape) -> list[Problem]:
    """Returns problems with sizes that do not fit each other: building the model, or its first step, would fail."""
    problems = []
    if not given.get("head_dim") and not family.defaults.get("head_dim") and shape.width % shape.heads:
        key = family.aliases.get("num_attention_heads", "num_attention_heads")
        message = f"{shape.heads} heads do not divide a width of {shape.width}, and head_dim is not given"
        problems.append(Problem("model.heads", f"model.config.{key}", message))
    if shape.heads % shape.kv_heads:
        message = f"{shape.heads} query heads cannot share {shape.kv_heads} key and value heads evenly"
        problems.append(Problem("model.kv_heads", "model.config.num_key_value_heads", message))
    return problems


def _meta_facts(model: ModelConfig, model_type: str, given: dict[str, Any]) -> ModelFacts:
    """Returns the facts of a family that the arithmetic does not cover."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING:
        if "auto_map" in given:
            message = f"'{model_type}' is code that comes with '{model.pretrained}': inspect it before you trust it"
            fix = "--set model.trust_remote_code=true"
            raise RecipeError(Problem("model.remote_code", "model.trust_remote_code", message, fix))
        message = f"'{model_type}' is not an architecture of transformers{did_you_mean(model_type, CONFIG_MAPPING)}"
        raise RecipeError(Problem("model.architecture", "model.architecture", message, FAMILIES_PAGE))
    config_class = CONFIG_MAPPING[model_type]
    if model_type in WRAPPERS.values():
        declare_causal_lm(config_class)
    elif model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "auto_map" not in given:
        known_names = difflib.get_close_matches(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
        close = f"; the nearest that has one: {', '.join(known_names)}" if known_names else ""
        message = f"'{model_type}' has no causal language model in transformers{close}"
        raise RecipeError(Problem("model.architecture", "model.architecture", message, FAMILIES_PAGE))
    known = frozenset(config_class.__dataclass_fields__) | frozenset(config_class.attribute_map) | COMMON_KEYS
    if "text_config" not in known:  # otherwise that part has them
        known |= LEGACY_ROPE_KEYS | {"head_dim", "num_key_value_heads"}
    known |= {key for key in model.config.keys() - known if _is_read(config_class, given, key)}
    if problems := _unknown_keys(model.config, known, model_type):
        raise RecipeError(problems)
    if problems := _too_large(given):
        raise RecipeError(problems)
    facts = _built_facts(model_type, lambda: config_class(**given))
    if model.num_labels is not None:
        _check_classifier(model_type, config_class(**given))
    return facts


def _is_read(config_class: type[PreTrainedConfig], given: dict[str, Any], key: str) -> bool:
    """Whether another value of a key changes other fields of a configuration.

    Gemma 4's `global_head_dim`, for example, becomes a part of `per_layer_config`.
    """

    def others(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config_class(**fields).to_dict().items() if name != key}

    absent = {name: value for name, value in given.items() if name != key}
    doubled = given | {key: 2 * given[key]} if isinstance(given[key], int | float) else absent
    return others(given) != others(absent) or others(given) != others(doubled)


def _check_classifier(model_type: str, config: PreTrainedConfig) -> None:
    """Raises RecipeError for a family without a classifier that is its decoder and a linear layer."""
    import torch
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    why = f"transformers has no ...{SUFFIX} of this family"
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        with torch.device("meta"):
            if hasattr(AutoModelForSequenceClassification.from_config(config), MODULE):
                return
        why = f"its classifier has no linear layer `{MODULE}`"
    message = f"'{model_type}' cannot have another head: {why}"
    raise RecipeError(Problem("model.classifier", FIELD, message, "use another family, such as llama or qwen3"))


def _built_facts(model_type: str, configure: Callable[[], Any]) -> ModelFacts:
    """Returns the facts of a model that is built without its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = configure()
        _check_causal(model_type, config)  # first, since transformers warns of such a model when it is built
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
        if config.model_type == "dbrx" and config.attn_config.clip_qkv is None:
            # Its first forward pass would call `torch.clamp` without a bound.
            raise ValueError("attn_config.clip_qkv has to be a number, such as 8.0: its forward pass fails on None")
    except RecipeError:
        raise
    except Exception as error:  # a foreign model's constructor may raise anything; the configuration is at fault
        message = f"transformers cannot build '{model_type}': {type(error).__name__}: {reason(error)}"
        raise RecipeError(Problem("model.config", "model.config", message)) from None
    return facts_of(built, model_type).model_copy(update={"without_gradient": without_gradient(config)})


def _check_causal(model_type: str, config: Any) -> None:
    """Raises RecipeError if tokens see those that they are to predict."""
    if model_type not in ENCODERS or getattr(config, "is_decoder", False):
        return
    message = f"'{model_type}' is an encoder, whose tokens see those that they are to predict"
    fix = "use a decoder, such as llama or qwen3"
    if hasattr(config, "is_decoder"):
        fix = f"--set model.config.is_decoder=true, or {fix}"
    raise RecipeError(Problem("model.causal", "model.architecture", message, fix))


def facts_of(built: Any, model_type: str) -> ModelFacts:
    """Returns the facts of a model object. `parameters()` yields a tied weight once."""
    config = built.config.get_text_config()
    total = sum(parameter.numel() for parameter in built.parameters())
    lists = list(decoder_lists(built).values())
    layers = list(lists[0]) if len(lists) == 1 else []
    embedding, head = built.get_input_embeddings().weight, built.get_output_embeddings()
    positions = _int(config, "max_position_embeddings") or _int(config, "max_seq_len")
    heads = _int(config, "num_attention_heads") or 0  # recurrent models have none
    experts = next(
        (n for key in ("num_experts", "num_local_experts", "n_routed_experts") if (n := _int(config, key))), 0
    )
    met = _int(config, "num_experts_per_tok") or experts
    in_experts = [parameters_of(layer, ".experts.") for layer in layers]
    idle = [inside - inside * met // experts if experts else 0 for inside in in_experts]
    return ModelFacts(
        model_type=model_type,
        parameters=total,
        active_parameters=total - sum(idle),
        embedding_parameters=embedding.numel(),
        largest_parameter=max(parameter.numel() for parameter in built.parameters()),
        layers=len(layers) or config.num_hidden_layers,
        layer_parameters=tuple(parameters_of(layer) for layer in layers),
        layer_idle_parameters=tuple(idle),
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=_int(config, "num_key_value_heads") or heads,
        head_dim=_int(config, "head_dim") or config.hidden_size // max(heads, 1),
        vocab_size=embedding.shape[0],
        max_positions=positions,
        # MPT has its biases of distances in a table.
        learned_positions=config.model_type == "mpt" or has_position_table(built, positions),
        rotary_follows=following_rotary(vars(config), _int(config, "max_position_embeddings")),
        yarn_length=yarn_length(vars(config)),
        experts=experts,
        experts_per_token=met if experts else 0,
        text_model_type="" if config is built.config else config.model_type,
        router_loss_off=_router_loss_off(config.to_dict()) if experts else 0.0,
        router_loss=experts > 0 and bool(getattr(config, "output_router_logits", False)),
        expert_modules=has_expert_modules(built),
        dropout=tuple(dropout_of(config.to_dict()).items()),
        tied_embeddings=head is not None and head.weight is embedding,
        weights=weights_of(built, layers) if layers else None,
        source="meta device",
    )


def _int(config: Any, key: str) -> int | None:
    """Returns a size of a model, the largest if its layers differ (`transformers.integrations.heterogeneity`)."""
    of_layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values = [getattr(layer, key, None) for layer in of_layers]
    return max((value for value in values if isinstance(value, int) and value > 0), default=None)
