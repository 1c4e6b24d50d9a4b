"""The assumptions of a predicted step time beyond the datasheets: one table, every figure with its reason.

They are from publications. `docs/guides/time.md` says how far the predictions are from published runs, and from the
steps of one GPU.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmtrain.recipe import KernelsConfig, Part, PositiveFloat

Share = Annotated[float, Field(gt=0, le=1)]


class Efficiency(Part):
    """Shares of a device's peak that computation reaches."""

    matmul: Share
    """The share that the matrix products of a layer reach."""
    attention: Share
    """The share that a fused attention kernel reaches."""


EFFICIENCY = {
    "a100": Efficiency(matmul=0.75, attention=0.55),
    "h100": Efficiency(matmul=0.62, attention=0.3),
    "h200": Efficiency(matmul=0.62, attention=0.3),
    "b200": Efficiency(matmul=0.62, attention=0.3),
    "mi300x": Efficiency(matmul=0.45, attention=0.25),
}
"""By device. An A100 keeps its clock in large products; newer devices reach their power limit first: the best product
that anyone reaches on an H100 is about 790 of 989 TFLOP/s, and a training step stays below that throughout.
FlashAttention 2 reaches up to 70% on an A100 and 35 to 40% on an H100 (arXiv 2407.08608), less in the backward pass.
The values of the B200 and the MI300X are guesses, based on the H100's and on published products of 600 of 1307
TFLOP/s."""
DEFAULT_EFFICIENCY = Efficiency(matmul=0.6, attention=0.3)
"""The shares for a device that is not listed."""


class Assumptions(Part):
    """The costs of kernels other than matrix products, and of links and hosts."""

    attention_eager: Share = 0.1
    """Share of the device's peak that attention reaches if it writes its scores to memory."""
    memory: Share = 0.8
    """Share of the memory bandwidth that is reached by kernels that only read and write."""
    link: Share = 0.8
    """Share of a link's bandwidth that large NCCL messages reach: 360 to 370 of 450 GB/s within an H100's node."""
    overlap: Share = 0.8
    """Share of the computation that can hide communication, if the engine overlaps the two at all."""
    residual_passes: PositiveFloat = 44.0
    """Elements that the eager kernels of `transformers` read or write per token and layer in the forward pass outside
    attention and feed-forward, in units of the model's width: two norms in fp32 (2 × 19) and the residual sums (2 × 3).
    """
    end_passes: PositiveFloat = 26.0
    """The same for those inputs and outputs of the matrix products that have the model's width."""
    width_passes: PositiveFloat = 2.5
    """The same for activation, gate and rotary positions, in units of the sum of the widths of all matrix products."""
    logit_bytes: PositiveFloat = 32.0
    """Bytes read or written per logit, forward and backward, by a loss in fp32."""
    layer_kernels: PositiveFloat = 60.0
    """Kernels of a layer's forward pass."""
    launch_s: PositiveFloat = 1e-5
    """Seconds that a host takes to launch a kernel."""
    node_latency_s: PositiveFloat = 15e-6
    """Latency of a message within a node, in seconds."""
    network_latency_s: PositiveFloat = 25e-6
    """Latency of a message between nodes, in seconds, for each doubling of their number."""
    host_update_bandwidth: PositiveFloat = 30e9
    """Bytes per second and device at which a host updates offloaded optimizer states: eight devices share about 240
    GB/s of a host's memory."""
    nvme_bandwidth: PositiveFloat = 1.5e9
    """Bytes per second and device of local disks: eight devices share four disks of 3 GB/s."""


EAGER = Assumptions()
"""The unchanged kernels of `transformers`."""
FUSED_LAYERS = {"residual_passes": 8.0, "end_passes": 12.0, "width_passes": 1.5, "layer_kernels": 10.0}
FUSED_LOSS = {"logit_bytes": 16.0}
FUSED = Assumptions(**FUSED_LAYERS, **FUSED_LOSS)
"""Compiled or hand-fused kernels, as in most of the published runs that the model is compared with."""


def assumed_of(kernels: KernelsConfig) -> Assumptions:
    """Returns the assumptions for the kernels that a recipe names."""
    fused = ("compiled", "liger")
    layers = FUSED_LAYERS if kernels.blocks in fused else {}
    return Assumptions(**layers, **(FUSED_LOSS if kernels.loss in fused else {}))
