"""Uses Liger's kernels (arXiv 2410.10989) in the layers of one model, and its fused loss after its head."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pkgutil import resolve_name
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data import NO_TARGET
from llmtrain.errors import Problem, RecipeError
from llmtrain.models.chunked import ChunkedLoss, NoChunksError, Observe
from llmtrain.models.tiny.compare import deviation_of
from llmtrain.models.tiny.model import COPY_ERRORS
from llmtrain.overrides.transformers import call_instead
from llmtrain.plan.kernels import CHUNK_TOKENS

PACKAGES = ("liger_kernel", "triton")
INSTALL = "pip install llmtrain[liger]"
TOLERANCE = 1e-4
"""Largest allowed deviation, in fp32, of a loss, and of a gradient relative to the largest gradient.

Triton's exponentials and roots are off by some units of 2⁻²³, torch's by half a unit, and later operations divide by
them. Through four layers this amounts to some 10⁻⁵ at worst (7·10⁻⁷ was observed on a CPU, in the interpreter). A
different epsilon, activation or rotation causes deviations of 10⁻³ and more.
"""


def liger_unavailable(device: torch.device) -> str:
    """Returns why Liger cannot be used on a device; empty if it can.

    Triton's interpreter runs on any device.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        return f"it needs {' and '.join(missing)} ({INSTALL})"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels are written in Triton, which compiles for GPUs, and this is a {device.type}"
    return ""


class NoKernelsError(Exception):
    """Liger has no kernels for the family."""


PLUS_ONE = {"offset": 1.0, "casting_mode": "gemma", "in_place": False, "row_mode": None}
"""Attributes that `LigerRMSNorm.forward` reads, for a norm that multiplies by 1 + its weight."""
AS_IS = {"offset": 0.0, "casting_mode": "llama", "in_place": True, "row_mode": None}
"""The same for a norm that multiplies by its weight. in_place: the input's gradient overwrites the output's."""
AS_IS_BETWEEN = AS_IS | {"in_place": False}
"""The same if something else still reads the gradient of the output, such as a residual connection."""
ROTATION = ("apply_rotary_pos_emb", "rope:liger_rotary_pos_emb")
"""The function that an attention layer calls, and its replacement."""


@dataclass(frozen=True)
class Kernels:
    """The kernels for a family's layers, by their names in `liger_kernel.transformers`."""

    mlp: str | None = "swiglu:LigerSwiGLUMLP"
    """Class whose forward pass replaces that of the MLPs."""
    norm: Mapping[str, Any] | None = None
    plain: tuple[str, ...] = ()
    """Names of norms that are not replaced."""
    rotation: tuple[str, str] | None = ROTATION
    activation: str | None = None
    """Class that replaces the activation function of the MLPs."""


SWIGLU = Kernels(norm=AS_IS)
QUERY_KEY = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
GEGLU = "geglu:LigerGEGLUMLP"
MOE_SWIGLU = "swiglu:LigerQwen3MoeSwiGLUMLP"
JOINED_SWIGLU = "swiglu:LigerPhi3SwiGLUMLP"
FAMILIES = {
    **dict.fromkeys(("granite", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3"), SWIGLU),
    # Experts are not replaced: `transformers` runs all of them in grouped products.
    **dict.fromkeys(("mixtral", "qwen3_moe"), Kernels(mlp=None, norm=AS_IS)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Kernels(MOE_SWIGLU, AS_IS, rotation=None)),
    "deepseek_v4": Kernels(mlp=None, norm=AS_IS, plain=("q_a_norm", "kv_norm"), rotation=None),
    "exaone4": Kernels(norm=AS_IS_BETWEEN),
    "falcon_h1": Kernels("swiglu:LigerFalconH1SwiGLUMLP", AS_IS),
    "gemma": Kernels(GEGLU, PLUS_ONE | {"in_place": True}),
    **dict.fromkeys(("gemma2", "gemma3_text"), Kernels(GEGLU, PLUS_ONE)),
    "gemma4_text": Kernels(
        GEGLU,
        PLUS_ONE | {"offset": 0.0},
        plain=("post_per_layer_input_norm", "per_layer_projection_norm"),
        rotation=None,
    ),
    "glm4": Kernels(JOINED_SWIGLU, AS_IS_BETWEEN, rotation=None),
    "gpt_oss": Kernels(None, AS_IS, rotation=("apply_rotary_pos_emb", "rope:liger_rotary_pos_emb_gpt_oss")),
    "hunyuan_v1_dense": Kernels("swiglu:LigerHunyuanV1SwiGLUMLP", AS_IS, plain=QUERY_KEY),
    "hunyuan_v1_moe": Kernels(None, AS_IS, plain=QUERY_KEY),
    "llama4_text": Kernels(norm=AS_IS, rotation=("apply_rotary_emb", "llama4_rope:liger_llama4_text_rotary_pos_emb")),
    "nemotron": Kernels(None, None, rotation=None, activation="relu_squared:LigerReLUSquared"),
    **dict.fromkeys(("olmo2", "olmo3"), Kernels(norm=AS_IS_BETWEEN, plain=QUERY_KEY)),
    "phi3": Kernels(JOINED_SWIGLU, AS_IS),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), Kernels(MOE_SWIGLU, PLUS_ONE, rotation=None)),
}
"""Family → its kernels. Liger's own functions would change the family for the whole process, and they fail on pipeline
stages, where layers are missing."""


def use_liger_layers(model: PreTrainedModel) -> None:
    """Replaces the norms, rotations and gated activations in the layers of a model, or of a stage, by Liger's.

    Keeps the parameters and their names. Skips modules whose forward pass has been replaced already. Raises
    NoKernelsError for a family that Liger does not support.
    """
    kernels = FAMILIES.get(model.config.model_type)
    if kernels is None:
        raise NoKernelsError("Liger has no kernels for it")
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if "forward" in vars(module):
            continue
        if kernels.norm and kind.endswith("RMSNorm") and name.rpartition(".")[2] not in kernels.plain:
            _use_norm(module, kernels.norm)
        elif kernels.mlp and kind.endswith("MLP"):
            vars(module)["forward"] = MethodType(_import_liger(kernels.mlp).forward, module)
        elif kernels.activation and kind.endswith("MLP"):
            module.act_fn = _import_liger(kernels.activation)()
        elif kernels.rotation and kind.endswith("Attention"):
            name, kernel = kernels.rotation
            call_instead(module, name, _import_liger(kernel))


def _import_liger(name: str) -> Any:
    return resolve_name(f"liger_kernel.transformers.{name}")


def _use_norm(module: nn.Module, read: Mapping[str, Any]) -> None:
    if getattr(module, "weight", None) is None:  # Liger's kernel multiplies by it
        return
    epsilon = getattr(module, "variance_epsilon", None) or module.eps
    forward = MethodType(_import_liger("rms_norm:LigerRMSNorm").forward, module)
    vars(module).update(read, variance_epsilon=epsilon, forward=forward)


def check_blocks(config: PreTrainedConfig, device: torch.device) -> None:
    """Compares a tiny copy that uses Liger's kernels with the plain one, in fp32.

    Raises RecipeError if they deviate, if Liger does not support the family, or if its kernels cannot run on `device`.
    """
    _check(config, device, "kernels.blocks", "eager", use_liger_layers)


def check_loss(config: PreTrainedConfig, device: torch.device) -> None:
    """Does the same as `check_blocks` for the fused loss, which must do all that the family does after its head."""
    _check(config, device, "kernels.loss", "chunked", LigerLoss, takes_targets=True)


def _check(
    config: PreTrainedConfig,
    device: torch.device,
    field: str,
    instead: str,
    change: Callable[[PreTrainedModel], object],
    takes_targets: bool = False,
) -> None:
    def refused(why: str) -> RecipeError:
        return RecipeError(
            Problem("kernels.liger", field, f"'liger' cannot be used: {why}", f"--set {field}={instead}")
        )

    if why := liger_unavailable(device):
        raise refused(why)
    family = config.model_type
    try:
        deviation = deviation_of(change, config, device, takes_targets)
    except (*COPY_ERRORS, NoKernelsError, NoChunksError) as error:
        raise refused(f"{family} does not run with its kernels ({type(error).__name__}: {error})") from error
    if deviation > TOLERANCE:
        raise refused(f"the loss or gradients of {family} would deviate by {deviation:.0e}")


@dataclass
class LigerLoss(ChunkedLoss):
    """Computes the loss with Liger's fused product and cross-entropy, which computes gradients for a chunk at a time.

    Raises NoChunksError if the head is not a linear layer.
    """

    tokens: int = field(default=0, init=False)
    """Zero, because Liger chooses the chunk size, for which the logits are as large as the hidden states. Its kernel
    does not return them, so where they are observed, the loss is that of `ChunkedLoss`."""
    recomputed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise NoChunksError(f"the head of {self.model.config.model_type} is not a linear layer")
        self._linear = head
        text = self.model.config.get_text_config(decoder=True)
        self._cap: float | None = getattr(text, "final_logit_softcapping", None)
        super().__post_init__()

    def loss_sum(self, hidden: Tensor, targets: Tensor, *values: Tensor) -> Tensor:
        """Returns the sum of the cross-entropies.

        hidden: [batch, T, width], the output of the backbone; targets: [batch, T].
        """
        if self.tokens:
            return super().loss_sum(hidden, targets, *values)
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss: Tensor = liger_fused_linear_cross_entropy(
            hidden.reshape(-1, hidden.size(-1)),
            self._linear.weight,
            targets.reshape(-1),
            bias=self._linear.bias,
            ignore_index=NO_TARGET,
            reduction="sum",
            softcap=self._cap,
            # A sum over chunks in a lower precision would round where a single product over all tokens does not.
            accum_dtype=torch.float32,
        )
        return loss

    @contextmanager
    def observed_by(self, observe: Observe) -> Iterator[None]:
        """As for `ChunkedLoss`."""
        self.tokens = CHUNK_TOKENS
        try:
            with super().observed_by(observe):
                yield
        finally:
            self.tokens = 0
