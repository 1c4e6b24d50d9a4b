"""The plan: a recipe on a cluster, every degree and batch number concrete."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem
from llmtrain.plan.weights import Weights
from llmtrain.recipe import Part, Recipe


class Layout(Part):
    """How many devices each kind of parallelism takes; dp × pp × tp × sp = world size."""

    dp: int
    """Data parallel size: replicas that see different samples."""
    pp: int
    """Pipeline stages."""
    tp: int
    """Tensor parallel size."""
    sp: int
    """Sequence parallel size; the ranks of a group see parts of the same samples."""
    ep: int
    """Expert parallel size; its groups lie within data, tensor and sequence parallelism."""
    zero_stage: int
    """ZeRO stage."""


class Batch(Part):
    """The batch triangle: global = micro × accumulation × dp."""

    global_batch_size: int
    """Sequences per optimizer step."""
    micro_batch_size: int
    """Sequences per forward pass on one device."""
    gradient_accumulation_steps: int
    """Forward passes per optimizer step."""
    tokens_per_step: int
    """Tokens read per optimizer step, padding included."""


class StagePlan(Part):
    """A pipeline stage."""

    layers: tuple[int, int]
    """Its first and its last decoder layer, counted from 0."""
    parameters: int
    """Parameters that its ranks hold, embedding and head included; a tied head counts where it is used, too."""
    cost_share: float
    """Its part of the FLOPs of a step, of all stages together; 1 / pp where they are in balance."""


class ModelFacts(Part):
    """What the plan must know of a model, found without building it where that is possible."""

    model_type: str
    """`model_type` of `transformers`."""
    parameters: int
    """Trainable parameters, tied ones once."""
    active_parameters: int
    """Parameters that a token meets; fewer than `parameters` in a mixture of experts."""
    embedding_parameters: int
    """Input embeddings, positions included; looked up, so they cost no FLOPs."""
    largest_parameter: int
    """Elements of the largest single parameter, as the model holds it."""
    layers: int
    """Decoder layers."""
    layer_parameters: tuple[int, ...]
    """Parameters of each decoder layer; empty for a model that is no chain of layers."""
    layer_idle_parameters: tuple[int, ...]
    """Of each decoder layer, the expert parameters that a token does not meet."""
    hidden_size: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    vocab_size: int
    """Rows of the embedding."""
    max_positions: int | None
    """Longest sequence the configuration declares."""
    learned_positions: bool = False
    """Whether positions are a table, which no sequence may run past."""
    rotary_follows: tuple[str, int] | None = None
    """Rotary type whose frequencies follow the longest position of a batch, and the length up to which they do not."""
    experts: int = 0
    """Experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Experts that a token meets in a layer; 0 for a dense model, and where the configuration does not say."""
    expert_modules: bool = False
    """Whether each expert is a module of its own: one that no token meets has no gradient then."""
    without_gradient: tuple[str, ...] = ()
    """Trained parameters that the loss does not depend on, as far as a model's own code shows it."""
    tied_embeddings: bool
    """Whether embedding and head share one weight."""
    weights: Weights | None = None
    """The parameters one by one; None for a model that is no chain of layers."""
    source: str
    """`arithmetic` or `meta device`."""


class KernelChoice(Part):
    """What the kernels that a recipe leaves open (`auto`) are in a run, and what that was learned from."""

    key: str
    """Of the device, the packages and the shapes that it was found for (`llmtrain.tune.choice.key_of_run`)."""
    device: str
    """That it was found on."""
    why: str
    """Where it comes from: a measurement, or the rules, and why these."""
    values: dict[str, str | int]
    """Dotted fields of the recipe and what they are; those that are not here are as the rules have them."""
    milliseconds: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Of each measured field each value's forward and backward pass of a micro-batch through a few layers. A field that
    is not among the values was measured for people to know."""
    failed: dict[str, str] = Field(default_factory=dict)
    """FIELD=VALUE and why it could not be measured."""


class Plan(Part):
    """Recipe × cluster, resolved. Everything that a worker and a launcher need."""

    recipe: Recipe
    cluster: Cluster
    layout: Layout
    batch: Batch
    model: ModelFacts
    stages: tuple[StagePlan, ...] = Field(default=())
    """The stages of a pipeline; empty without one."""
    flops_per_token: float
    """Model FLOPs of forward and backward per token, without recomputation: 6·N + 12·L·d·T."""
    notes: tuple[dict[str, str], ...] = Field(default=())
    """What is legal but worth knowing, as `Problem` dictionaries."""
    kernels: KernelChoice | None = None
    """The kernels of a run whose recipe leaves some open; None until it has started."""

    @property
    def workers(self) -> int:
        """Processes: one for each device, but a single one where `nn.DataParallel` drives them all."""
        return 1 if self.recipe.parallel.strategy == "data_parallel" else self.cluster.world_size

    @property
    def readers(self) -> int:
        """Replicas, or groups of them in one process, that read samples of their own."""
        return self.layout.dp * self.workers // self.cluster.world_size

    @property
    def read_size(self) -> int:
        """Sequences that a process reads per forward pass: the micro-batches of its devices, joined."""
        return self.batch.micro_batch_size * self.layout.dp // self.readers

    def summary(self) -> dict[str, Any]:
        """The plan as `llmtrain plan --json` prints it, without the engine's configuration."""
        return {
            "legal": True,
            "recipe": self.recipe.name,
            "cluster": self.cluster.model_dump(),
            "backend": self.recipe.parallel.backend,
            "strategy": self.recipe.parallel.strategy,
            "workers": self.workers,
            "layout": self.layout.model_dump() | self._stages(),
            "batch": self.batch.model_dump(),
            "model": self.model.model_dump(exclude={"weights"}),
            "flops_per_token": self.flops_per_token,
            "notes": list(self.notes),
        }

    def _stages(self) -> dict[str, Any]:
        return {"stages": [stage.model_dump(mode="json") for stage in self.stages]} if self.stages else {}


def note(problem: Problem) -> dict[str, str]:
    """A problem that does not stop a run, as it is kept in a plan."""
    return problem.as_dict()
