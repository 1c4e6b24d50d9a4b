"""DeepSpeed's swapping of optimizer states to a disk, without the disk: its operator cannot be built everywhere."""

from __future__ import annotations

import torch
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerStateSwapInfo


def test_bytes_come_back_as_fp32():
    """Why `optim.adamw_8bit_nvme` refuses them: state and weight get the buffers into which a disk was read."""
    weight, codes = torch.nn.Parameter(torch.zeros(8)), torch.zeros(8, dtype=torch.uint8)
    weight.ds_id, codes.ds_id = "weight", "codes"
    info = OptimizerStateSwapInfo(weight, 8, "folder", aio_handle=None)
    info.add_state_tensors([codes])
    info.set_swap_buffers([torch.zeros(8), torch.ones(8)], 8)
    assert (codes.dtype, codes.tolist()) == (torch.float32, [1.0] * 8)
