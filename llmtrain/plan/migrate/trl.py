"""Translates the arguments of TRL's trainers, also those of its command line and of the alignment handbook."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llmtrain.plan.migrate.completion import complete, name_run
from llmtrain.plan.migrate.files import ForeignFile
from llmtrain.plan.migrate.model_arguments import apply_model
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.trainer import PROGRAM as TRAINER
from llmtrain.plan.migrate.trainer import apply_arguments
from llmtrain.plan.migrate.translation import Settings, Translation
from llmtrain.plan.migrate.trl_settings import (
    CLASSES,
    COMMON,
    DATA,
    DEFAULTS,
    LOSSES,
    MARKS,
    MAX_LENGTH,
    METHODS,
    NO_GENERATION,
    OF_METHOD,
    OF_PREFERENCES,
    PAIRS,
    ROWS,
    SHARED_DEFAULTS,
    TABLES,
    TITLES,
)


def method_of(file: ForeignFile) -> str:
    """Returns which of TRL's trainers a file is for: `sft`, `dpo`, …; empty if it is none, or `?` if that is open."""
    for method in METHODS:
        if file.program == CLASSES[method] or re.search(
            rf"\btrl {method}\b|(?:^|_){method}(?:_\w+)?\.py$", file.program
        ):
            return method
    if file.program and re.search(TRAINER.command, file.program):
        return ""
    keys = set(file.values)
    marked = [method for method in METHODS if keys & set(MARKS[method])]
    words = re.split(r"[^a-z]+", "/".join(file.path.absolute().parts[-2:]).lower())
    named = [method for method in METHODS if method in words]
    if not keys & (TRAINER.marks | {"learning_rate"}) or not (marked or keys & COMMON or (named and keys & DATA)):
        return ""
    found = marked if len(marked) == 1 else named
    return found[0] if len(found) == 1 else "?"


def translate(given: Given, method: str) -> Translation:
    """Translates the arguments of a trainer. method: one of `METHODS`."""
    translation = Translation(TITLES[method])
    settings = _with_model_arguments(given.file)
    dtype = apply_model(translation, settings, adapter_defaults=given.file.path.suffix != ".py")
    own = {**SHARED_DEFAULTS, **DEFAULTS[method]}
    if settings.take("fp16"):
        own.pop("bf16")
    dtype = dtype or "float32"  # in which its trainers load a model by its name
    evaluated = _rows(translation, settings, method)
    _lengths(translation, settings, method)
    apply_arguments(translation, settings, given, dtype=dtype, defaults=own)
    if method in PAIRS:
        translation.set("data.packing", "best_fit", "the completions of a pair are in one sequence")
    for table in (ROWS, OF_METHOD[method], *((OF_PREFERENCES,) if method != "sft" else ())):
        translation.apply(settings, table)
    _Method(translation, settings).translate(method)
    _evaluation(translation, evaluated)
    _notes(translation, method)
    name_run(translation, settings, "run_name", "output_dir")
    translation.report_untaken(settings)
    complete(translation)
    return translation


def _with_model_arguments(file: ForeignFile) -> Settings:
    """Returns the settings, with those of `model_init_kwargs` beside the others."""
    values, written = dict(file.values), dict(file.written)
    nested = values.get("model_init_kwargs")
    if isinstance(nested, Mapping):
        del values["model_init_kwargs"]
        for key, value in nested.items():
            values.setdefault(key, value)
            written.setdefault(key, f"model_init_kwargs.{key}")
    for older, name in (("use_liger", "use_liger_kernel"),):
        if older in values:
            values.setdefault(name, values.pop(older))
            written[name] = older
    return Settings(
        values,
        file=ForeignFile(path=file.path, values=values, lines=file.lines, written=written),
    )


def _rows(translation: Translation, settings: Settings, method: str) -> list[dict[str, Any]]:
    """Translates the data. Returns the sources of an evaluation, where there are any."""
    train, test = _Sources(translation, settings).read()
    column = settings.take("dataset_text_field")
    if method == "sft" and column not in (None, "text"):
        for source in (*train, *test):
            source["text_column"] = column
        translation.same(settings.shown("dataset_text_field"), column, "data.sources")
    elif column is not None:
        translation.same(settings.shown("dataset_text_field"), column, text="is the default")
    if train:
        key = next(
            (key for key in ("dataset_name", "datasets", "dataset_mixture", "dataset_mixer") if key in settings), ""
        )
        translation.set("data.sources", train, settings.shown(key) if key else "", settings.place(key) if key else "")
    template = settings.take("chat_template_path")
    if template is not None:
        translation.set("data.chat_template", template, settings.shown("chat_template_path"))
        text = "has to be a file with a template: a folder of a tokenizer is not read"
        translation.different(settings.shown("chat_template_path"), template, text, "data.chat_template")
    if (template := settings.take("chat_template")) is not None:
        translation.set("data.chat_template", template, settings.shown("chat_template"))
        translation.same(settings.shown("chat_template"), template, "data.chat_template")
    return test


class _Sources:
    """The ways in which the scripts name their data."""

    def __init__(self, translation: Translation, settings: Settings) -> None:
        self.to, self.settings = translation, settings

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the sources of training and of evaluation."""
        train_split = self._take("dataset_train_split", "train")
        test_split = self._take("dataset_test_split", "test")
        revision = self._take("dataset_revision")
        name, subset, files = self._take("dataset_name"), self._take("dataset_config"), self._take("data_files")
        if isinstance(files, str) and name in ("json", "csv", "parquet", "text", None):
            name, subset = files, None
        elif files is not None:
            self.to.unsupported(self.settings.shown("data_files"), files, "name the files in data.sources")
        if name:
            extra = {"subset": subset, "revision": revision}
            return [_source(name, train_split, **extra)], [_source(name, test_split, **extra)]
        listed = self.settings.take("datasets")
        if isinstance(listed, list):
            return self._listed("datasets", listed, "path", "name")
        mixture = self.settings.take("dataset_mixture")
        if isinstance(mixture, Mapping) and isinstance(mixture.get("datasets"), list):
            texts = {
                "test_split_size": "hold out a share of the rows: data.eval_fraction",
                "seed": "rows are held out by their hash, and train.seed orders them",
            }
            for key in mixture.keys() - {"datasets"}:
                shown = self.settings.shown(f"dataset_mixture.{key}")
                self.to.unsupported(shown, mixture[key], texts.get(key, "name it in data.sources"))
            return self._listed("dataset_mixture.datasets", mixture["datasets"], "id", "config")
        mixer = self.settings.take("dataset_mixer")
        if isinstance(mixer, Mapping):
            return self._mixed(mixer)
        for key in ("dataset_splits", "dataset_configs"):
            if (value := self.settings.take(key)) is not None:
                self.to.unsupported(self.settings.shown(key), value, "has no effect without dataset_mixer")
        return [], []

    def _take(self, key: str, default: Any = None) -> Any:
        value = self.settings.take(key, default)
        if key in self.settings and self.settings.take(key) is not None:
            field = "evaluation.sources" if "test" in key else "data.sources"
            self.to.same(self.settings.shown(key), value, field)
        return value

    def _listed(
        self, key: str, listed: list[Any], name: str, subset: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        train = []
        for number, item in enumerate(listed):
            shown = f"{self.settings.shown(key)}.{number}"
            if not isinstance(item, Mapping) or not isinstance(item.get(name), str):
                self.to.unsupported(shown, item, f"has no `{name}`")
                continue
            train.append(_source(item[name], item.get("split", "train"), subset=item.get(subset)))
            self.to.same(shown, item[name], "data.sources")
            for share in ("fraction", "weight"):
                if item.get(share) not in (None, 1, 1.0):
                    self.to.unsupported(
                        f"{shown}.{share}", item[share], "all rows are read: it is a share of them there"
                    )
            known = {name, subset, "split", "fraction", "weight", "columns"}
            for other in item.keys() - known:
                self.to.unsupported(f"{shown}.{other}", item[other], "name it in data.sources")
            if item.get("columns") is not None:
                self.to.same(f"{shown}.columns", item["columns"], text="only the columns that a format names are read")
        return train, []

    def _mixed(self, mixer: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        splits = self.settings.take("dataset_splits", ["train", "test"])
        subsets = self.settings.take("dataset_configs")
        splits = splits if isinstance(splits, list) else [splits]
        shown = self.settings.shown("dataset_mixer")
        for key, value in (("dataset_splits", splits), ("dataset_configs", subsets)):
            if key in self.settings:
                self.to.same(self.settings.shown(key), value, "data.sources")
        train, test = [], []
        for number, (name, share) in enumerate(mixer.items()):
            subset = subsets[number] if isinstance(subsets, list) and number < len(subsets) else None
            train += [_source(name, split, subset=subset) for split in splits if "train" in str(split)]
            test += [_source(name, split, subset=subset) for split in splits if "train" not in str(split)]
            self.to.same(f"{shown}.{name}", share, "data.sources")
            if share not in (1, 1.0):
                self.to.unsupported(f"{shown}.{name}", share, "all rows are read: it is a share of them there")
        return train, test


def _source(name: str, split: Any, **fields: Any) -> dict[str, Any]:
    source = {"name": name} | {key: value for key, value in fields.items() if value is not None}
    return source | ({"split": split} if split != "train" else {})


def _lengths(translation: Translation, settings: Settings, method: str) -> None:
    key = "max_seq_length" if "max_seq_length" in settings else "max_length"
    length = settings.take(key, MAX_LENGTH)
    if key in settings and settings.take(key) is None:
        translation.missing("data.sequence_length", f"{key} is null, so rows have any length there: say the longest")
        return
    shown, field = settings.shown(key), "data.sequence_length"
    comment = shown if key in settings else f"default of {shown}"
    if method in PAIRS and isinstance(length, int):
        translation.set(field, 2 * length, f"2 × {comment}: both completions of a pair", settings.place(key))
    else:
        translation.set(field, length, comment, settings.place(key))
    text = "longer rows are dropped and counted, or cut after a turn (data.too_long=cut_turns); TRL cuts anywhere"
    translation.different(shown, length, text, field)
    for name in ("truncation_mode",):
        if (mode := settings.take(name)) is not None:
            translation.same(settings.shown(name), mode, text="nothing is cut within a turn")


class _Method:
    """The settings of a trainer that are translated together with others."""

    def __init__(self, translation: Translation, settings: Settings) -> None:
        self.to, self.settings = translation, settings

    def translate(self, method: str) -> None:
        """Translates them. method: one of `METHODS`."""
        {"sft": self._sft, "dpo": self._dpo, "kto": self._kto, "orpo": self._orpo, "reward": self._reward}[method]()
        if method != "sft":
            self._dropout()
            self._reference()
        self._others()

    def _take(self, key: str, default: Any = None) -> Any:
        return self.settings.take(key, default)

    def _set(self, field: str, value: Any, key: str, text: str = "") -> None:
        shown = self.settings.shown(key)
        given = key in self.settings
        self.to.set(field, value, shown if given else f"default of {shown}", self.settings.place(key))
        if given:
            self.to.same(shown, self._take(key), field, text)

    def _unless(self, key: str, neutral: tuple[Any, ...], text: str) -> None:
        """Notes a setting that is not supported, unless it has a value without a consequence."""
        value = self._take(key)
        if value is None:
            return
        if value in neutral:
            self.to.same(self.settings.shown(key), value, text="is what happens here")
        else:
            self.to.unsupported(self.settings.shown(key), value, text)

    def _sft(self) -> None:
        packed, strategy = self._take("packing", False), self._take("packing_strategy", "bfd")
        if packed and strategy == "wrapped":
            self._set("data.packing", "concat", "packing_strategy")
            self.to.set("data.mask_documents", False, "TRL's wrapped texts see each other")
            text = (
                "texts are joined and cut, as there; conversations are never cut: choose data.packing=best_fit for them"
            )
            self.to.different(self.settings.shown("packing"), packed, text, "data.packing")
        elif packed:
            self._set("data.packing", "best_fit", "packing")
            text = "packed rows do not see each other on any kernel; in TRL, they do without flash attention"
            self.to.different(self.settings.shown("packing"), packed, text, "data.packing")
            if "packing_strategy" in self.settings:
                self.to.same(self.settings.shown("packing_strategy"), strategy, "data.packing")
        else:
            self._set("data.packing", "none", "packing")
            if "packing_strategy" in self.settings:
                self.to.same(self.settings.shown("packing_strategy"), strategy, text="has no effect without packing")
        if (packing := self._take("eval_packing")) is not None:
            text = "evaluations are packed as the training data: the loss is the same mean over tokens"
            self.to.same(self.settings.shown("eval_packing"), packing, text=text)
        self._trained_on()
        loss = self._take("loss_type", "nll")
        if loss == "dft":
            text = "the loss is the cross-entropy; dynamic fine-tuning is a loss of your own: objective.name"
            self.to.unsupported(self.settings.shown("loss_type"), loss, text)
        elif loss == "chunked_nll":
            self._set("kernels.loss", "chunked", "loss_type")
        elif "loss_type" in self.settings:
            self.to.same(self.settings.shown("loss_type"), loss, "objective.name")

    def _trained_on(self) -> None:
        assistant, completion = self._take("assistant_only_loss", False), self._take("completion_only_loss")
        field = "data.train_on"
        if assistant:
            self._set(field, "assistant", "assistant_only_loss")
            text = "turns are found for every template; TRL needs {% generation %}, and trains on all that is in it"
            self.to.different(self.settings.shown("assistant_only_loss"), assistant, text, field)
            return
        if "assistant_only_loss" in self.settings:
            self.to.same(self.settings.shown("assistant_only_loss"), assistant, field)
        if completion:
            self._set(field, "last_assistant", "completion_only_loss")
            return
        if completion is False:
            self._set(field, "all", "completion_only_loss")
            return
        self.to.set(field, "all", "TRL's default: every token of a conversation")
        text = "rows of a prompt and a completion are trained on whole: set it to last_assistant for them, as TRL does"
        self.to.different("", None, text, field)

    def _dpo(self) -> None:
        given = self._take("loss_type", ["sigmoid"])
        losses = list(given) if isinstance(given, list) else [given]
        weights = self._take("loss_weights") or [1.0] * len(losses)
        shown = self.settings.shown("loss_type")
        known = [loss for loss in losses if loss in LOSSES]
        others = [loss for loss in losses if loss not in LOSSES and loss != "sft"]
        if others or len(known) != 1:
            text = "these have a counterpart: sigmoid, ipo, each also with sft; a loss of yours may be another"
            self.to.unsupported(shown, given, text)
            self.to.set("objective.name", LOSSES[known[0]] if known else "dpo", "FILL IN: the nearest loss")
        else:
            self._set("objective.name", LOSSES[known[0]], "loss_type")
        if "sft" in losses and known and isinstance(weights, list) and len(weights) == len(losses):
            weight = weights[losses.index("sft")] / (weights[losses.index(known[0])] or 1.0)
            self.to.set("objective.sft_weight", weight, "loss_weights")
            text = "the cross-entropy is a mean of the completions' means, TRL's one over the tokens of a micro-batch"
            self.to.different(shown, given, text, "objective.sft_weight")
        if "loss_weights" in self.settings:
            self.to.same(self.settings.shown("loss_weights"), weights, "objective.sft_weight")
        if (alpha := self._take("rpo_alpha")) is not None:
            self._set("objective.sft_weight", alpha, "rpo_alpha")
        self._smoothing()
        self._unless("f_divergence_type", ("reverse_kl", "FDivergenceType.REVERSE_KL"), "only the reverse KL is here")
        self._unless("f_alpha_divergence_coef", (0.5, 1.0), "only the reverse KL is here")
        self._unless("ld_alpha", (1.0,), "all tokens of a completion count alike")
        self._unless("use_weighting", (False,), "pairs are not weighted (WPO)")
        self._unless("discopop_tau", (0.05,), "discopop is not here")
        self._unless("reference_free", (False,), "the reference is the initial model; ORPO has none")

    def _smoothing(self) -> None:
        smoothing = self._take("label_smoothing", 0.0)
        if smoothing and self.to.fields.get("objective.name") == "dpo":
            self._set("objective.label_smoothing", smoothing, "label_smoothing")
            text = "conservative DPO has it; TRL's sigmoid loss ignores it since 1.0, and its robust loss differs"
            self.to.different(self.settings.shown("label_smoothing"), smoothing, text, "objective.label_smoothing")
        else:
            self._unless("label_smoothing", (0, 0.0), "this loss has no smoothing")

    def _kto(self) -> None:
        self.to.set("objective.name", "kto", "KTOTrainer")
        self._unless("loss_type", ("kto",), "only KTO's own loss is here")
        self.to.set("data.packing", "none", "a sequence for each completion")

    def _orpo(self) -> None:
        self.to.set("objective.name", "orpo", "ORPOTrainer")

    def _reward(self) -> None:
        self.to.set("model.num_labels", 1, "RewardTrainer")
        self.to.set("objective.name", "llmtrain.objectives:reward_model", "RewardTrainer")
        self.to.set("objective.unit", "pair", "RewardTrainer")
        self._unless("center_rewards_coefficient", (0, 0.0), "rewards are not centred; a loss of yours may do it")
        if "model.adapter.rank" in self.to.fields:
            for name in [name for name in self.to.fields if name.startswith("model.adapter.")]:
                del self.to.fields[name]
            text = "a reward model has no adapter here: all its weights are trained, or those in model.trainable"
            self.to.unsupported(self.settings.shown("use_peft"), True, text)

    def _dropout(self) -> None:
        off = self._take("disable_dropout", True)
        shown = self.settings.shown("disable_dropout")
        if not off:
            self.to.different(shown, off, "the model's dropout is off unless model.config sets its rates")
            return
        if self.to.fields.get("model.adapter.dropout"):
            self.to.set("model.adapter.dropout", 0.0, f"{shown} turns it off in TRL, too")
        if "disable_dropout" in self.settings:
            self.to.same(shown, off, text="is what happens here")

    def _reference(self) -> None:
        synced = self._take("sync_ref_model")
        self._unless("sync_ref_model", (False,), "the reference stays the model from which training starts")
        for key in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
            if (value := self._take(key)) is not None:
                text = "the reference stays as it is" if synced else "has no effect without sync_ref_model"
                self.to.same(self.settings.shown(key), value, text=text)
        for key in ("max_prompt_length", "max_completion_length", "max_target_length"):
            if (value := self._take(key)) is not None:
                text = "nothing is cut: a row that does not fit into data.sequence_length is dropped and counted"
                self.to.different(self.settings.shown(key), value, text)
        self._unless("generate_during_eval", (False,), NO_GENERATION)

    def _others(self) -> None:
        if self._take("activation_offloading"):
            self._set("parallel.offload_activations", True, "activation_offloading")
            self.to.set("parallel.activation_checkpointing", "full", "inputs of recomputed layers are offloaded")
        elif "activation_offloading" in self.settings:
            self.to.same(self.settings.shown("activation_offloading"), False, text="off")
        coefficient = self._take("router_aux_loss_coef")
        if coefficient is not None:
            config = {"output_router_logits": bool(coefficient), "router_aux_loss_coef": coefficient}
            self._set("model.config", config, "router_aux_loss_coef")
        self._unless("model_init_kwargs", ({},), "is not a mapping of settings of the model")
        self._unless("is_encoder_decoder", (False,), "only decoders are trained")
        self._unless("eos_token", (), "a turn ends as the template says, and exports declare its token")
        self._unless("auto_insert_empty_system_msg", (False,), "no empty system message is added; the template decides")
        self._unless(
            "dataset_kwargs", ({}, {"add_special_tokens": False}), "rows are always rendered and tokenized here"
        )
        if (share := self._take("test_split_size")) is not None:
            self._set("data.eval_fraction", share, "test_split_size", "rows are held out by their hash")


def _evaluation(translation: Translation, sources: list[dict[str, Any]]) -> None:
    fields = translation.fields
    evaluates = bool(fields.get("evaluation.every_steps"))
    if "data.eval_fraction" in fields:
        return
    if evaluates and sources:
        translation.set("evaluation.sources", sources, "the split that TRL evaluates on")
    elif evaluates:
        translation.set("data.eval_fraction", 0.01, "FILL IN: the share of the rows to evaluate on")
        translation.missing("data.eval_fraction", "the settings do not say what is evaluated", 0.01)
    else:
        translation.set("data.eval_fraction", 0.0, "nothing is evaluated, so every row is trained on")


def _notes(translation: Translation, method: str) -> None:
    """Notes what differs whatever the settings say."""
    if method == "sft" and translation.fields["data.train_on"] != "all":
        text = "the end-of-turn token is the last one that is trained on, not the line feed after it"
        translation.different("", None, text, "data.train_on")
    elif method == "kto":
        text = "the divergence is estimated once for the global batch, in TRL for each micro-batch"
        translation.different("", None, text, "objective.name")
    elif method in PAIRS:
        text = (
            "counts sequences, and each has as many pairs as fit: `llmtrain data RECIPE` prints how many, "
            "by which to divide it for as many pairs per step as in TRL"
        )
        translation.different("", None, text, "batch.global_batch_size")
    if method == "orpo":
        text = "the cross-entropy is that of the chosen completion, in TRL also of its prompt"
        translation.different("", None, text, "objective.name")
    if method == "reward":
        text = "a reward is the output before the end token, in TRL that at it"
        translation.different("", None, text, "objective.name")
    if method == "dpo":
        text = "the mean is over the pairs of the global batch, in TRL over those of each micro-batch"
        translation.different("", None, text, "objective.name")


def _program(method: str) -> Program:
    recognise: Callable[[ForeignFile], bool] = lambda file: method_of(file) in (method, "?")  # noqa: E731
    return Program(
        name=f"trl-{method}",
        title=TITLES[method],
        marks=frozenset(MARKS[method]),
        translate=partial(translate, method=method),
        tables=TABLES,
        page="trl",
        includes=frozenset({"trainer"}),
        recognise=recognise,
    )


PROGRAMS = tuple(_program(method) for method in METHODS)
NAMES = frozenset(program.name for program in PROGRAMS)
"""Their names, for programs whose settings include TRL's."""
