"""Tries the model types of `transformers` on tiny copies: their pages in docs/reference/, and lists that rules read.

`llmtrain/plan/facts/families.json` has the lists. Nothing in it is written by hand.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import socket
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch import distributed as dist
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from llmtrain.data import MicroBatch
from llmtrain.errors import FamilyError
from llmtrain.models.stages import Cut
from llmtrain.models.tensor.split import DeclaredSplit, plan_split
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.expert_check import compare_experts
from llmtrain.models.tiny.model import TOLERANCE, build_tiny_model, packed_input, relative_deviation
from llmtrain.models.tiny.stages_check import build_chain, find_cut, run_chain
from llmtrain.models.tiny.tensor_check import VOCABULARY, supports_sequence_parallel, whole_part
from llmtrain.models.tiny.varlen_check import check_attention
from llmtrain.plan.facts.built_model import INDEXERS
from llmtrain.plan.facts.families import ENCODERS, FAMILIES, WRAPPERS
from llmtrain.plan.facts.wrapper import Wrapper, declare_causal_lm, text_configuration
from llmtrain.plan.predict.flat import SPLIT_COLUMNS, SPLIT_ROWS
from llmtrain.plan.stages import StageBounds
from tools.page import ROOT, Files, filled, paragraph, table

OUT_OF_SCOPE = {
    "encoder, or not trained from left to right": " ".join(sorted(ENCODERS)),
    "decoder of an encoder-decoder": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper "
        "musicgen musicgen_melody"
    ),
    "multimodal, with a text model that is not a causal LM of its own": "emu3 git mllama phi4_multimodal",
    "drafts for another model, whose keys and values it reads": "gemma4_assistant gemma4_unified_assistant",
}
"""Reason → model types that are not decoder-only language models."""

ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen2_5_vl_text": {"rope_parameters": {**ROTARY, "mrope_section": [4, 2, 2]}},
    "qwen2_vl_text": {"rope_parameters": {**ROTARY, "mrope_section": [4, 2, 2]}},
}
"""Fields that a family's defaults leave unset or that must have a specific value."""

DATA = "llmtrain/plan/facts/families.json"
DEFAULTS = "llmtrain/plan/facts/defaults.json"
KINDS = ("works", "wrong", "refused", "not built", "out of scope")


@dataclass(frozen=True)
class Verdict:
    """The result for a family."""

    family: str
    kind: str
    """One of `KINDS`."""
    note: str = ""
    others: tuple[str, ...] = ()
    """What the page says in its other columns."""


@dataclass(frozen=True)
class Trial:
    """What is tried with each family, and where the results are written."""

    name: str
    """The page is `docs/reference/NAME.md`."""
    build: Callable[[PreTrainedConfig], Any]
    """Builds what `compare` gets. A family for which this fails cannot be built."""
    compare: Callable[[Any], tuple[str, ...]]
    """Returns the kind of the result and a note for each column, or raises a FamilyError, which counts as `refused`."""
    lists: Callable[[list[Verdict]], dict[str, Any]] = lambda verdicts: {}
    """Returns what is written to `families.json`, by its key."""
    columns: tuple[str, ...] = ("",)
    """The heads of the columns of notes."""
    kind: str = "are decoder-only"
    """What the families have in common."""
    others: str = "are not decoder-only language models"

    def judge(self, family: str) -> Verdict:
        """Tries a family, unless it is out of scope."""
        if reason := out_of_scope(family):
            return Verdict(family, "out of scope", reason)
        try:
            built = self.build(tiny_config(family))
        except Exception as error:
            return Verdict(family, "not built", f"{type(error).__name__}: {one_line(error)}")
        try:
            kind, note, *others = self.compare(built)
            return Verdict(family, kind, note, tuple(others))
        except FamilyError as refusal:
            return Verdict(family, "refused", without_size(refusal))

    def every_family(self) -> list[Verdict]:
        """Returns the results for all model types of a causal LM."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            families = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *declare_text_models()}
            return [self.judge(family) for family in sorted(families)]

    def files(self, verdicts: list[Verdict]) -> Files:
        """Returns the page, and the lists with those of the other trials."""
        by_kind = {kind: [verdict for verdict in verdicts if verdict.kind == kind] for kind in KINDS}
        works, wrong, refused, not_built, outside = map(len, by_kind.values())
        built = works + wrong + refused
        text = paragraph(
            f"Of {len(verdicts)} types of `transformers` {transformers.__version__}, {built} {self.kind} and were "
            f"built: **{works} work ({works / built:.0%}), {refused} are refused, {wrong} are wrong**. {not_built} "
            f"could not be built. {outside} {self.others}, or are another name of one."
        )
        for kind, found in by_kind.items():
            columns = self.columns if any(verdict.others for verdict in found) else ("",)
            rows = ((verdict.family, verdict.note, *verdict.others) for verdict in found)
            text += f"\n## {kind.capitalize()}\n\n{table(('Family', *columns), rows)}" if found else ""
        lists = self.lists(verdicts)
        return {**filled(f"docs/reference/{self.name}.md", families=text), **(with_lists(lists) if lists else {})}


def with_lists(lists: dict[str, Any]) -> Files:
    """Returns the data file with some of its lists replaced."""
    known = json.loads((ROOT / DATA).read_text(encoding="utf-8"))
    return {DATA: json.dumps({**known, **lists}, indent=1, sort_keys=True) + "\n"}


def defaults() -> Files:
    """Returns the defaults of the keys that the configurations of known families declare.

    Left out: keys of heads other than the causal LM's, and of cross-attention.
    """
    of_family = {}
    for family in FAMILIES:
        declared = CONFIG_MAPPING[family]
        fields = {name: declared.__dataclass_fields__[name] for name in declared.__annotations__}
        of_family[family] = {
            name: field.default_factory() if callable(field.default_factory) else field.default
            for name, field in fields.items()
            if not name.startswith(("summary_", "add_cross_attention"))
        }
    return {DEFAULTS: json.dumps(of_family, indent=1) + "\n"}


def without_size(refusal: FamilyError) -> str:
    """Returns a reason without the size of the deviation, which depends on random weights and on the machine."""
    return re.sub(r" by \d\S*e[+-]\d+", "", one_line(refusal.reason))


def declare_text_models() -> list[str]:
    """Declares a causal LM of each text model of which `transformers` has none; returns their types."""
    own = sorted(set(WRAPPERS.values()) - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
    for family in own:
        declare_causal_lm(CONFIG_MAPPING[family])
    return own


def names(verdicts: Iterable[Verdict]) -> list[str]:
    """Returns the families of some results."""
    return [verdict.family for verdict in verdicts]


def tiny_config(family: str) -> PreTrainedConfig:
    """Returns the family's default configuration with four layers and, if it has one, the auxiliary loss."""
    config = AutoConfig.for_model(family).get_text_config(decoder=True)
    overrides = dict(OVERRIDES.get(family, {}))
    if hasattr(config, "output_router_logits"):
        overrides["output_router_logits"] = True
    return shrink_configuration(config, 4, **overrides)


def out_of_scope(family: str) -> str:
    """Returns why a model type is not a decoder-only language model of its own; empty if it is one."""
    for reason, members in OUT_OF_SCOPE.items():
        if family in members.split():
            return reason
    config = AutoConfig.for_model(family)
    text = config.get_text_config(decoder=True)
    if text is not config:
        return f"multimodal; its text model is `{text.model_type}`"
    return f"another name of `{config.model_type}`" if config.model_type != family else ""


def one_line(error: object) -> str:
    """Returns the beginning of a message in one line."""
    text = re.sub(r" from '/[^']*'", "", " ".join(str(error).split()))  # the place of a module on this machine
    return text[:160]


# Pipeline: two stages, compared with the whole model.

BOUNDS = (StageBounds(0, 2), StageBounds(2, 4))
GRADIENT_TOLERANCE = 1e-4
"""Largest allowed deviation of a gradient, relative to the largest entry of its tensor.

The two stages' contributions to a tied gradient are added in a different order than in the whole model.
"""


def _reference(config: PreTrainedConfig) -> tuple[PreTrainedModel, tuple[Tensor, Tensor]]:
    """Returns the whole model and tokens with positions, with which it runs."""
    whole, inputs = build_tiny_model(config, "eager"), packed_input(config)
    with torch.no_grad():
        whole(input_ids=inputs[0], position_ids=inputs[1], use_cache=False)
    return whole, inputs


def _compare_stages(built: tuple[PreTrainedModel, tuple[Tensor, Tensor]]) -> tuple[str, str]:
    whole, inputs = built
    cut = find_cut(whole.config, BOUNDS)
    wrong = wrong_gradients(whole, cut, inputs)
    if wrong:
        return "wrong", f"gradients of {len(wrong)} parameters, {wrong[0]} among them"
    return "works", _remarks(whole.config.model_type, cut)


def wrong_gradients(whole: PreTrainedModel, cut: Cut, inputs: tuple[Tensor, Tensor]) -> list[str]:
    """Returns the parameters whose gradients differ between the model and the sum over its stages, in training mode."""
    whole.train()
    output = _seeded(lambda: whole(input_ids=inputs[0], position_ids=inputs[1], use_cache=False))
    auxiliary = getattr(output, "aux_loss", None)
    _loss(output.logits, *(() if auxiliary is None else (auxiliary,))).backward()  # type: ignore[no-untyped-call]
    stages = build_chain(whole, cut, "eager")
    _loss(*_seeded(lambda: run_chain(stages, inputs))[-1]).backward()  # type: ignore[no-untyped-call]
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for own, name in stage.hf_names.items():
            gradient = stage.get_parameter(own).grad
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return [name for name, parameter in whole.named_parameters() if not _close(parameter, gradients.get(name))]


def _loss(logits: Tensor, *auxiliary: Tensor) -> Tensor:
    targets = torch.arange(logits.shape[0] * logits.shape[1]) % logits.shape[-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets) + sum(auxiliary, torch.zeros(()))


def _seeded(function: Callable[[], Any]) -> Any:
    torch.manual_seed(1)  # makes a router that samples in training mode (PhiMoE) draw the same on both sides
    return function()


def _close(parameter: nn.Parameter, gradient: Tensor | None) -> bool:
    expected = parameter.grad
    if expected is None or gradient is None:
        # A stage does not hold parameters that it does not use, so a zero gradient and a missing one count as equal.
        return all(value is None or not value.any() for value in (expected, gradient))
    return bool((expected - gradient).abs().max() <= GRADIENT_TOLERANCE * expected.abs().max())


def _remarks(family: str, cut: Cut) -> str:
    tied = bool(set.intersection(*map(set, cut.outside)))
    remarks = [
        ("a tied weight on both stages", tied),
        ("tokens sent along", cut.sends_tokens),
        ("router logits sent along", cut.sends_routers),
    ]
    found = [text for text, holds in remarks if holds]
    if family in INDEXERS:
        found.append(f"`{INDEXERS[family]}` has no gradient and is frozen")
    return ", ".join(found)


PIPELINE = Trial("families", _reference, _compare_stages)


def pipeline() -> Files:
    """Returns the page of families in pipelines."""
    return PIPELINE.files(PIPELINE.every_family())


# Multimodal models: the logits of the text model alone, compared with those of the whole, given the same texts.


def _judge_multimodal(family: str) -> Verdict:
    """Tries a multimodal model. The parts beside its text model have no memory, as a text does not reach them."""
    whole = CONFIG_MAPPING[family]()
    text = text_configuration(whole)
    if text.model_type == whole.model_type:
        return Verdict(family, "out of scope", "has no text model of its own")
    try:
        tiny = shrink_configuration(text, 4, **OVERRIDES.get(text.model_type, {}))
        wrapper = Wrapper(whole, tiny)
        alone = build_tiny_model(tiny, "eager").eval()
    except Exception as error:
        return Verdict(family, "refused", f"{type(error).__name__}: {one_line(error)}")
    for own, its in wrapper.part.prefixes:
        parent, _, name = its[:-1].rpartition(".")
        setattr(wrapper.model.get_submodule(parent), name, alone.get_submodule(own[:-1]))
    wrapper.model.set_attn_implementation("eager")
    tokens, _ = packed_input(tiny)
    try:
        with torch.no_grad():
            MoeCausalLMOutputWithPast.image_outputs = None  # which Llama 4 reads in 5.24, without images, too
            expected = wrapper.model.eval()(input_ids=tokens, use_cache=False).logits
            logits = alone(input_ids=tokens, use_cache=False).logits
    except Exception as error:
        return Verdict(family, "refused", f"{type(error).__name__}: {one_line(error)}")
    kind = "works" if relative_deviation(logits, expected) <= TOLERANCE else "wrong"
    return Verdict(family, kind, f"`{text.model_type}`")


def multimodal() -> Files:
    """Returns the page of multimodal models, and the list of those whose text model is trained by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        verdicts = [_judge_multimodal(family) for family in sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)]
    works = {verdict.family: verdict.note.strip("`") for verdict in verdicts if verdict.kind == "works"}
    text = paragraph(
        f"The text model of **{len(works)}** of the {len(verdicts)} multimodal types of `transformers` "
        f"{transformers.__version__} can be trained."
    )
    for kind in KINDS:
        rows = [(verdict.family, verdict.note) for verdict in verdicts if verdict.kind == kind]
        text += (
            f"\n## {kind.capitalize()}\n\n{table(('Type', 'Text model' if kind == 'works' else ''), rows)}"
            if rows
            else ""
        )
    return {**filled("docs/reference/families_multimodal.md", families=text), **with_lists({"wrappers": works})}


# Tensor parallelism: two ranks, by the family's own tp_plan, or by the usual names of matrices.

SLICES = ", slices"
"""What the table says of a family whose ranks may hold slices of the residual stream."""


def _on_meta(config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedModel]:
    config = shrink_configuration(config, 4, vocab_size=VOCABULARY)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


def _compare_slices(built: tuple[PreTrainedConfig, PreTrainedModel]) -> tuple[str, str]:
    config, model = built
    share = f"{_share(model, plan_split(model, 2, whole_part(config))):.0%}"
    return "works", share + SLICES if supports_sequence_parallel(config) else share


def _share(model: PreTrainedModel, split: DeclaredSplit) -> float:
    """Returns the fraction of the decoder layers' parameters that is split."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if re.search(r"\.\d+\.", name)}
    share: float = sum(size for name, size in sizes.items() if name in split.shards) / sum(sizes.values())
    return share


def _tensor_lists(verdicts: list[Verdict]) -> dict[str, Any]:
    works = [verdict for verdict in verdicts if verdict.kind == "works"]
    whole = {family: _whole_matrices(family) for family in names(works)}
    return {
        "tensor": names(works),
        "residual_slices": names(verdict for verdict in works if verdict.note.endswith(SLICES)),
        "whole": {family: modules for family, modules in whole.items() if modules},
    }


def _whole_matrices(family: str) -> list[str]:
    """Returns the usual names of split matrices that the split of a family leaves whole in some layer."""
    config, model = _on_meta(tiny_config(family))
    shards = plan_split(model, 2, whole_part(config)).shards
    parameters = {name for name, _ in model.named_parameters() if re.search(r"\.\d+\.", name)}
    modules = {name: name.removesuffix(".weight").rpartition(".")[2] for name in parameters - shards.keys()}
    return sorted({module for module in modules.values() if module in SPLIT_ROWS + SPLIT_COLUMNS})


TENSOR = Trial("families_tensor", _on_meta, _compare_slices, _tensor_lists)


def tensor() -> Files:
    """Returns the page of families with tensor parallelism."""
    return TENSOR.files(TENSOR.every_family())


# Packed documents: their influence on each other with masks, and with boundaries.


def _with_parts(config: PreTrainedConfig) -> tuple[PreTrainedConfig, str]:
    """Returns a configuration with the names of the parts that compute each document on their own."""
    from llmtrain.models.tiny.documents_check import mixing_parts_of

    return config, " ".join(sorted(f"`{kind.__name__}`" for kind in mixing_parts_of(config)))


def _compare_documents(built: tuple[PreTrainedConfig, str]) -> tuple[str, ...]:
    from llmtrain.models.tiny.documents_check import influences

    config, parts = built
    if influences(config):
        return "refused", "documents influence each other"
    try:
        check_attention(config, "varlen")
    except FamilyError as refusal:
        return "works", without_size(refusal), parts
    return "works", BY_BOUNDARIES, parts


BY_BOUNDARIES = "yes"


def _documents_lists(verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "mixes_documents": names(verdict for verdict in verdicts if verdict.kind == "refused"),
        "mixing_parts": names(verdict for verdict in verdicts if any(verdict.others)),
        "without_sdpa": names(verdict for verdict in verdicts if _lacks_sdpa(verdict)),
    }


def _lacks_sdpa(verdict: Verdict) -> bool:
    """Whether `transformers` refuses to build a family with `sdpa`."""
    if verdict.kind == "out of scope":  # such as encoders, which may be decoders
        config = CONFIG_MAPPING[verdict.family]
        return config in MODEL_FOR_CAUSAL_LM_MAPPING and not MODEL_FOR_CAUSAL_LM_MAPPING[config]._supports_sdpa
    if verdict.kind not in ("works", "wrong", "refused"):
        return False
    with torch.device("meta"):
        return not AutoModelForCausalLM.from_config(tiny_config(verdict.family))._supports_sdpa


DOCUMENTS = Trial(
    "families_documents",
    _with_parts,
    _compare_documents,
    _documents_lists,
    ("With `varlen`", "Parts that compute each document on its own"),
)


def documents() -> Files:
    """Returns the page of families and packed documents."""
    return DOCUMENTS.files(DOCUMENTS.every_family())


# Sequence parallelism: two ranks, each with half of each sequence. Both call these functions.

WAIT = timedelta(seconds=30)


def _with_attention(config: PreTrainedConfig) -> tuple[PreTrainedConfig, str]:
    """Returns `sdpa` beside a configuration if the family runs with it, otherwise `eager`."""
    tokens, positions = packed_input(config)
    for attention in ("sdpa", "eager"):
        try:
            with torch.no_grad():
                build_tiny_model(config, attention)(input_ids=tokens, position_ids=positions, use_cache=False)
        except Exception:
            if attention == "eager":
                raise
        else:
            break
    return config, attention


def _compare_sequences(built: tuple[PreTrainedConfig, str]) -> tuple[str, ...]:
    from llmtrain.engines.deepspeed.sequence_check import compare_sliced_sequences
    from llmtrain.models.tiny.documents_check import mixing_parts_of

    config, attention = built
    # Each family gets a new group, because a group in which a rank has timed out cannot be used again.
    group = dist.new_group([0, 1], timeout=WAIT)
    if refusal := _of_either(compare_sliced_sequences(config, attention, group)):
        return "refused", one_line(refusal)
    if deviation := _of_either(compare_sliced_sequences(config, attention, group, _longer(config))):
        return "wrong", deviation
    kinds = mixing_parts_of(config)
    passed = "" if not kinds else HANDED_ON if all(kinds.values()) else "gathered"
    return "works", "eager" if attention == "eager" else "", passed


def _longer(config: PreTrainedConfig) -> MicroBatch:
    """Returns three sequences of 32 tokens, divided into documents at other positions than in the check."""
    tokens = torch.randint(3, min(config.vocab_size, 90), (3, 32), generator=torch.Generator().manual_seed(5))
    positions = torch.stack([torch.arange(32), torch.arange(32) % 21, torch.arange(32) % 7])
    return MicroBatch(tokens, positions, labels=tokens.roll(-1, dims=1))


def _of_either(reason: str) -> str:
    """Returns the reason that a check before a run gives, from those of both ranks."""
    from llmtrain.engines.deepspeed.sequence_check import describe

    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return describe(reasons)


HANDED_ON = "handed on"


def _sequence_lists(verdicts: list[Verdict]) -> dict[str, Any]:
    return {"continues_from_states": names(verdict for verdict in verdicts if HANDED_ON in verdict.others)}


SEQUENCE = Trial(
    "families_sequence", _with_attention, _compare_sequences, _sequence_lists, ("Attention", "Parts that mix tokens")
)


def sequence() -> Files:
    """Returns the page of families with sequence parallelism."""
    return SEQUENCE.files(on_two_ranks(_sequences))


def _sequences() -> list[Verdict]:
    return SEQUENCE.every_family()


def on_two_ranks(function: Callable[[], Any]) -> Any:
    """Calls a function in two processes, which are ranks of a group, and returns the result of the first."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=_rank, args=(function, rank, port, sender)) for rank in range(2)]
    for process in processes:
        process.start()
    sender.close()
    result = receiver.recv()
    for process in processes:
        process.join()
    return result


def _rank(function: Callable[[], Any], rank: int, port: int, pipe: Connection) -> None:
    from llmtrain.engines.runtime.distributed import init_process_group
    from llmtrain.launch.discovery.rank import Rank

    torch.set_num_threads(1)
    here: dict[str, Any] = {"rank": rank, "local_rank": rank, "world_size": 2, "local_world_size": 2}
    init_process_group(Rank(**here, master_addr="127.0.0.1", master_port=port, launcher="families"), on_cpu=True)
    result = function()
    if rank == 0:
        pipe.send(result)
    dist.destroy_process_group()


# Expert parallelism: two ranks, each with half of the experts of a layer.

BESIDE_TENSOR = "also beside tensor parallelism"


def _compare_experts(built: tuple[PreTrainedConfig, PreTrainedModel]) -> tuple[str, str]:
    config, model = built
    if not any(EXPERTS in name for name, _ in model.named_parameters()):
        return "out of scope", "it has no routed experts"
    compare_experts(config)
    try:
        compare_experts(config, with_tensor=True)
    except FamilyError:
        return "works", ""
    return "works", BESIDE_TENSOR


def _expert_lists(verdicts: list[Verdict]) -> dict[str, Any]:
    works = [verdict for verdict in verdicts if verdict.kind == "works"]
    return {"expert": names(works), "expert_tensor": names(one for one in works if one.note == BESIDE_TENSOR)}


EXPERTS = ".experts."
EXPERT = Trial(
    "families_expert",
    _on_meta,
    _compare_experts,
    _expert_lists,
    kind="are decoder-only with routed experts",
    others="have no experts, are not decoder-only language models",
)


def expert() -> Files:
    """Returns the page of families with expert parallelism."""
    return EXPERT.files(EXPERT.every_family())
