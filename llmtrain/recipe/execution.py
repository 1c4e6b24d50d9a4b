"""How a training runs: on which devices, with which kernels, and what it evaluates, saves, logs and watches."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, Tag, model_validator

from llmtrain.recipe.own_code import NAME, NamedPath, NameOrPath, ObjectPath
from llmtrain.recipe.parts import Many, NonNegativeFloat, NonNegativeInt, Part, PositiveFloat, PositiveInt
from llmtrain.recipe.training import MetricName, Source

MAX_WINDOW_STEPS = 65_536
"""Steps for which statistics are kept: they are stored on each device, and read by the host every few steps."""
Precision = Literal["fp32", "bf16", "fp16", "autocast_bf16", "autocast_fp16"]
OffloadDevice = Literal["none", "cpu", "nvme"]


class ParallelConfig(Part):
    """How the work is split over devices. Data parallelism uses the remaining devices."""

    backend: Literal["deepspeed", "accelerate", "horovod", "data_parallel"] = "deepspeed"
    """What runs the step. `data_parallel` is `torch.nn.DataParallel`: one process for all devices of one machine."""
    accelerate: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """What Accelerate runs: DistributedDataParallel, FSDP2 (`torch.distributed.fsdp.fully_shard`) or DeepSpeed."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """Shards optimizer states (1), gradients (2) and parameters (3) over data parallel ranks (arXiv 1910.02054). `ddp`
    shards nothing: 0. `fsdp2` always stores shards, and gathers a layer's parameters for each pass (3), or once for
    both passes (2)."""
    hierarchical_partition: PositiveInt = 1
    """Size of the groups of neighbouring ranks, usually those of a node, that keep a second copy of all ZeRO-3
    parameters. After the first gather of a step, parameters are only gathered within a group (hpZ, arXiv
    2306.10209)."""
    pipeline: PositiveInt = 1
    """Number of devices over which the layers of the model are distributed."""
    pipeline_schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the passes in a pipeline. `1f1b` alternates forward and backward passes; `interleaved` does so with
    several stages on each device, with less waiting but more communication (arXiv 2104.04473); `zero_bubble` also
    delays the gradients of weights until a device would be idle (arXiv 2405.15362)."""
    pipeline_chunks: PositiveInt = 1
    """Number of stages on each device of a pipeline: 1 for `1f1b`, 2 or more for `interleaved`, an even number for
    `zero_bubble`."""
    tensor: PositiveInt = 1
    """Number of devices over which each matrix is divided and, if the model allows it, also the tokens between
    attention and feed-forward."""
    sequence: PositiveInt = 1
    """Number of devices over which each sequence is divided (Ulysses, arXiv 2309.14509)."""
    sequence_ring: PositiveInt | None = None
    """Number of groups among the `sequence` devices that pass keys and values around a ring (arXiv 2310.01889), instead
    of dividing the heads, which the devices of a group do. Default: the smallest one with which the heads can be
    divided; 1 if `sequence` divides them."""
    expert: PositiveInt = 1
    """Number of devices over which the experts of a layer are distributed."""
    precision: Precision = "fp32"
    """`bf16` and `fp16` keep fp32 master weights; `autocast_*` keeps fp32 weights and casts within the operations."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type in which gradients are accumulated over micro-batches."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes, so that it is not kept. `selective` keeps the input of each layer and the
    results of its matrix products and of attention, and recomputes norms, rotations and activation functions. `full`
    keeps only the input, and recomputes the whole layer."""
    checkpoint_every: PositiveInt = 1
    """Applies `activation_checkpointing` only to every k-th layer, beginning with the first; the other layers keep
    everything."""
    offload_activations: bool = False
    """Keeps the inputs of fully recomputed layers in pinned host memory, and copies them while other layers compute."""
    tiled_mlp: bool = False
    """Computes feed-forward layers in tiles of as many tokens as the model is wide, and recomputes them in the backward
    pass (ALST, arXiv 2506.13996). Useful for sequences that are much longer than a tile."""
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


class EvalConfig(Part):
    """When and on which data the loss is evaluated."""

    every_steps: NonNegativeInt = 0
    """Steps between evaluations; the run also evaluates at its end. 0: never."""
    at_start: bool | None = None
    """Also evaluate before the first step. Default: only if training starts from pretrained weights."""
    sources: Many[Source] = ()
    """Evaluation data, instead of held-out documents of `data.sources`. A source must not have a `weight`, because an
    evaluation reads all data."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Annotated[Many[Source], Field(min_length=1)]] = (
        Field(default_factory=dict)
    )
    """Additional evaluation sets by name, each with its own sources, loss, perplexity and bits per byte."""
    max_sequences: PositiveInt | None = None
    """Largest number of evaluation sequences, taken evenly from all sources; it also applies to each of `sets`.
    Default: all."""
    metrics: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ObjectPath] = Field(default_factory=dict)
    """Metrics of your own by name: functions, `{"accuracy": "mine:accuracy"}`. A function gets the logits of some
    target tokens [tokens, vocabulary] in fp32, and the labels of these tokens [tokens]. It returns a sum and a count;
    the metric is the sum of the sums over the sum of the counts, of all tokens of a set."""

    @property
    def all_sources(self) -> dict[str, Source]:
        """The sources of all sets, by their fields."""
        groups = {
            "evaluation.sources": self.sources,
            **{f"evaluation.sets.{name}": source for name, source in self.sets.items()},
        }
        return {f"{field}.{number}": source for field, group in groups.items() for number, source in enumerate(group)}


class SamplesConfig(Part):
    """Texts that the model generates during training, for the log, the trackers and `samples.jsonl`."""

    every_steps: NonNegativeInt = 0
    """Steps between samples; the run also generates samples at its end. 0: never."""
    prompts: Many[Annotated[str, Field(min_length=1)]] = ()
    """Texts to continue. If the training data are conversations, each prompt is a user's question."""
    tokens: PositiveInt = 48
    """Largest number of tokens of a continuation. Prompt and continuation together have at most `data.sequence_length`
    tokens. Each token takes a forward pass of a micro-batch."""
    temperature: NonNegativeFloat = 0.0
    """0: always the most likely token. Otherwise one of the 50 most likely tokens is drawn, with the same random
    numbers at each step."""


class TasksConfig(Part):
    """Downstream tasks of lm-evaluation-harness. A separate process scores them and writes the scores to `eval/`."""

    names: Many[Annotated[str, Field(min_length=1)]] = ()
    """Names of the tasks. They are scored at the end of the run."""
    every_steps: NonNegativeInt = 0
    """Also score the checkpoints of steps that are multiples of this, except for those that are written while another
    one is scored. 0: only at the end."""
    include_path: str | None = None
    """Folder with your own tasks, as YAML files."""
    limit: PositiveInt | None = None
    """Largest number of documents of a task. Default: all."""


class CallbackConfig(Part):
    """Code of your own that the run calls between its steps. A recipe may give the `object` alone."""

    object: ObjectPath
    """A class, or an object that a module defines, with methods of `llmtrain.Callback`: `mine:EveryThousand`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments with which the class is called."""
    ranks: Literal["main", "all"] = "main"
    """Whether only rank 0 has the callback, or every rank has one."""
    on_error: Literal["stop", "count"] = "stop"
    """What an exception does. `stop`: ends the run (exit code 5). `count`: the run goes on, prints the error and counts
    it in the metric `callback_errors`."""
    changes_gradients: bool = False
    """Whether it changes gradients, in `on_gradients`. This needs `ranks="all"` and `on_error="stop"`."""

    @model_validator(mode="after")
    def _check_gradients(self) -> Self:
        if self.changes_gradients and (self.ranks != "all" or self.on_error != "stop"):
            raise ValueError("changes_gradients needs ranks='all' and on_error='stop': all ranks change them alike")
        return self

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"object": value} if isinstance(value, str) or callable(value) else value


class _OrPath:
    """Adds to the JSON schema of `CallbackConfig`, for editors, that a path alone is one."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


CallbackOrPath = Annotated[CallbackConfig, _OrPath()]


class CheckpointConfig(Part):
    """When to save checkpoints, and which to keep."""

    every_steps: NonNegativeInt = 0
    """Steps between checkpoints; the run also saves one at its end. 0: only at the end."""
    keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep; default: all."""
    keep_every_steps: PositiveInt | None = None
    """In addition to `keep_last`, keep the checkpoints of steps that are multiples of this."""
    keep_best: PositiveInt | None = None
    """In addition to `keep_last`, keep this many of the best checkpoints. Only those can be among them whose weights
    were evaluated after the same step."""
    best_metric: MetricName = "eval_loss"
    """The metric of an evaluation by which checkpoints are compared: `eval_loss`, `perplexity` or another one of its
    line in `metrics.jsonl`; `eval_loss_by_set/NAME` for a set of `evaluation.sets`, `eval_loss_by_source/NAME` for a
    source; or one that a callback adds."""
    best_mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value is the best."""
    background: bool = True
    """Copy the state to host memory, and write the copy while training continues. Needs as much host memory as the
    rank's part of a checkpoint."""


class GuardConfig(Part):
    """Which updates are skipped, and what happens after too many of them.

    A loss or a gradient norm that is not finite never affects the weights.
    """

    spike_sigma: Annotated[float, Field(ge=0)] = 6.0
    """Skip an update if the loss or the gradient norm before clipping is a spike: its logarithm is more than this many
    standard deviations above the mean of the logarithms of the last `window_steps` applied updates. Before there are
    that many, nothing is a spike. The standard deviation counts as at least 0.001. 0: only skip what is not finite."""
    spike_norm_ratio: Annotated[float, Field(ge=1)] = 8.0
    """A gradient norm is only a spike if it is also more than this many times the geometric mean of these updates,
    because norms of healthy runs with small batches occasionally exceed their usual size by far. 1: only `spike_sigma`
    decides."""
    window_steps: Annotated[int, Field(ge=2, le=MAX_WINDOW_STEPS)] = 128
    """Number of updates over which mean and deviation are computed, and number of steps in which skipped updates are
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
    """Largest number of rollbacks; after these, the run stops instead."""

    def looks_after(self, step: int) -> bool:
        """Whether the run checks for too many skipped updates after a step."""
        return step % min(self.every_steps, self.window_steps) == 0


class KernelsConfig(Part):
    """Which kernels compute the model. `auto`: the fastest ones measured on the device."""

    blocks: Literal["auto", "eager", "compiled", "liger"] = "auto"
    """The decoder layers. `eager`: those of `transformers`; `compiled`: each compiled by `torch.compile`; `liger`:
    Liger's kernels for norms, rotary positions and SwiGLU. `auto` without a measurement: eager."""
    loss: Literal["auto", "whole", "chunked", "compiled", "liger"] = "auto"
    """`whole`: computes all logits of a micro-batch at once; `chunked`: computes those of 1,024 tokens at a time, so
    only these need memory; `compiled`: the same with `torch.compile`, or with a kernel in C++ on CPUs; `liger`: Liger's
    fused loss. `auto` without a measurement: chunked if the logits are large and nothing prevents it."""
    fp8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Computes the layers' matrix products in fp8 with torchao, with one scale per tensor or row. Results differ from
    bf16. Refused if it is slower."""
    matmul: Literal["auto", "torch", "onednn"] = "auto"
    """Matrix products in fp32 on a CPU. `torch`: torch's own, usually MKL's, which use AVX-512 on Intel's processors
    only; `onednn`: those of oneDNN. `auto` without a measurement: `onednn` on other processors with AVX-512."""
    threads: Literal["auto"] | PositiveInt = "auto"
    """Number of CPU threads of a rank. `auto` without a measurement: torch's choice, one per core of the rank."""

    @model_validator(mode="before")
    @classmethod
    def _all_auto(cls, fields: Any) -> Any:
        return {} if fields == "auto" else fields


TrackerName = Annotated[Literal["tensorboard", "wandb", "mlflow"], Tag(NAME)]


class LoggingConfig(Part):
    """What is logged during training."""

    every_steps: PositiveInt = 10
    """Steps between lines in `metrics.jsonl`."""
    trackers: Many[Annotated[TrackerName | NamedPath, NameOrPath]] = ("tensorboard",)
    """Trackers in addition to `metrics.jsonl`: names, or classes of your own, `"mine:CsvTracker"`. A class is called
    with the run directory, the recipe and the step after which the run starts. Rank 0 calls its method `log(values,
    step)` for each line, and, if it has them, `start()`, `store_init_configuration(fields)` with the recipe's fields
    when the run is new, and `finish()`."""
    price_per_device_hour: PositiveFloat | None = None
    """Price of a device per hour, in any currency. If set, the run reports its cost so far and the predicted total."""
    project: str = "llmtrain"
    """Project (W&B) or experiment (MLflow) of the run."""


class WatchdogConfig(Part):
    """When a hanging run is ended (exit code 5), and when a rank is reported as slow."""

    min_seconds: NonNegativeFloat = 60.0
    """A run is ended if no step finishes within this many seconds, or within the time of `factor` steps if that is
    longer. 0: never."""
    factor: NonNegativeFloat = 10.0
    """Multiple of the 99th percentile of the last 1,000 steps' times."""
    phase_seconds: NonNegativeFloat = 1800.0
    """The limit in seconds for a save, a batch of an evaluation, a token of the samples, and each of the first two
    steps, which compile. 0: no limit."""
    straggler_ratio: NonNegativeFloat = 1.5
    """Report a rank whose own work takes this many times as long as that of the median rank. 0: never."""


class ProfileConfig(Part):
    """Steps that torch's profiler records, and writes to `profile/` in the run directory."""

    steps: NonNegativeInt = 0
    """Number of steps to record. 0: none."""
    after_step: NonNegativeInt = 10
    """Recording begins with the step after this one; the first steps of a run compile and allocate."""
    ranks: Many[NonNegativeInt] = (0,)
    """Ranks to record."""
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
