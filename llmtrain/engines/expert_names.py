"""Maps weights of DeepSpeed's blocks of experts to the Hugging Face blocks that they replaced.

`transformers` keeps the experts of a layer in two tensors, with gate and up projections joined:
`gate_up_proj` [experts, 2·inner, width] and `down_proj` [experts, width, inner]. DeepSpeed has three:
`w1` (gate) and `w3` (up) [experts, inner, width], and `w2` (down) (`deepspeed/moe/ep_repack.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from deepspeed.module_inject.auto_ep_presets.base import MoEModelPreset
from deepspeed.module_inject.auto_ep_presets.registry import get_preset
from torch import Tensor

from llmtrain.engines.pieces import Box, Region

GATE, DOWN, UP = "experts.w1", "experts.w2", "experts.w3"


def hugging_face_weights(
    names: Iterable[str], blocks: Mapping[str, str], weight: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight of `names` by its Hugging Face name, with gate and up projections joined and without aliases.

    blocks: the path of each of DeepSpeed's blocks, and its preset. weight: returns a whole tensor by DeepSpeed's name.
    """
    for name in names:
        path = next((path for path in blocks if name.startswith(f"{path}.")), None)
        if path is None:
            yield name, weight(name)
            continue
        part, preset = name.removeprefix(f"{path}."), get_preset(blocks[path])
        # DeepSpeed also registers the router under the replaced router's name, one level too deep.
        if part == UP or part.startswith(f"{preset.router_pattern}."):
            continue
        whole = weight(name)
        if part == GATE:
            whole = torch.cat([whole, weight(f"{path}.{UP}")], dim=1)
        yield f"{path}.{_own_name(part, preset)}", whole


def own_name(name: str, blocks: Mapping[str, str]) -> str:
    """Returns the Hugging Face name of a DeepSpeed weight; gate and up projections share a name."""
    path = next((path for path in blocks if name.startswith(f"{path}.")), None)
    return name if path is None else f"{path}.{_own_name(name.removeprefix(f'{path}.'), get_preset(blocks[path]))}"


def region_of_experts(name: str, local: Sequence[int], rank: int, ranks: int) -> Region:
    """Returns the location of a tensor of experts in the Hugging Face block's tensor.

    local: its shape on this rank, [experts, rows, columns]; each of `ranks` holds the same number of experts.
    """
    experts, rows, columns = local
    first = (rank * experts, rows if name.endswith(UP) else 0, 0)
    height = rows if name.endswith(DOWN) else 2 * rows
    return Region((ranks * experts, height, columns), (Box(first, (experts, rows, columns)),))


def _own_name(part: str, preset: MoEModelPreset) -> str:
    """Returns the name of a DeepSpeed weight within the Hugging Face block; GATE and UP share the joined weight's."""
    prefixes = {
        GATE: f"{preset.experts_pattern}.{preset.expert_w1}",
        UP: f"{preset.experts_pattern}.{preset.expert_w1}",
        DOWN: f"{preset.experts_pattern}.{preset.expert_w2}",
        "router.gate.": f"{preset.router_pattern}.",
        "router.": f"{preset.router_pattern}.",
        "shared_experts_gate.": f"{preset.shared_experts_gate_pattern}.",
        "shared_experts.": f"{preset.shared_experts_pattern}.",
    }
    theirs, own = next((theirs, own) for theirs, own in prefixes.items() if part.startswith(theirs))
    return own + part.removeprefix(theirs)
