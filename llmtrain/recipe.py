"""What to train: frozen, strict models, in which no number is stated twice.

A recipe says nothing about the machine: the data parallel size and the number of accumulation steps follow from the
cluster (`llmtrain.rules`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from llmtrain.errors import Problem, RecipeError, nearest, short, shown
from llmtrain.other_names import OURS
from llmtrain.system.untrusted import TOO_DEEP, TOO_LARGE, json_fault

T = TypeVar("T")
Many = Annotated[Sequence[T], AfterValidator(tuple)]
"""A recipe may use a list; the frozen model stores a tuple."""
LARGEST = 10**12
"""Upper bound of every number in a recipe: far beyond any run, and small enough for fast arithmetic."""
LONGEST_SEQUENCE = 2**24
"""Tokens: more than the context of any model."""
LARGEST_TRAINED = 1_000_000
"""Tokens of a tokenizer that is trained here: more than those of any model."""
LONGEST_WINDOW = 65_536
"""Steps for which statistics are kept: they are stored on each device, and read by the host every few steps."""
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Part(BaseModel):
    """A part of a recipe: frozen, with strict types and no undeclared fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _is_data(cls, value: Any) -> Any:
        if isinstance(value, (str, dict)) and (fault := json_fault(value)):
            raise ValueError(fault)
        return value


NewTokens = Many[Annotated[str, Field(min_length=1)]] | Literal["template"]


class LoraConfig(Part):
    """Low-rank adapters (LoRA, arXiv 2106.09685), as PEFT has them; all other weights are frozen."""

    rank: PositiveInt | None = None
    """Rank r of the update B·A of a matrix. Required, unless `pretrained` decides it."""
    alpha: PositiveFloat | None = None
    """Numerator of the update's scale, alpha / r. Default: r, for a scale of 1."""
    dropout: Fraction = 0.0
    """Dropout of the input of A."""
    targets: Literal["all-linear"] | Many[str] = "all-linear"
    """Linear layers to adapt: all within the decoder, or those whose names, or ends of names after a dot, match one of
    these patterns: `q_proj`, `model.layers.1?.mlp.*`."""
    dora: bool = False
    """Also train the norm of each row of a matrix (DoRA, arXiv 2402.09353)."""
    rslora: bool = False
    """Scale by alpha / √r (arXiv 2312.03732)."""
    modules_to_save: Many[str] = ()
    """Modules that are trained as a whole, and saved with the adapter: `lm_head`. Patterns as in `targets`."""
    pretrained: str | None = None
    """Folder or hub name of a LoRA adapter to start from. Its own configuration takes the place of the other fields,
    except for `dropout`."""
    revision: str | None = None
    """Branch, tag or commit of `pretrained` on the hub."""

    @model_validator(mode="after")
    def _one_configuration(self) -> Self:
        if self.pretrained is None:
            if self.rank is None:
                raise ValueError("give `rank`, or the `pretrained` adapter to start from")
            if self.revision is not None:
                raise ValueError("`revision` is that of a `pretrained` adapter")
            return self
        own = {"pretrained", "revision", "dropout"}
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if others := [name for name in given if name not in own]:
            raise ValueError(f"`pretrained` has a configuration of its own; leave out {', '.join(others)}")
        return self


class ModelConfig(Part):
    """A `transformers` causal LM: a new one of an architecture, or pretrained weights."""

    architecture: str | None = None
    """`model_type` of `transformers` (`llama`, `gpt2`, `qwen3_moe`, ...) for a newly initialised model."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of the architecture's configuration. `vocab_size` may be omitted if `data.tokenizer` is trained."""
    pretrained: str | None = None
    """Folder or hub name of the weights from which training starts. Excludes `architecture`; `config` overrides its
    fields."""
    revision: str | None = None
    """Branch, tag or commit of `pretrained` on the hub."""
    new_tokens: NewTokens = ()
    """Tokens to add to the tokenizer and to the vocabulary of `pretrained`, if the tokenizer lacks them: a list of
    texts, which are tokens wherever they occur; or `template`: the special tokens that the chat template writes, in the
    form `<|…|>`, `<｜…｜>`, `<start_of_…>` or `<end_of_…>`. The embedding and the head grow to a multiple of 128
    rows."""
    kept_rows: PositiveInt | None = None
    """With `new_tokens`, the rows of the pretrained embedding that are kept; all others start as the mean of these.
    Default: those of the tokens that the tokenizer has."""
    attention: Literal[
        "auto", "eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """Attention implementation, as `transformers` names it, or `varlen`: torch's kernel for packed documents. `auto`:
    the fastest one measured on the device (`kernels`), else `sdpa`."""
    trust_remote_code: bool = False
    """Run the model code in a hub repository."""
    adapter: LoraConfig | None = None
    """Trains adapters instead of the weights."""
    trainable: Many[str] = ()
    """Patterns of the names of the parameters to train, `model.layers.3?.*`; all others are frozen. Default: all are
    trained."""

    quantize: Literal["none", "nf4"] = "none"
    """`nf4`: with an `adapter` on `pretrained` weights, hold the frozen linear layers of the decoder in 4.127 bits per
    element (QLoRA, arXiv 2305.14314). Embedding, norms, head and what is no linear layer stay as they are."""

    @property
    def attention_kernel(self) -> str:
        """The attention implementation; `sdpa` if nothing was measured."""
        return "sdpa" if self.attention == "auto" else self.attention

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.architecture is None) == (self.pretrained is None):
            raise ValueError("give exactly one of `architecture` (a new model) and `pretrained` (its weights)")
        if self.adapter is not None and self.trainable:
            raise ValueError("`adapter` freezes every weight; name what else to train in `adapter.modules_to_save`")
        if self.quantize != "none" and (self.adapter is None or self.pretrained is None):
            raise ValueError("`quantize` is for the frozen weights of `pretrained`, beside an `adapter`")
        return self

    @property
    def is_frozen_in_part(self) -> bool:
        """Whether the recipe freezes weights."""
        return self.adapter is not None or bool(self.trainable)

    @property
    def leaves_base(self) -> bool:
        """Whether checkpoints leave out the frozen weights, which are those of `pretrained`."""
        return self.is_frozen_in_part and self.pretrained is not None


class Source(Part):
    """One corpus: a hub dataset, local files, or a built-in one."""

    name: str
    """Hub dataset name; a file, glob or folder of txt, jsonl, parquet or arrow files; `stdlib`, the source text of
    Python's standard library; or `stdlib_chat`, questions about it with the answers of its docstrings."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset; set it to make the corpus reproducible."""
    format: Literal[
        "auto", "text", "messages", "prompt_completion", "instruction", "preference", "unpaired_preference"
    ] = "auto"
    """What a row holds: a text; a conversation as `messages` (also ShareGPT's), as a prompt and its completion, or as
    an instruction, its input and the output; a pair, one conversation with two completions, of which the first is
    preferred; or a prompt, a completion, and whether it is desirable. `auto`: what `objective` reads if it is not
    `language_model`, else a text if local files have `text_column`, else a conversation if they have columns with the
    usual names; the same for a hub dataset that declares its columns, else a text."""
    text_column: str = "text"
    """Column that contains the document."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns of the parts of a conversation that have none of the usual names: `{"messages": "dialogue"}`. Parts:
    `messages`, `prompt`, `completion`, `label`, `chosen`, `rejected`, `instruction`, `input`, `output`, `system`,
    `tools`."""
    system: str | None = None
    """System text of conversations that have none."""
    weight: PositiveFloat = 1.0
    """Share of the training samples drawn from this source, relative to the other sources."""

    def __init__(self, name: str | None = None, /, **fields: Any) -> None:
        super().__init__(**(fields if name is None else {"name": name, **fields}))

    @property
    def declares_conversations(self) -> bool:
        """Whether it holds conversations whatever its columns are."""
        return self.name == "stdlib_chat" or self.format not in ("auto", "text")


class TrainedTokenizer(Part):
    """A byte-level BPE tokenizer trained on the recipe's own training documents."""

    vocab_size: Annotated[int, Field(gt=0, le=LARGEST_TRAINED)]
    """Largest number of tokens, including special tokens: `<|endoftext|>` and, with conversations, those of
    `data.chat_template` (`<|…|>`)."""


class DataConfig(Part):
    """Sources, tokenizer and packing."""

    sources: Many[Source] = Field(min_length=1)
    """What to train on; several sources are mixed by weight."""
    tokenizer: str | TrainedTokenizer
    """Folder or hub name of a tokenizer, or one to train."""
    sequence_length: Annotated[int, Field(gt=0, le=LONGEST_SEQUENCE)]
    """Tokens that the model reads per sequence, T."""
    packing: Literal["best_fit", "concat", "none"] = "best_fit"
    """`best_fit`: no document of at most T tokens is split (arXiv 2404.10830); `concat`: one stream, cut every T;
    `none`: one document per sequence, then padding."""
    mask_documents: bool = True
    """Restart positions at each document, and prevent attention to other documents."""
    special_tokens: Literal["refuse", "text", "parse"] = "refuse"
    """What the text of a special token of the tokenizer, such as `<|im_start|>`, means within a document. `text`: its
    characters; `parse`: the token, as a chat template means it; `refuse`: `text` if there are few (10, or one per
    million characters), and an error otherwise."""
    chat_template: str | None = None
    """Jinja template that writes conversations: its text, a file, `chatml`, or `plain`, which
    has no special tokens but the one that ends a text. Default: that of the tokenizer."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """What is trained on in a conversation: the turns of the assistant, only the last one, or every token. A message
    with `train: false` or `weight: 0` never is."""
    too_long: Literal["drop", "cut_turns"] = "drop"
    """What happens to conversations of more than T + 1 tokens, which are never split. `cut_turns`: the last turns are
    left out, if a turn of the assistant ends before."""
    faulty_rows: Literal["refuse", "drop"] = "refuse"
    """What happens to rows that hold no valid conversation, or one whose mask cannot be established."""
    eval_fraction: Fraction = 0.01
    """Fraction of the documents held out for evaluation, chosen by the hash of their text; for a single text file, its
    end. If `evaluation.sources` are given, nothing is held out."""
    cache_dir: str | None = None
    """Folder of the token stores; default: `$LLMTRAIN_CACHE`, else `~/.cache/llmtrain`."""

    @property
    def keeps_apart(self) -> bool:
        """Whether sequences hold several documents that are kept apart."""
        return self.mask_documents and self.packing != "none"


class ObjectiveConfig(Part):
    """What is minimised: the mean over the target tokens, the pairs or the completions of the global batch."""

    name: Literal["language_model", "dpo", "ipo", "orpo", "kto"] = "language_model"
    """`language_model`: the cross-entropy of each target token. The others depend on the log-probabilities of whole
    completions. `dpo` (arXiv 2305.18290), `ipo` (arXiv 2310.12036) and `orpo` (arXiv 2403.07691) compare the two of a
    pair; `kto` (arXiv 2402.01306) reads single ones, each of which is desirable or not. All but `orpo` take
    log-probabilities relative to those under the weights that training starts from."""
    beta: PositiveFloat = 0.1
    """`dpo` and `kto`: scale of the log-ratios. `ipo`: τ, the strength of the regularisation. `orpo`: λ, the weight of
    the odds ratio beside the cross-entropy of the chosen completion."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """`dpo`: the probability that a pair's preference is the wrong way round (conservative DPO)."""
    sft_weight: NonNegativeFloat = 0.0
    """`dpo` and `ipo`: weight of the mean cross-entropy of the chosen completion's tokens, added to the loss of each
    pair (RPO, arXiv 2404.19733)."""
    desirable_weight: PositiveFloat = 1.0
    """`kto`: weight of the losses of desirable completions, λ_D."""
    undesirable_weight: PositiveFloat = 1.0
    """`kto`: weight of the losses of undesirable completions, λ_U."""

    @property
    def of_completions(self) -> bool:
        """Whether the loss is a mean over completions, or pairs of them, instead of tokens."""
        return self.name != "language_model"

    @property
    def compares_pairs(self) -> bool:
        """Whether it is a mean over pairs."""
        return self.of_completions and self.name != "kto"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss depends on the log-probabilities under the initial weights."""
        return self.name in ("dpo", "ipo", "kto")

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of sources that it reads."""
        if not self.of_completions:
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
        }[self.name]
        fields = type(self).model_fields
        others = sorted(self.model_fields_set - {"name", *used})
        unused = [name for name in others if getattr(self, name) != fields[name].default]
        if unused:
            has = f"which uses {', '.join(used)}" if used else "which has no further fields"
            raise ValueError(f"{', '.join(unused)} would have no effect on '{self.name}', {has}")
        return self


class OptimConfig(Part):
    """Optimizer and learning rate schedule."""

    name: Literal["adamw", "adam", "sgd", "lion", "muon", "schedule_free_adamw"] = "adamw"
    """`adamw` decouples the weight decay (arXiv 1711.05101), `adam` adds it to the gradient. `lion` (arXiv 2302.06675)
    keeps one moment instead of two; its learning rate is usually 3 to 10 times smaller, and its weight decay larger by
    the same factor. `muon` (arXiv 2502.16982) makes the momentum of each matrix of a decoder layer orthogonal; other
    weights are updated as by `adamw`, at the same learning rate. `schedule_free_adamw` (arXiv 2405.15682) averages its
    updates and needs no decay: `schedule` should be `constant`. Evaluations and exports have the averaged weights."""
    lr: PositiveFloat
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the first and second moments; `sgd` uses the first as momentum. For `lion`, the share of the momentum in
    the direction of an update, and the decay of the momentum; for `schedule_free_adamw`, the share of the averaged
    weights where gradients are taken, and the decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of every weight with two or more dimensions; biases and norms are never decayed."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    """The learning rate relative to `lr` in step s, counted from 0, with w = `warmup_steps`, n = `train.max_steps`, d =
    `decay_steps` and m = `min_lr_ratio`. Before step w every schedule rises linearly: s / w, or m + (1 − m) · s / w for
    `wsd`. After that: `constant`: 1. `linear`: (n − s) / (n − w). `cosine`: m + (1 − m) · (1 + cos(π · (s − w) / (n −
    w))) / 2. `inverse_sqrt`: √(w / s), or √(10000 / (10000 + s)) if w = 0. `wsd` (warm-up, stable, decay; arXiv
    2404.06395): 1 before step n − d, then linear decay, m + (1 − m) · (n − s) / d."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly from 0, or from `min_lr_ratio` for `wsd`."""
    decay_steps: NonNegativeInt = 0
    """Steps of the final decay of `wsd`."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of `cosine` and `wsd`, and at the start of `wsd`, relative to the peak."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 disables clipping."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer. `muon`: `momentum` (0.95), `nesterov` (true), `ns_steps` (5), the iterations
    that make a matrix orthogonal, and `adjust_lr_fn`, the factor of the learning rate of a matrix of m × n:
    `match_rms_adamw` (the default: 0.2 · √max(m, n)) or `original` (√max(1, m / n))."""

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


Precision = Literal["fp32", "bf16", "fp16", "autocast_bf16", "autocast_fp16"]
OffloadDevice = Literal["none", "cpu", "nvme"]


class ParallelConfig(Part):
    """How the work is split. Data parallelism uses the devices that the other degrees leave."""

    backend: Literal["deepspeed", "accelerate", "horovod", "data_parallel"] = "deepspeed"
    """What runs the step. `data_parallel` is `torch.nn.DataParallel`: one process for all devices of one machine."""
    accelerate: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """What Accelerate runs: DistributedDataParallel, FSDP2 (`torch.distributed.fsdp.fully_shard`) or DeepSpeed."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """Shards optimizer states (1), gradients (2) and parameters (3) over data parallel ranks (arXiv 1910.02054). `ddp`
    shards nothing: 0. `fsdp2` always stores shards, and gathers a layer's parameters for each pass (3), or once for
    both passes (2)."""
    hierarchical_partition: PositiveInt = 1
    """Number of neighbouring ranks, usually those of a node, that keep all parameters of ZeRO-3 among themselves once
    they have been gathered in a step, and gather them from each other from then on (hpZ, arXiv 2306.10209)."""
    pipeline: PositiveInt = 1
    """Number of devices over which the layers of the model are distributed."""
    pipeline_schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the passes in a pipeline. `1f1b` alternates forward and backward passes; `interleaved` does so with
    several stages on each device, which wait less and send more (arXiv 2104.04473); `zero_bubble` also delays the
    gradients of weights until a device would wait (arXiv 2405.15362)."""
    pipeline_chunks: PositiveInt = 1
    """Number of stages on each device of a pipeline: 1 for `1f1b`, 2 or more for `interleaved`, an even number for
    `zero_bubble`."""
    tensor: PositiveInt = 1
    """Number of devices that share each matrix and, if the model allows it, the tokens between attention and
    feed-forward."""
    sequence: PositiveInt = 1
    """Number of devices that share each sequence (Ulysses, arXiv 2309.14509)."""
    expert: PositiveInt = 1
    """Number of devices over which the experts of a layer are distributed."""
    precision: Precision = "fp32"
    """`bf16` and `fp16` keep fp32 master weights; `autocast_*` keeps fp32 weights and casts within the operations."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type in which gradients are accumulated over micro-batches."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of being kept. `selective` keeps the input of each layer and
    the results of its matrix products and of attention, and computes norms, rotations and activation functions again.
    `full` keeps the input only, and computes the whole layer again."""
    checkpoint_every: PositiveInt = 1
    """Applies `activation_checkpointing` to every k-th layer, beginning with the first; the others keep everything."""
    offload_activations: bool = False
    """Keeps the inputs of fully recomputed layers in pinned host memory, and copies them while other layers compute."""
    tiled_mlp: bool = False
    """Computes feed-forward layers as many tokens at a time as the model is wide, and again in the backward pass (ALST,
    arXiv 2506.13996), for sequences that are much longer than that."""
    offload_optimizer: OffloadDevice = "none"
    """Where optimizer states are stored."""
    offload_param: OffloadDevice = "none"
    """Where ZeRO-3 parameters are stored between uses."""
    nvme_path: str | None = None
    """Local folder for `nvme` offload."""

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.pipeline * self.pipeline_chunks

    @property
    def strategy(self) -> str:
        """The strategy that splits the work: `deepspeed`, `ddp`, `fsdp2`, `horovod` or `data_parallel`."""
        return self.accelerate if self.backend == "accelerate" else self.backend


class TrainConfig(Part):
    """Length and seed of the run."""

    max_steps: PositiveInt | None = None
    """Number of optimizer steps. Give either this or `epochs`, from which it follows once the data are prepared."""
    epochs: PositiveInt | None = None
    """Number of times that every training sequence is read, exactly: several sources are mixed in proportion to their
    sequences, and the last step reads what is left."""
    seed: NonNegativeInt = 1
    """Seed of the initial weights, dropout and the order of the samples."""

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


class EvalConfig(Part):
    """Evaluation: the loss on documents that are not trained on."""

    every_steps: NonNegativeInt = 0
    """Steps between evaluations; the run also ends with one. 0: never."""
    at_start: bool | None = None
    """Also evaluate before the first step. Default: only if training starts from pretrained weights."""
    sources: Many[Source] = ()
    """What to evaluate on, instead of held-out documents of `data.sources`; without `weight`, since all of it counts
    equally."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Annotated[Many[Source], Field(min_length=1)]] = (
        Field(default_factory=dict)
    )
    """Further sets to evaluate on, by name, each with its own sources, loss, perplexity and bits per byte."""
    max_sequences: PositiveInt | None = None
    """Largest number of sequences to evaluate on, taken evenly from all sources; the same for each of `sets`. Default:
    all."""

    @property
    def all_sources(self) -> dict[str, Source]:
        """The sources of all sets, by their fields."""
        groups = {
            "evaluation.sources": self.sources,
            **{f"evaluation.sets.{name}": one for name, one in self.sets.items()},
        }
        return {f"{field}.{number}": one for field, group in groups.items() for number, one in enumerate(group)}


class SamplesConfig(Part):
    """Texts that the model writes while it trains, also to the trackers and `samples.jsonl` of the run directory."""

    every_steps: NonNegativeInt = 0
    """Steps between samples; the run also ends with them. 0: never."""
    prompts: Many[Annotated[str, Field(min_length=1)]] = ()
    """Texts to continue. If the training data are conversations, a prompt is the question of a user."""
    tokens: PositiveInt = 48
    """Largest number of tokens of a continuation, which ends with the sequence of `data.sequence_length` tokens at the
    latest. Each token takes a forward pass of a micro-batch."""
    temperature: NonNegativeFloat = 0.0
    """0: always the most likely token. Else one of the 50 most likely tokens is drawn, in the same way at each step."""


class TasksConfig(Part):
    """Downstream tasks of lm-evaluation-harness, scored in a process of its own, to `eval/` of the run directory."""

    names: Many[Annotated[str, Field(min_length=1)]] = ()
    """Names of tasks, which are scored at the end of the run."""
    every_steps: NonNegativeInt = 0
    """Also score the checkpoints of steps that are multiples of this; those that are written in the meantime are left
    out. 0: only at the end."""
    include_path: str | None = None
    """Folder of further tasks, as YAML files."""
    limit: PositiveInt | None = None
    """Largest number of documents of a task. Default: all."""


class CheckpointConfig(Part):
    """When to save checkpoints, and which to keep."""

    every_steps: NonNegativeInt = 0
    """Steps between checkpoints; the run also ends with one. 0: only at the end."""
    keep_last: PositiveInt | None = None
    """How many of the newest checkpoints to keep; default: all."""
    keep_every_steps: PositiveInt | None = None
    """In addition to `keep_last`, keep the checkpoints of steps that are multiples of this."""
    keep_best: PositiveInt | None = None
    """In addition to `keep_last`, keep this many checkpoints with the lowest evaluation loss after the same step."""
    background: bool = True
    """Copy to host memory, and write while training continues. Needs as much host memory as the rank saves bytes."""


class GuardConfig(Part):
    """Which updates are skipped, and what happens after too many of them.

    A loss or a gradient norm that is not finite never affects the weights.
    """

    spike_sigma: Annotated[float, Field(ge=0)] = 6.0
    """Skip the update of a step whose loss, or gradient norm before clipping, is a spike: its logarithm is more than
    this many standard deviations above the mean of the logarithms of the last `window_steps` updates taken, once there
    are that many. The standard deviation counts as at least 0.001. 0: only skip what is not finite."""
    spike_norm_ratio: Annotated[float, Field(ge=1)] = 8.0
    """A gradient norm is only a spike if it is also more than this many times the geometric mean of these updates: in
    healthy runs with small batches, norms are occasionally far above their usual size. 1: only `spike_sigma`
    decides."""
    window_steps: Annotated[int, Field(ge=2, le=LONGEST_WINDOW)] = 128
    """Number of updates over which mean and deviation are computed, and of steps in which skipped updates are
    counted."""
    max_skipped: NonNegativeInt = 8
    """Largest acceptable number of skipped updates within the last `window_steps` steps."""
    every_steps: PositiveInt = 10
    """Steps between checks for too many skipped updates; at least once per `window_steps`. Each check waits for the
    device, as logging does."""
    then: Literal["rollback", "stop"] = "rollback"
    """After too many skipped updates: roll back to the last checkpoint before the first of them and continue with new
    data, or stop."""
    max_rollbacks: NonNegativeInt = 3
    """Stop instead of rolling back more often than this."""

    def looks_after(self, step: int) -> bool:
        """Whether the run checks for too many skipped updates after a step."""
        return step % min(self.every_steps, self.window_steps) == 0


class KernelsConfig(Part):
    """Which kernels compute the model. `auto`: the fastest ones measured on the device."""

    blocks: Literal["auto", "eager", "compiled", "liger"] = "auto"
    """The decoder layers. `eager`: those of `transformers`; `compiled`: each compiled by `torch.compile`; `liger`:
    Liger's kernels for norms, rotary positions and SwiGLU. `auto` without a measurement: eager."""
    loss: Literal["auto", "whole", "chunked", "compiled", "liger"] = "auto"
    """`whole`: computes all logits of a micro-batch at once; `chunked`: those of 1,024 tokens at a time, which only
    needs memory for these; `compiled`: the same with `torch.compile`; `liger`: Liger's fused loss. `auto` without a
    measurement: chunked if the logits are large and nothing prevents it."""
    fp8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Computes the layers' matrix products in fp8 with torchao, with one scale per tensor or row. Results differ from
    bf16. Refused if it is slower."""
    threads: Literal["auto"] | PositiveInt = "auto"
    """Number of CPU threads of a rank. `auto` without a measurement: torch's choice, one per core of the rank."""

    @model_validator(mode="before")
    @classmethod
    def _all_auto(cls, fields: Any) -> Any:
        return {} if fields == "auto" else fields


class LoggingConfig(Part):
    """What is written while training."""

    every_steps: PositiveInt = 10
    """Steps between lines in `metrics.jsonl`."""
    trackers: Many[Literal["tensorboard", "wandb", "mlflow"]] = ("tensorboard",)
    """Trackers in addition to `metrics.jsonl`."""
    price_per_device_hour: PositiveFloat | None = None
    """Price of a device for an hour, in any currency, to write what the run has cost and will have cost at its end."""
    project: str = "llmtrain"
    """Project (W&B) or experiment (MLflow) of the run."""


class WatchdogConfig(Part):
    """When a hanging run is ended, with exit code 5, and which rank is reported as slow."""

    min_seconds: NonNegativeFloat = 60.0
    """Seconds without a finished step after which a run is ended, or the time of `factor` steps if that is longer. 0:
    never."""
    factor: NonNegativeFloat = 10.0
    """Multiple of the 99th percentile of the last 1,000 steps' times."""
    phase_seconds: NonNegativeFloat = 1800.0
    """The same limit in seconds for a save, a batch of an evaluation, a token of the samples, and each of the first two
    steps, which compile. 0: no limit."""
    straggler_ratio: NonNegativeFloat = 1.5
    """A rank whose own work takes this many times as long as that of the median rank is reported. 0: never."""


class ProfileConfig(Part):
    """A window of steps that torch's profiler records, to `profile/` of the run directory."""

    steps: NonNegativeInt = 0
    """Number of steps to record. 0: none."""
    after_step: NonNegativeInt = 10
    """The window begins with the step after this one; the first steps of a run compile and allocate."""
    ranks: Many[NonNegativeInt] = (0,)
    """Ranks that are recorded."""
    memory: bool = False
    """Also write a snapshot of a GPU's memory, for https://pytorch.org/memory_viz."""


class ExportConfig(Part):
    """What a finished run produces besides its last checkpoint."""

    at_end: bool = True
    """Write a Hugging Face folder, `export/`, to the run directory."""
    sample_prompt: str | None = None
    """Print the exported model's continuation of this text."""
    sample_tokens: PositiveInt = 48
    """Number of tokens of the continuation."""


class Recipe(Part):
    """Everything that defines a training run, except for the machine."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run directory and the run in trackers."""
    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig
    batch: BatchConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    evaluation: EvalConfig = EvalConfig()
    samples: SamplesConfig = SamplesConfig()
    tasks: TasksConfig = TasksConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    kernels: KernelsConfig = KernelsConfig()
    logging: LoggingConfig = LoggingConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    profile: ProfileConfig = ProfileConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _formats_of_the_objective(self) -> Self:
        formats = {source.format for source in (*self.data.sources, *self.evaluation.all_sources.values())}
        if others := sorted(formats - set(self.objective.formats)):
            raise ValueError(
                f"a source has the format {', '.join(others)}, but objective.name={self.objective.name} reads "
                f"{', '.join(self.objective.formats)}"
            )
        return self

    @property
    def held_out_fraction(self) -> float:
        """The fraction of the training sources that is held out for evaluation."""
        return 0.0 if self.evaluation.sources else self.data.eval_fraction

    @property
    def evaluates_at_start(self) -> bool:
        """Whether the run evaluates before the first step."""
        at_start = self.evaluation.at_start
        wanted = self.model.pretrained is not None if at_start is None else at_start
        return wanted and self.evaluation.every_steps > 0

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding: `model.config.vocab_size`, else that of a trained tokenizer, else None."""
        tokenizer = self.data.tokenizer
        trained = tokenizer.vocab_size if isinstance(tokenizer, TrainedTokenizer) else None
        return self.model.config.get("vocab_size", trained)

    def with_(self, **fields: Any) -> Recipe:
        """Returns a copy with dotted fields replaced: `recipe.with_(**{"parallel.zero_stage": 1})`.

        Raises RecipeError with every field that does not exist or whose value is invalid.
        """
        values = self.model_dump(mode="json")
        problems = [problem for path, value in fields.items() if (problem := _assign(values, path, _plain(value)))]
        if problems:
            raise RecipeError(problems)
        return parse_recipe(values)

    def dotted(self, exclude_defaults: bool = False) -> dict[str, Any]:
        """Returns every value by its dotted field, as `with_` takes them; list items are numbered.

        exclude_defaults: leave out values that equal their defaults.
        """
        return dict(_leaves(self.model_dump(mode="json", exclude_defaults=exclude_defaults)))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted paths and values of nested JSON data; an empty list or object is a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield path, value
    for name, item in items:
        yield from _leaves(item, f"{path}.{name}" if path else str(name))


def parse_recipe(values: dict[str, Any]) -> Recipe:
    """Parses a JSON document into a recipe. Raises RecipeError with all faults at once."""
    try:
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise RecipeError(recipe_problems(error)) from None


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Turns `--set KEY=VALUE` arguments into fields for `Recipe.with_`.

    A value is parsed as JSON if possible (numbers, true, null, lists, objects), and is text otherwise.
    """
    fields: dict[str, Any] = {}
    problems = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            message = f"{shown(assignment)} is not KEY=VALUE"
            problems.append(Problem("set.form", "--set", message, "--set optim.lr=3e-4"))
            continue
        fields[key], fault = _json_or_text(text)
        if fault:
            problems.append(Problem("set.form", short(key), f"{shown(text)} was given: {fault}"))
    if problems:
        raise RecipeError(problems)
    return fields


def _json_or_text(text: str) -> tuple[Any, str | None]:
    """Parses a value of `--set`; returns it and what is wrong with it, or None."""
    try:
        value = json.loads(text)
    except RecursionError:
        return None, TOO_DEEP
    except json.JSONDecodeError:
        value = text
    except ValueError:  # Python refuses to convert a text of that length to an integer
        return None, TOO_LARGE
    return value, json_fault(value)


# A part that a recipe file creates on its own does not know its place in the recipe, but its class does.
_PLACES = {"Source": "data.sources", "TrainedTokenizer": "data.tokenizer", "LoraConfig": "model.adapter"}


def recipe_problems(error: ValidationError) -> list[Problem]:
    """Converts a pydantic error to problems, with the closest name for a field that does not exist."""
    places = _PLACES | {
        part_in(field.annotation).__name__: name
        for name, field in Recipe.model_fields.items()
        if part_in(field.annotation)
    }
    errors = error.errors(include_url=False)
    # For `str | TrainedTokenizer`, an object is meant as the latter; that it is not a string is no useful message.
    meant = [one for one in errors if not (one["loc"][-1:] == ("str",) and isinstance(one["input"], (dict, Part)))]
    return [_problem(details, places.get(error.title, "")) for details in meant or errors]


def _problem(details: Any, place: str) -> Problem:
    location = [str(part) for part in details["loc"] if str(part) not in ("str", "TrainedTokenizer")]
    field = ".".join(filter(None, (place, *location))) or "recipe"
    if details["type"] == "extra_forbidden":
        return _unknown_field(field)
    if details["type"] == "missing":
        return Problem("recipe.missing", field, "is required")
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if details["type"] == "value_error" and isinstance(details["input"], (dict, Part)):
        return Problem("recipe.value", field, message)  # it names the fields of the part that do not fit together
    return Problem("recipe.value", field, f"{shown(details['input'])} was given: {message}")


def _unknown_field(path: str) -> Problem:
    """Reports a field that does not exist, with the closest existing ones.

    These are our name for another tool's field, a name with a similar spelling, and all fields of the part.
    """
    parent, _, name = path.rpartition(".")
    known = _fields_of(parent)
    ours = OURS.get(name) or _only_place_of(name)
    hint = f"; the field for that is '{ours}'" if ours else nearest(name, known)
    names = parent.split(".")
    holders = (".".join(names[:size]) for size in range(min(len(names), 3), 0, -1))
    listing = next((f"fields of {one}: {', '.join(_fields_of(one))}" for one in holders if one and _fields_of(one)), "")
    if not listing:
        listing = f"a field has the form PART.NAME; the parts are {', '.join(Recipe.model_fields)}"
    return Problem("recipe.field", short(path), f"there is no such field{hint}", listing)


def _only_place_of(name: str) -> str | None:
    """Returns the dotted field of a name that exactly one part has, else None."""
    places = [f"{part}.{name}" for part in Recipe.model_fields if name in _fields_of(part)]
    return places[0] if len(places) == 1 else None


def _fields_of(path: str) -> list[str]:
    """Returns the names of the fields of the recipe part at a dotted path; empty if it has none."""
    part: Any = Recipe
    for name in filter(None, path.split(".")):
        if name.isdigit():
            continue
        annotation = part.model_fields[name].annotation if name in getattr(part, "model_fields", {}) else None
        part = part_in(annotation)
    return list(getattr(part, "model_fields", {}))


def part_in(annotation: Any) -> Any:
    """Returns the `Part` within an annotation such as `Sequence[Source]` or `str | TrainedTokenizer`."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation
    return next((found for argument in getattr(annotation, "__args__", ()) if (found := part_in(argument))), None)


def _plain(value: Any) -> Any:
    """Copies a field's value as JSON data, so that an override may also be given as a recipe part.

    It is a copy since a later assignment may change a field within it.
    """
    if isinstance(value, Part):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _assign(values: dict[str, Any], path: str, value: Any) -> Problem | None:
    """Sets `values` at a dotted path.

    `model.config`, `evaluation.sets` and `optim.options` accept any name, other parts only fields.
    """
    *parents, name = path.split(".")
    target: Any = values
    for depth, parent in enumerate(parents):
        if isinstance(target, list):
            target = target[index] if (index := _index(parent, target)) is not None else None
        elif isinstance(target, dict):
            if target.get(parent, 0) is None and _fields_of(".".join(parents[: depth + 1])):
                target[parent] = {}  # an optional part, of which this is the first field
            target = target.get(parent)
        if not isinstance(target, (dict, list)):
            return _unknown_field(".".join(parents[: depth + 1]))
    if isinstance(target, list):
        index = _index(name, target)
        if index is None:
            return Problem("recipe.field", short(path), f"has {len(target)} items, numbered from 0")
        target[index] = value
        return None
    is_open = parents[:2] in (["model", "config"], ["evaluation", "sets"], ["optim", "options"])
    if not is_open and name not in target and name not in _fields_of(".".join(parents)):
        return _unknown_field(path)
    target[name] = value
    return None


def _index(name: str, items: list[Any]) -> int | None:
    """Returns the index of an item from a path component, or None if there is no such item."""
    return next((number for number in range(len(items)) if str(number) == name), None)
