"""The rates that a device reaches: measured on such a machine, else assumed as shares of its datasheet's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmtrain.plan.predict.assumptions import DEFAULT_EFFICIENCY, EFFICIENCY, Assumptions
from llmtrain.recipe.cluster import Cluster


@dataclass(frozen=True)
class AchievedRates:
    """FLOP/s of computation, bytes per second of memory and links, seconds of a kernel's launch."""

    peak: float
    """The datasheet's FLOP/s, of which the MFU is a share."""
    matmul: float
    """Matrix products of a layer."""
    attention: float
    """A fused attention kernel."""
    memory: float
    """Kernels that only read and write the device's memory."""
    node: float
    """Each way, to other devices of the node; infinite if unknown, as for the following two."""
    network: float
    """Each way, to other nodes."""
    host: float
    """Each way, to the memory of the host."""
    launch_s: float

    @classmethod
    def of(cls, cluster: Cluster, dtype: str, assumed: Assumptions) -> AchievedRates:
        """Returns the rates of a cluster's devices in a data type, of which the datasheet has the peak."""
        device, measured = cluster.spec, cluster.measured
        reached, peak = EFFICIENCY.get(device.name, DEFAULT_EFFICIENCY), device.peak_flops[dtype]
        assert device.memory_bandwidth is not None, "`unknown` has looked"
        links = (device.node_bandwidth, device.network_bandwidth, device.host_bandwidth)
        # The bandwidth of an unused link may be unknown, but it is never used.
        node, network, host = ((rate or float("inf")) * assumed.link for rate in links)
        datasheet = cls(
            peak=peak,
            matmul=peak * reached.matmul,
            attention=peak * reached.attention,
            memory=device.memory_bandwidth * assumed.memory,
            node=node,
            network=network,
            host=host,
            launch_s=assumed.launch_s,
        )
        if measured is None:
            return datasheet
        return replace(
            datasheet,
            matmul=measured.matmul.get(dtype, datasheet.matmul),
            attention=measured.attention.get(dtype, datasheet.attention),
            memory=measured.memory_bandwidth,
            node=measured.node_bandwidth or node,
            host=measured.host_bandwidth or host,
            launch_s=measured.launch_s,
        )
