"""Liger's kernels (arXiv 2410.10989) in the layers of one model, and its fused loss behind one head."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.errors import Problem, RecipeError
from llmtrain.models.chunked import LAYERS, ChunkedLoss, NoChunksError
from llmtrain.models.compare import Comparison
from llmtrain.models.cut import STUMBLES, reference
from llmtrain.models.liger_patches import NoKernelsError, liger_patches
from llmtrain.models.loss import IGNORE
from llmtrain.models.tiny import shrink

PACKAGES = ("liger_kernel", "triton")
INSTALL = "pip install llmtrain[liger]"
TOLERANCE = 1e-4
"""Largest deviation in fp32 of a loss, and of a gradient relative to the largest.

Triton's exponentials and roots are off by some units of 2⁻²³, where torch's are by half a one, and what follows divides
by them: through four layers some 10⁻⁵ at worst (on a CPU, interpreted, 7·10⁻⁷ was seen). Another epsilon, activation or
rotation shows at 10⁻³ and more.
"""


def unavailable(device: torch.device) -> str:
    """Why Liger's kernels cannot run on a device; empty where they can. Triton's interpreter takes any."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        return f"not installed: {' and '.join(missing)} ({INSTALL})"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton, which they are written in, compiles for GPUs, and this is a {device.type}"
    return ""


def use_blocks(model: PreTrainedModel) -> None:
    """Has the layers of a model, whole or a stage's, run Liger's norms, rotations and gated activations.

    Parameters and their names stay. Raises NoKernelsError for a family that Liger does not know.
    """
    modules = dict(model.named_modules())
    for name, patch in liger_patches(model.config).items():
        if name in modules:
            patch.apply(modules[name])


def check_blocks(config: PreTrainedConfig, device: torch.device) -> None:
    """Compares a tiny copy with Liger's kernels to the plain one, in fp32.

    Raises RecipeError where they deviate, Liger does not know the family, or its kernels cannot run on the device.
    """

    def deviation(model: PreTrainedModel) -> float:
        comparison = Comparison(model, model.config)
        use_blocks(model)
        return comparison.deviation()

    _check(config, device, "kernels.blocks", "eager", deviation)


def check_loss(config: PreTrainedConfig, device: torch.device) -> None:
    """As `check_blocks`, of the fused loss: it must know all that the family does behind its head."""

    def deviation(model: PreTrainedModel) -> float:
        comparison = Comparison(model, model.config)
        LigerLoss(model)
        return comparison.deviation(takes_targets=True)

    _check(config, device, "kernels.loss", "chunked", deviation)


def _check(
    config: PreTrainedConfig,
    device: torch.device,
    field: str,
    instead: str,
    deviation_of: Callable[[PreTrainedModel], float],
) -> None:
    def refused(why: str) -> RecipeError:
        return RecipeError(Problem("kernels.liger", field, f"liger was given, but {why}", f"--set {field}={instead}"))

    if why := unavailable(device):
        raise refused(f"its kernels cannot run: {why}")
    family = config.model_type
    try:
        with torch.random.fork_rng(devices=[]):  # drawn on the CPU
            deviation = deviation_of(reference(shrink(config, LAYERS), "eager").to(device))
    except (*STUMBLES, NoKernelsError, NoChunksError, StrictDataclassError) as error:
        raise refused(f"{family} does not run so ({type(error).__name__}: {error})") from error
    if deviation > TOLERANCE:
        raise refused(f"the loss or gradients of {family} would deviate by {deviation:.0e}")


@dataclass
class LigerLoss(ChunkedLoss):
    """The loss by Liger's fused product and cross-entropy, which takes the gradients of some tokens at a time.

    Raises NoChunksError where the head is no linear layer.
    """

    tokens: int = field(default=0, init=False)
    """Liger's to choose: as many as make the logits as large as the hidden states."""
    recomputed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise NoChunksError(f"the head of {self.model.config.model_type} is no linear layer")
        self._linear = head
        text = self.model.config.get_text_config(decoder=True)
        self._cap: float | None = getattr(text, "final_logit_softcapping", None)
        super().__post_init__()

    def loss_sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropies.

        hidden: [batch, T, width], what the backbone returned; targets: [batch, T].
        """
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss: Tensor = liger_fused_linear_cross_entropy(
            hidden.reshape(-1, hidden.size(-1)),
            self._linear.weight,
            targets.reshape(-1),
            bias=self._linear.bias,
            ignore_index=IGNORE,
            reduction="sum",
            softcap=self._cap,
            # A sum over parts in a lower type would round where one product over all tokens does not.
            accum_dtype=torch.float32,
        )
        return loss
