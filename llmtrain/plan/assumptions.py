"""What a prediction of step time assumes beside the datasheets: one table, every figure with its reason.

None of these was measured here. `docs/guides/time.md` says how far the predictions lie from published runs.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmtrain.recipe import Part, PositiveFloat

Share = Annotated[float, Field(gt=0, le=1)]


class Reached(Part):
    """Shares of a device's peak that computation reaches."""

    matmul: Share
    """By the matrix products of a layer."""
    attention: Share
    """By a fused attention kernel."""


REACHED = {
    "a100": Reached(matmul=0.75, attention=0.55),
    "h100": Reached(matmul=0.62, attention=0.3),
    "h200": Reached(matmul=0.62, attention=0.3),
    "b200": Reached(matmul=0.62, attention=0.3),
    "mi300x": Reached(matmul=0.45, attention=0.25),
}
"""By device. An A100 keeps its clock in large products; newer devices reach their power limit first: the best product
that anyone reaches on an H100 is about 790 of 989 TFLOP/s, and a training step stays below that throughout.
FlashAttention 2 reaches up to 70% on an A100 and 35 to 40% on an H100 (arXiv 2407.08608), less backward. The B200's and
the MI300X's are guesses, by the H100's and by published products of 600 of 1307 TFLOP/s."""
REACHED_ELSEWHERE = Reached(matmul=0.6, attention=0.3)
"""By a device that is not listed."""


class Assumptions(Part):
    """What kernels cost beside matrix products, and what links and hosts do."""

    attention_eager: Share = 0.1
    """Of the device's peak, by attention that writes its scores to memory."""
    memory: Share = 0.8
    """Of the memory bandwidth, by kernels that do nothing but read and write."""
    link: Share = 0.8
    """Of a link's bandwidth, by the large messages of NCCL: 360 to 370 of 450 GB/s within an H100's node."""
    overlap: Share = 0.8
    """Of the computation, what communication can hide behind, where the engine overlaps the two at all."""
    residual_passes: PositiveFloat = 70.0
    """Elements read or written per token and layer, in units of the model's width, by what is not a matrix product of
    the eager kernels of `transformers`, forward: two norms in fp32 (2 × 19), the residual sums (2 × 3), and reading
    and writing the ends of the products."""
    width_passes: PositiveFloat = 2.5
    """The same in units of the widths of all matrix products together: activation, product of the gate, rotary."""
    logit_bytes: PositiveFloat = 32.0
    """Bytes read or written per logit, forward and backward, by a loss in fp32."""
    kernel_floor_s: PositiveFloat = 6e-4
    """Seconds that a host takes to launch the kernels of a layer's forward pass: some 60 of them, 10 µs each."""
    node_latency_s: PositiveFloat = 15e-6
    """Seconds of a message within a node."""
    network_latency_s: PositiveFloat = 25e-6
    """Seconds of a message between nodes, for each doubling of their number."""
    host_update_bandwidth: PositiveFloat = 30e9
    """Bytes per second and device by which a host updates offloaded optimizer states: eight devices share about 240
    GB/s of a host's memory."""
    nvme_bandwidth: PositiveFloat = 1.5e9
    """Bytes per second and device of local disks: eight devices share four disks of 3 GB/s."""


EAGER = Assumptions()
"""The kernels of `transformers` as they are: what this package runs."""
FUSED = Assumptions(residual_passes=20.0, width_passes=1.5, logit_bytes=16.0, kernel_floor_s=1e-4)
"""Compiled or hand-fused kernels, as in the published runs that the model is compared with."""
