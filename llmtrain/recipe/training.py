"""The training itself: model, data, objective, optimizer, batch and length. It is the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from keyword import iskeyword
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, model_validator

from llmtrain.recipe.own_code import NAME, NamedPath, NameOrPath, ObjectPath, is_path
from llmtrain.recipe.parts import (
    MAX_NUMBER,
    Fraction,
    Many,
    NonNegativeFloat,
    NonNegativeInt,
    Part,
    PositiveFloat,
    PositiveInt,
)

MAX_SEQUENCE_LENGTH = 2**24
"""Tokens: more than the context of any model."""
ROTARY_FIELDS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
"""Fields of `model.config` that set rotary positions."""
MAX_TRAINED_VOCABULARY = 1_000_000
"""Tokens of a tokenizer that is trained here: more than those of any model."""
NewTokens = Many[Annotated[str, Field(min_length=1)]] | Literal["template"]


class LoraConfig(Part):
    """Low-rank adapters (LoRA, arXiv 2106.09685), as in PEFT; all other weights are frozen."""

    rank: PositiveInt | None = None
    """Rank r of the update B·A of a matrix. Required, unless `pretrained` is set."""
    alpha: PositiveFloat | None = None
    """Numerator of the update's scale, alpha / r. Default: r, for a scale of 1."""
    dropout: Fraction = 0.0
    """Dropout of the input of A."""
    targets: Literal["all-linear"] | Many[str] = "all-linear"
    """Linear layers to adapt: all in the decoder, or those whose name, or its end after a dot, matches one of these
    patterns: `q_proj`, `model.layers.1?.mlp.*`. `()`: none, with `target_parameters` only."""
    target_parameters: Many[str] = ()
    """Parameters to adapt that belong to no linear layer: fused experts, such as `experts.gate_up_proj` and
    `experts.down_proj`, and routers that are no linear layer, such as `mlp.gate.weight`. Patterns as in `targets`. Each
    expert has an adapter of its own."""
    dora: bool = False
    """Also train the norm of each row of a matrix (DoRA, arXiv 2402.09353)."""
    rslora: bool = False
    """Scale by alpha / √r (arXiv 2312.03732)."""
    modules_to_save: Many[str] = ()
    """Modules that are trained fully and saved with the adapter, such as `lm_head`. Patterns as in `targets`."""
    pretrained: str | None = None
    """Folder or hub name of a LoRA adapter to start from. Its configuration replaces the other fields, except for
    `dropout`."""
    revision: str | None = None
    """Branch, tag or commit of `pretrained` on the hub."""

    @model_validator(mode="after")
    def _one_configuration(self) -> Self:
        if self.pretrained is None:
            if self.rank is None:
                raise ValueError("set `rank`, or `pretrained` to start from an adapter")
            if self.revision is not None:
                raise ValueError("`revision` is only used with a `pretrained` adapter")
            return self
        own = {"pretrained", "revision", "dropout"}
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if others := [name for name in given if name not in own]:
            raise ValueError(f"`pretrained` has its own configuration; leave out {', '.join(others)}")
        return self


class ModelConfig(Part):
    """A `transformers` causal LM: a new one of an architecture, or pretrained weights."""

    architecture: str | None = None
    """`model_type` of `transformers` (`llama`, `gpt2`, `qwen3_moe`, ...) for a newly initialised model."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of the architecture's configuration. `vocab_size` may be omitted if `data.tokenizer` is trained."""
    build: ObjectPath | None = None
    """A model of your own: a function or class, `"mine:build_model"`, that is called with the fields of `config` and
    returns a `torch.nn.Module`. It maps tokens [batch, sequence] to logits [batch, sequence, vocabulary]. `vocab_size`
    is also passed if the tokenizer is trained."""
    tiny: dict[str, Any] = Field(default_factory=dict)
    """With `build`, the fields of `config` with which a tiny copy is built, to try what the model supports. Default:
    sizes with usual names, such as `n_embd`, are made small."""
    parts: dict[Literal["embedding", "layers", "head"], str] = Field(default_factory=dict)
    """With `build`, names of modules: the embedding of the tokens, the list of layers, and the layer that computes the
    logits. Default: they are found by running a tiny copy. A head that the model has but does not call is applied to
    what it returns, its hidden states."""
    tp_plan: dict[str, str] = Field(default_factory=dict)
    """With `build`, how tensor parallel ranks split the matrices, as in `transformers`: `{"layers.*.q": "colwise",
    "layers.*.o": "rowwise"}`. Columns of query, key and value have to be whole heads."""
    pretrained: str | None = None
    """Folder or hub name of the weights from which training starts. Cannot be combined with `architecture`; `config`
    overrides fields of its configuration."""
    revision: str | None = None
    """Branch, tag or commit of `pretrained` on the hub."""
    new_tokens: NewTokens = ()
    """Tokens that are added to the tokenizer and to the vocabulary of `pretrained`, if the tokenizer lacks them. A list
    of texts: each text is a token wherever it occurs. `template`: the special tokens of the form `<|…|>`, `<｜…｜>`,
    `<start_of_…>` or `<end_of_…>` that the chat template writes. The embedding and the head grow to a multiple of 128
    rows."""
    kept_rows: PositiveInt | None = None
    """With `new_tokens`, the number of rows of the pretrained embedding that are kept; all other rows are initialised
    with their mean. Default: the number of tokens in the tokenizer."""
    num_labels: PositiveInt | None = None
    """Number of outputs for each token, of a new linear layer without a bias in place of the head over the vocabulary:
    the family's `...ForSequenceClassification` of `transformers`, as which the model is exported, for classifiers and
    reward models. It needs a loss of your own, which gets these outputs [rows, length, num_labels] instead of logits.
    Weights of `pretrained` that have such a head keep it; otherwise it is drawn with the run's seed."""
    attention: Literal[
        "auto", "eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """Attention implementation, as `transformers` names it, or `varlen`: a kernel for packed documents, torch's on
    GPUs and llmtrain's on CPUs. `auto`: the fastest one measured on the device (`kernels`), else `sdpa`; `eager` for
    families of `transformers` without `sdpa`."""
    unused_weights: Many[str] = ()
    """Patterns for the names of tensors in the files of `pretrained` that the model does not have, such as
    `vision_tower.*`, and that training leaves out. Without them, such tensors are refused."""
    images: bool = False
    """Of a multimodal model in `pretrained`, train the whole on conversations with images: its vision tower, which
    `trainable` or an `adapter` may freeze, and its text model, whose configuration `config` overrides. Without it, the
    text model is trained, on texts."""
    trust_remote_code: bool = False
    """Run the model code in a hub repository."""
    adapter: LoraConfig | None = None
    """Trains adapters instead of the weights."""
    trainable: Many[str] = ()
    """Patterns for the names of the parameters to train, such as `model.layers.3?.*`; all others are frozen. Default:
    all are trained."""

    quantize: Literal["none", "nf4"] = "none"
    """`nf4`: with an `adapter` on `pretrained` weights, store the frozen linear layers and fused experts of the decoder
    in 4.127 bits per element (QLoRA, arXiv 2305.14314). Embedding, norms, head and all else are not quantized."""

    @property
    def attention_kernel(self) -> str:
        """The attention implementation; `sdpa` if nothing was measured."""
        return "sdpa" if self.attention == "auto" else self.attention

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(origin is not None for origin in (self.architecture, self.pretrained, self.build)) != 1:
            raise ValueError(
                "set exactly one of `architecture` (a new model), `pretrained` (its weights) and `build` (a model of "
                "your own)"
            )
        if self.build is None and (self.tiny or self.parts or self.tp_plan):
            raise ValueError("`tiny`, `parts` and `tp_plan` are only used with `build`")
        if self.build is not None and self.num_labels is not None:
            raise ValueError("`num_labels` has no effect on a model of your own: let `build` return one with that head")
        if self.images:
            if self.pretrained is None:
                raise ValueError("`images` needs the `pretrained` weights of a multimodal model")
            without = {"num_labels": self.num_labels, "new_tokens": self.new_tokens, "kept_rows": self.kept_rows}
            without |= {"trust_remote_code": self.trust_remote_code, "quantize": self.quantize != "none"}
            if others := [name for name, value in without.items() if value]:
                raise ValueError(f"`images` cannot be combined with {', '.join(others)}; leave one of them out")
        if self.adapter is not None and self.trainable:
            raise ValueError("`adapter` freezes every weight; name what else to train in `adapter.modules_to_save`")
        if self.quantize != "none" and (self.adapter is None or self.pretrained is None):
            raise ValueError("`quantize` needs `pretrained` weights and an `adapter`")
        return self

    @property
    def runs_own_code(self) -> bool:
        """Whether building the model runs code that is neither llmtrain's nor that of `transformers`."""
        return self.trust_remote_code or self.build is not None

    @property
    def is_partly_frozen(self) -> bool:
        """Whether the recipe freezes weights."""
        return self.adapter is not None or bool(self.trainable)

    @property
    def omits_base_weights(self) -> bool:
        """Whether checkpoints omit the frozen weights, because these are the weights of `pretrained`."""
        return self.is_partly_frozen and self.pretrained is not None

    @property
    def changes_pretrained(self) -> bool:
        """Whether the model that an adapter is added to is not that of `pretrained`: it has new tokens or other
        rotary positions."""
        return bool(self.kept_rows) or not self.config.keys().isdisjoint(ROTARY_FIELDS)


class Source(Part):
    """One corpus: a hub dataset, local files, or a built-in one."""

    name: str
    """Hub dataset name; a file, glob or folder of txt, jsonl, json, csv, tsv, parquet or arrow files; `stdlib`, the
    source text of Python's standard library; or `stdlib_chat`, questions about it with the answers of its docstrings.
    """
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset, or of a folder: the names of its files or folders say to which split they belong."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset; set it to make the corpus reproducible."""
    format: Literal[
        "auto", "text", "messages", "prompt_completion", "instruction", "preference", "unpaired_preference"
    ] = "auto"
    """What a row contains. `text`: a document. `messages` (also ShareGPT's), `prompt_completion`, `instruction` (with
    input and output): a conversation. `preference`: a conversation with two completions, of which the first is
    preferred. `unpaired_preference`: a prompt, a completion, and whether it is desirable. `auto`: the format that
    `objective` reads, unless it is `language_model`; then, for local files and for hub datasets that declare their
    columns, a text if there is a `text_column`, else a conversation if there are columns with the usual names; for
    other hub datasets, a text."""
    text_column: str = "text"
    """Column that contains the document."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns for the parts of a conversation, if they do not have the usual names: `{"messages": "dialogue"}`. Parts:
    `messages`, `prompt`, `completion`, `label`, `chosen`, `rejected`, `instruction`, `input`, `output`, `system`,
    `tools`."""
    system: str | None = None
    """System text of conversations that have none."""
    ignore: Many[str] = ()
    """Names of columns, and of keys of messages, that are not read on purpose. Others that look like a role, a turn or
    a mask are refused if nothing reads them."""
    weight: PositiveFloat = 1.0
    """Share of the training samples drawn from this source, relative to the other sources."""
    reader: ObjectPath | None = None
    """A function of your own, `"mine:read"`, that reads the source: given the path of a file, it yields rows (dicts) or
    texts. It reads every file that `name` matches, of any suffix; if `name` matches none, it gets `name` itself, once.
    As for `filter` and `map`, its result must depend on nothing but its argument."""
    filter: ObjectPath | None = None
    """A function of your own, `"mine:keep"`: given a row as it was read, it returns whether to keep the row. The row of
    a text is `{"text": TEXT}`."""
    map: ObjectPath | None = None
    """A function of your own, `"mine:clean"`: given a row that `filter` keeps, it returns the row that is read in its
    place, a list of rows, or None to leave it out. The other fields of the source describe its rows."""

    def __init__(self, name: str | None = None, /, **fields: Any) -> None:
        super().__init__(**(fields if name is None else {"name": name, **fields}))

    @property
    def own_functions(self) -> dict[str, str]:
        """The import paths of `reader`, `filter` and `map`, of those that are set, by field."""
        given = {"reader": self.reader, "filter": self.filter, "map": self.map}
        return {name: path for name, path in given.items() if path is not None}

    @property
    def declares_conversations(self) -> bool:
        """Whether it contains conversations, regardless of its columns."""
        return self.name == "stdlib_chat" or self.format not in ("auto", "text")


class TrainedTokenizer(Part):
    """A byte-level BPE tokenizer trained on the recipe's own training documents."""

    vocab_size: Annotated[int, Field(gt=0, le=MAX_TRAINED_VOCABULARY)]
    """Largest number of tokens, including special tokens: `<|endoftext|>` and, with conversations, those of
    `data.chat_template` (`<|…|>`)."""


class DataConfig(Part):
    """Sources, tokenizer and packing."""

    sources: Many[Source] = Field(min_length=1)
    """Training data; several sources are mixed by weight."""
    tokenizer: str | TrainedTokenizer
    """Folder or hub name of a tokenizer, or one to train."""
    tokenizer_class: Literal["auto", "generic"] = "auto"
    """How a tokenizer is loaded. `auto`: with the class that `AutoTokenizer` chooses. Some classes, such as Qwen2's,
    replace rules of `tokenizer.json`, so that a text has other tokens; a note of `llmtrain data` says so. `generic`:
    with `PreTrainedTokenizerFast`, which keeps to `tokenizer.json`, as do exports."""
    sequence_length: Annotated[int, Field(gt=0, le=MAX_SEQUENCE_LENGTH)]
    """Tokens that the model reads per sequence, T."""
    packing: Literal["best_fit", "concat", "none"] = "best_fit"
    """`best_fit`: no document of at most T tokens is split (arXiv 2404.10830); `concat`: one stream, cut every T
    tokens; `none`: one document per sequence, then padding."""
    mask_documents: bool = True
    """Restart positions at each document, and prevent attention to other documents."""
    special_tokens: Literal["refuse", "text", "parse"] = "refuse"
    """How the text of a special token of the tokenizer, such as `<|im_start|>`, is read within a document. `text`: as
    characters; `parse`: as the token, for documents to which a chat template was applied; `refuse`: as `text` if there
    are few (10, or one per million characters), otherwise it is an error."""
    chat_template: str | None = None
    """Jinja template that renders conversations: a template text, a file, `chatml`, or `plain`, whose only special
    token is the end-of-text token. Default: the tokenizer's."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens of a conversation are trained on: the turns of the assistant, only its last turn, or all tokens. A
    message with `train: false` or `weight: 0` is never trained on."""
    too_long: Literal["drop", "cut_turns"] = "drop"
    """What happens to conversations of more than T + 1 tokens, which are never split. `drop`: they are skipped;
    `cut_turns`: their last turns are removed, if at least one turn of the assistant remains."""
    faulty_rows: Literal["refuse", "drop"] = "refuse"
    """What happens to rows without a valid conversation, to conversations whose loss mask cannot be determined, to rows
    for which `filter` or `map` of a source fails, and to rows without a number in one of `objective.columns`."""
    eval_fraction: Fraction = 0.01
    """Fraction of the documents held out for evaluation, chosen by the hash of their text; for a single text file, its
    end. If `evaluation.sources` are given, nothing is held out."""
    cache_dir: str | None = None
    """Folder of the token stores; default: `$LLMTRAIN_CACHE`, else `~/.cache/llmtrain`."""

    @model_validator(mode="after")
    def _loads_tokenizer(self) -> Self:
        if isinstance(self.tokenizer, TrainedTokenizer) and self.tokenizer_class != "auto":
            raise ValueError("`tokenizer_class` has no effect on a tokenizer that is trained")
        return self

    @property
    def has_document_mask(self) -> bool:
        """Whether sequences contain several documents that must not attend to each other."""
        return self.mask_documents and self.packing != "none"


class ObjectiveConfig(Part):
    """The loss: a mean over the target tokens, the documents, the pairs or the completions of the global batch."""

    name: Annotated[
        Annotated[Literal["language_model", "dpo", "ipo", "orpo", "kto"], Tag(NAME)] | NamedPath, NameOrPath
    ] = "language_model"
    """A name, or a function of your own, `"mine:loss"`. `language_model`: the cross-entropy of each target token. The
    other names depend on the log-probabilities of whole completions: `dpo` (arXiv 2305.18290), `ipo` (arXiv 2310.12036)
    and `orpo` (arXiv 2403.07691) compare the two completions of a pair; `kto` (arXiv 2402.01306) reads single
    completions, each desirable or undesirable. All but `orpo` compare the log-probabilities with those of the initial
    weights. A function gets logits [rows, length, vocabulary] in fp32, labels [rows, length], which are negative at
    positions without a target, `columns` and `options`. It returns the sum of the losses of all units and their number,
    or a dictionary with this pair as `loss` and such a pair for each further metric."""
    unit: Literal["token", "document", "pair"] = "token"
    """What a function of your own is a sum over. `token`: target tokens; its rows may be any parts of sequences.
    `document`: each row is a whole document. `pair`: rows 2 · p and 2 · p + 1 are the chosen and the rejected
    conversation of pair p."""
    count: ObjectPath | None = None
    """A function of your own, `"mine:count"`, that returns the number of items in labels [rows, length], given
    `columns` and `options`, if the loss is not a mean over all units that have a target."""
    columns: Many[str] = ()
    """Columns of the data that a function of your own and its `count` are given, each as an argument of that name, in
    fp32. Every row of every source has a number in each of them: its document's, or its pair's. The argument is [rows]
    for the units `document` and `pair`, and [rows, length] for `token`, where each position has the number of the
    document of its input."""
    hidden_states: bool = False
    """Whether a function of your own gets the last hidden states [rows, length, width] and the weight of the head
    [vocabulary, width], in the precision of the weight, instead of logits: `loss(hidden, weight, labels, ...)`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of a function of your own and of its `count`."""
    beta: PositiveFloat = 0.1
    """`dpo` and `kto`: scale of the log-ratios. `ipo`: τ, the strength of the regularisation. `orpo`: λ, the weight of
    the odds ratio, which is added to the cross-entropy of the chosen completion."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """`dpo`: the probability that the preference of a pair is inverted (conservative DPO)."""
    sft_weight: NonNegativeFloat = 0.0
    """`dpo` and `ipo`: weight of the mean cross-entropy of the chosen completion's tokens, added to the loss of each
    pair (RPO, arXiv 2404.19733)."""
    desirable_weight: PositiveFloat = 1.0
    """`kto`: weight of the losses of desirable completions, λ_D."""
    undesirable_weight: PositiveFloat = 1.0
    """`kto`: weight of the losses of undesirable completions, λ_U."""

    @property
    def is_own(self) -> bool:
        """Whether the loss is a function of the user's own."""
        return is_path(self.name)

    @property
    def is_preference(self) -> bool:
        """Whether the loss depends on the log-probabilities of completions."""
        return self.name != "language_model" and not self.is_own

    @property
    def compares_pairs(self) -> bool:
        """Whether it is a mean over pairs."""
        return self.unit == "pair" or self.name in ("dpo", "ipo", "orpo")

    @property
    def item(self) -> str:
        """What the loss is a mean over, in words."""
        if self.count is not None:
            return f"item of {self.count}"
        if self.is_preference:
            return "pair" if self.compares_pairs else "completion"
        return self.unit

    @property
    def reads_completions(self) -> bool:
        """Whether the data are completions, or pairs of them."""
        return self.is_preference or self.compares_pairs

    @property
    def reads_whole_documents(self) -> bool:
        """Whether the loss is not a sum over tokens, so that each document must be whole and on its own."""
        return self.is_preference or self.unit != "token"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss depends on the log-probabilities under the initial weights."""
        return self.name in ("dpo", "ipo", "kto")

    @property
    def formats(self) -> tuple[str, ...]:
        """The source formats that the objective reads."""
        if not self.reads_completions:
            return ("auto", "text", "messages", "prompt_completion", "instruction")
        return ("auto", "preference") if self.compares_pairs else ("auto", "unpaired_preference", "preference")

    @model_validator(mode="after")
    def _used(self) -> Self:
        used = {
            "language_model": (),
            "dpo": ("beta", "label_smoothing", "sft_weight"),
            "ipo": ("beta", "sft_weight"),
            "orpo": ("beta",),
            "kto": ("beta", "desirable_weight", "undesirable_weight"),
        }.get(self.name, ("unit", "count", "columns", "hidden_states", "options"))
        fields = type(self).model_fields
        others = sorted(self.model_fields_set - {"name", *used})
        unused = [name for name in others if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if unused:
            has = f"which uses {', '.join(used)}" if used else "which has no further fields"
            raise ValueError(f"{', '.join(unused)} would have no effect on '{self.name}', {has}")
        return self

    @model_validator(mode="after")
    def _columns_are_arguments(self) -> Self:
        taken = ["logits", "labels", *self.options]
        for name in self.columns:
            if not name.isidentifier() or iskeyword(name):
                raise ValueError(f"column {name!r} cannot be the name of an argument; rename it in `map` of the source")
            if name in taken:
                raise ValueError(f"the loss would be given {name!r} twice; rename it")
            taken.append(name)
        return self


def Custom(  # noqa: N802 - it stands for a class
    loss: Callable[..., Any] | str,
    *,
    unit: Literal["token", "document", "pair"] = "token",
    count: Callable[..., Any] | str | None = None,
    columns: Sequence[str] = (),
    hidden_states: bool = False,
    **options: Any,
) -> ObjectiveConfig:
    """Returns the objective of a loss of the user's own: `ObjectiveConfig` has the meaning of each argument."""
    fields: dict[str, Any] = {"name": loss, "unit": unit, "count": count, "columns": columns}
    return ObjectiveConfig(**fields, hidden_states=hidden_states, options=options)


class OptimConfig(Part):
    """Optimizer and learning rate schedule."""

    name: Annotated[
        Annotated[
            Literal["adamw", "adam", "sgd", "lion", "muon", "schedule_free_adamw", "adafactor", "adamw_8bit"],
            Tag(NAME),
        ]
        | NamedPath,
        NameOrPath,
    ] = "adamw"
    """A name, or a class of your own, `"mine:Optimizer"`, or of any package, `"torch.optim:RAdam"`: a subclass of
    `torch.optim.Optimizer`, or a function that returns an object of one. It gets parameter groups with `weight_decay`,
    `lr` and the arguments in `options`. `adamw` decouples the weight decay (arXiv 1711.05101), `adam` adds it to the
    gradient. `lion` (arXiv 2302.06675) keeps one moment instead
    of two; its learning rate is usually 3 to 10 times smaller, and its weight decay larger by the same factor. `muon`
    (arXiv 2502.16982) makes the momentum of each matrix of a decoder layer orthogonal; other weights are updated as by
    `adamw`, at the same learning rate. `schedule_free_adamw` (arXiv 2405.15682) averages its updates and needs no
    decay: `schedule` should be `constant`. Evaluations and exports have the averaged weights. `adafactor` (arXiv
    1804.04235) keeps a value for each row and each column of a matrix in place of moments; its learning rate is
    relative to the root mean square of a weight, and at most 1/√t in step t. `adamw_8bit` (arXiv 2110.02861) is `adamw`
    with 8-bit moments for matrices, in blocks of a row."""
    lr: PositiveFloat
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the first and second moments; `sgd` uses the first as momentum. For `lion`, the share of the momentum in
    the direction of an update, and the decay of the momentum; for `schedule_free_adamw`, the share of the averaged
    weights in the trained ones, and the decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of every weight with two or more dimensions; biases and norms are never decayed."""
    schedule: Annotated[
        Annotated[Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"], Tag(NAME)] | NamedPath, NameOrPath
    ] = "cosine"
    """A name, or a function of your own, `"mine:schedule"`: given the step, counted from 0, and the recipe, it
    returns the learning rate relative to `lr`. That of a name in step s, counted from 0, with w steps of warm-up, n =
    `train.max_steps`, d = `decay_steps` and m = `min_lr_ratio`. Before step w all of them rise linearly: s / w, or m +
    (1 − m) · s / w for `wsd`. After that: `constant`: 1. `linear`: (n − s) / (n − w). `cosine`: m + (1 − m) · (1 +
    cos(π · (s − w) / (n − w))) / 2. `inverse_sqrt`: √(w / s), or √(10000 / (10000 + s)) if w = 0. `wsd` (warm-up,
    stable, decay; arXiv 2404.06395): 1 before step n − d, then linear decay, m + (1 − m) · (n − s) / d."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly from 0, or from `min_lr_ratio` for `wsd`."""
    warmup_ratio: Fraction = 0.0
    """The same as a share of the run's steps, rounded up. Set either this or `warmup_steps`."""
    decay_steps: NonNegativeInt = 0
    """Steps of the final decay of `wsd`."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of `cosine` and `wsd`, and at the start of `wsd`, relative to the peak."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 disables clipping."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer; of a class of your own, all of them. `muon`: `momentum` (0.95), `nesterov`
    (true), `ns_steps` (5), the iterations that make a matrix orthogonal, and `adjust_lr_fn`, the factor of the learning
    rate of a matrix of m × n: `match_rms_adamw` (the default: 0.2 · √max(m, n)) or `original` (√max(1, m / n)).
    `adafactor`: `beta2_decay` (−0.8): in update t, the new gradient has the share t^`beta2_decay` in the second moment;
    `eps1` (fp32's ε), a lower bound on the square root of a second moment; `eps2` (1e-3), a lower bound on the root
    mean square of a weight; and `d` (1), the largest root mean square of an update. `adamw_8bit`: `block_size` (256),
    the elements of a row that share a scale."""

    def with_warmup_steps(self, steps: int) -> Self:
        """Returns the fields with the warm-up in steps, of a run of `steps`."""
        if not self.warmup_ratio:
            return self
        warmup = math.ceil(Decimal(str(self.warmup_ratio)) * steps)
        return self.model_copy(update={"warmup_steps": warmup, "warmup_ratio": 0.0})

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("set either `warmup_steps` or `warmup_ratio`")
        return self

    @model_validator(mode="before")
    @classmethod
    def _betas_from_json(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and isinstance(fields.get("betas"), list):
            return {**fields, "betas": tuple(fields["betas"])}
        return fields


class BatchConfig(Part):
    """The global batch; gradient accumulation follows from the cluster."""

    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all devices."""
    micro_batch_size: PositiveInt
    """Sequences per forward pass on one device."""


MetricName = Annotated[str, Field(min_length=1)]
"""Name of a metric of an evaluation: `eval_loss`, or `eval_loss_by_set/NAME` for the set of that name."""


class EarlyStoppingConfig(Part):
    """Ends a run whose evaluations do not improve any more."""

    patience: PositiveInt
    """The run ends after this many evaluations in a row without an improvement."""
    metric: MetricName = "eval_loss"
    """The metric of an evaluation that should improve, as for `checkpoint.best_metric`."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value is better."""
    min_improvement: NonNegativeFloat = 0.0
    """An evaluation improves on the best one before if it is better by more than this."""


class TrainConfig(Part):
    """Length and seed of the run."""

    max_steps: PositiveInt | None = None
    """Number of optimizer steps. Set either this or `epochs`; `epochs` determines the number of steps when the data
    have been prepared."""
    epochs: PositiveInt | Annotated[float, Field(gt=0, le=MAX_NUMBER)] | None = None
    """Number of times that every training sequence is read, also a fraction, such as 0.5 or 2.5. Several sources are
    mixed in proportion to their number of sequences, and the last step reads the remaining sequences."""
    early_stopping: EarlyStoppingConfig | None = None
    """When the run ends before its last step. Default: never."""
    seed: NonNegativeInt = 1
    """Seed of the initial weights, dropout and the order of the samples."""
    neftune_alpha: NonNegativeFloat = 0.0
    """α of NEFTune (arXiv 2310.05914): in training, uniform noise of at most α / √(L · d) is added to the embeddings of
    each document, L being its length and d the width. 0: none; the paper has 5 to 15."""

    def sequences(self, in_epoch: int) -> int:
        """Returns the number of sequences that `epochs` read, of data with `in_epoch` sequences; 0 without epochs."""
        return math.ceil(Decimal(str(self.epochs)) * in_epoch) if self.epochs else 0

    @property
    def steps(self) -> int:
        """The number of steps, once it is known."""
        assert self.max_steps is not None, "the number of steps of an epoch is known once the data are prepared"
        return self.max_steps

    @model_validator(mode="after")
    def _has_length(self) -> Self:
        if self.max_steps is None and self.epochs is None:
            raise ValueError("give either `max_steps` or `epochs`")
        return self
